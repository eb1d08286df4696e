"""Tags and notes of runs and checkpoints: what counts, what is refused, and who shows them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, problem_with_facts
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.annotations import (
    ANNOTATIONS,
    NONE,
    NOTE_CHARACTERS_MAX,
    Annotation,
    annotate,
    fold_annotations,
)
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.tags import TAGS_MAX
from holdfast.workers.runs.run_folders import is_same_spec, read_record

NAME = "step-00000010.a0001.l01"
OTHER = "step-00000020.a0001.l01"


@pytest.fixture
def run(root: Path) -> RunFolder:
    made = RunFolder(root, "kelp", "a" * 32, {"tags": ("llm", "base")})
    made.submit(1, 2, T0)
    for step in (10, 20):
        made.commit(step, 1, at=T0 + step)
    return made


def line(number: int, **data: Any) -> Event:
    return Event(
        writer=ANNOTATIONS,
        opening=1,
        sequence=number,
        time=T0 - number,
        kind=EventKind.ANNOTATED,
        data=data,
    )


def own(run: RunFolder) -> Annotation:
    return fold_annotations(load_events(run.paths), run.spec.tags)[""]


def test_lines_add_and_remove_and_the_newest_note_counts() -> None:
    # The clock was set back, and the order of the lines counts.
    lines = [
        line(1, tags_added=["a", "b"], note="first", by="ann"),
        line(2, tags_removed=["llm", "gone"], by="ben"),
        line(3, tags_added=["c"], note=" second ", by="ben"),
        line(4, checkpoint=NAME, tags_added=["best"], by="ann"),
        line(5, checkpoint=f"kelp:{NAME}", note="kept", by="ann"),
        line(6, tags_added=["b"], tags_removed=["a"], by="ann"),
    ]
    assert fold_annotations(lines, ["llm", "base"]) == {
        "": Annotation(tags=("b", "base", "c"), note="second", note_by="ben", note_at=T0 - 3),
        NAME: Annotation(tags=("best",), note="kept", note_by="ann", note_at=T0 - 5),
    }
    removed = fold_annotations([*lines, line(7, note="", by="ann")], ["llm", "base"])[""]
    assert removed.facts == {
        "tags": ["b", "base", "c"],
        "note": None,
        "note_by": None,
        "note_at": None,
    }
    assert fold_annotations([]) == {"": NONE}


@pytest.mark.parametrize(
    "data",
    [
        {"tags_added": ["a b", "", "x" * 65, "-a", "tag\n", "\u202ea", "ärger", "a" * 100_000]},
        {"note": "x" * (NOTE_CHARACTERS_MAX + 1)},
        {"note": "a\x1b[31m"},
        {"note": "a\u202eb"},
        {"note": "a\u200bb"},
        {"checkpoint": "../../etc", "tags_added": ["x"]},
        {"checkpoint": "step-1", "note": "x"},
        {},
    ],
)
def test_what_would_be_refused_is_ignored_in_a_line(data: dict[str, Any]) -> None:
    before = line(1, tags_added=["a"], note="plain", by="ann")
    assert problem_with_facts(EventKind.ANNOTATED, data) is None
    assert fold_annotations([before, line(2, **data)]) == fold_annotations([before])


@pytest.mark.parametrize(
    "data",
    [
        {"tags_added": "a"},
        {"tags_added": [["a"]]},
        {"tags_removed": {"a": 1}},
        {"note": ["a"]},
        {"checkpoint": 5},
        {"by": 5},
    ],
)
def test_a_line_of_other_types_is_damaged(data: dict[str, Any]) -> None:
    assert problem_with_facts(EventKind.ANNOTATED, data)


def test_a_line_with_a_million_tags_adds_as_many_as_fit() -> None:
    many = line(1, tags_added=[f"t{number}" for number in range(1_000_000)])
    later = line(2, tags_added=["late"], tags_removed=[f"t{number}" for number in range(10**6)])
    found = fold_annotations([many], ["first"])[""]
    assert len(found.tags) == TAGS_MAX
    assert "first" in found.tags
    assert fold_annotations([many, later], ["first"])[""].tags == ("first", "late")


def test_writers_at_the_same_time_all_count(run: RunFolder) -> None:
    def write(number: int) -> None:
        for turn in range(3):
            annotate(run.paths, add=[f"w{number}.{turn}"], by=f"user-{number}", via="cli")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    expected = {"llm", "base"} | {f"w{one}.{turn}" for one in range(4) for turn in range(3)}
    assert set(own(run).tags) == expected
    lines = [e for e in load_events(run.paths) if e.kind is EventKind.ANNOTATED]
    assert len({(e.writer, e.opening, e.sequence) for e in lines}) == 12


def test_each_line_has_who_and_what(run: RunFolder) -> None:
    done = annotate(
        run.paths, NAME, add=["b", "a", "b"], remove=["c"], note="ok\n", by="ann", via="api"
    )
    assert (done.tags, done.note, done.note_by) == (("a", "b"), "ok", "ann")
    annotate(run.paths, remove=["llm"], by="ben", via="cli")
    first, second = (e.data for e in load_events(run.paths) if e.kind is EventKind.ANNOTATED)
    assert first == {
        "checkpoint": NAME,
        "tags_added": ["a", "b"],
        "tags_removed": ["c"],
        "note": "ok\n",
        "by": "ann",
        "via": "api",
    }
    assert second == {"tags_removed": ["llm"], "by": "ben", "via": "cli"}
    assert own(run).tags == ("base",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "expected a tag to add, a tag to remove, or a note"),
        ({"add": ["a b"]}, "'a b': expected a tag of 1 to 64 letters"),
        ({"add": [""]}, "'': expected a tag"),
        ({"remove": ["\x1b[31m"]}, "'\\x1b[31m': expected a tag"),
        ({"add": ["a"], "remove": ["a"]}, "a: expected a tag to add or to remove, not both"),
        ({"add": [f"t{n}" for n in range(TAGS_MAX + 1)]}, "33 tags, expected at most 32"),
        ({"note": "x" * 4001}, "a note of 4001 characters, expected at most 4000"),
        ({"note": "ab\x00"}, "character '\\x00' at position 3"),
        ({"note": "a\u2066b"}, "character '\\u2066' at position 2"),
        ({"note": "\ufeff"}, "character '\\ufeff' at position 1"),
        ({"note": "\ud800"}, "character '\\ud800' at position 1"),
    ],
)
def test_what_is_no_tag_and_no_note_is_refused(
    run: RunFolder, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as error:
        annotate(run.paths, **given, by="ann", via="cli")
    assert said in str(error.value)
    assert EventKind.ANNOTATED not in {event.kind for event in load_events(run.paths)}


def test_emoji_and_other_scripts_are_notes(run: RunFolder) -> None:
    text = "👩‍🔬 می‌خواهم\n\tzweite Zeile"
    assert annotate(run.paths, note=text, by="ann", via="cli").note == text


def test_a_full_run_takes_no_more_tags(run: RunFolder) -> None:
    annotate(run.paths, add=[f"t{number}" for number in range(30)], by="ann", via="cli")
    with pytest.raises(SpecError, match="run kelp has 32 tags of at most 32"):
        annotate(run.paths, add=["more"], by="ann", via="cli")
    found = annotate(run.paths, add=["more"], remove=["llm"], by="ann", via="cli")
    assert "more" in found.tags


def test_missing_and_deleted_checkpoints_are_not_annotated(run: RunFolder) -> None:
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        annotate(run.paths, "step-00000099.a0001.l01", add=["a"], by="ann", via="cli")
    run.delete(NAME, "rule")
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        annotate(run.paths, NAME, add=["a"], by="ann", via="cli")


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (["a b"], "'a b': expected a tag"),
        ([f"t{number}" for number in range(33)], "33 tags, expected at most 32"),
        (["x" * 65], "expected a tag of 1 to 64"),
        ([""], "'': expected a tag"),
    ],
)
def test_a_spec_with_wrong_tags_is_refused(tags: list[str], said: str) -> None:
    with pytest.raises(ValueError, match="tags") as error:
        RunSpec.model_validate({"name": "kelp", "command": ["train.py"], "tags": tags})
    assert said in str(error.value)


def test_a_spec_with_other_tags_is_the_same_spec(run: RunFolder) -> None:
    record = read_record(run.paths)
    for tags in ((), ("other",)):
        spec = RunSpec(name="kelp", command=("train.py",), tags=tags)
        assert is_same_spec(record, spec)
    assert not is_same_spec(record, RunSpec(name="kelp", command=("other.py",), tags=("llm",)))


def test_commands_change_and_show_them(call: Call, run: RunFolder) -> None:
    done = call("annotate", "kelp", "--tag", "a", "--untag", "llm", "--note", "bad data", "--json")
    assert done.json == {
        "run": "kelp",
        "checkpoint": None,
        "tags": ["a", "base"],
        "note": "bad data",
    }
    both = call("annotate", "kelp:step-10", "kelp:latest", "--tag", "eval")
    assert both.out.splitlines() == [
        f"kelp:{NAME} has 1 tag: eval",
        f"kelp:{OTHER} has 1 tag: eval",
    ]
    by_path = call("annotate", str(run.paths.checkpoint(NAME)), "--note", "the good one", "--json")
    assert by_path.json["checkpoint"] == f"kelp:{NAME}"
    shown = call("show", "kelp", "--json").json
    assert (shown["tags"], shown["note"]) == (["a", "base"], "bad data")
    assert shown["note_by"]
    assert shown["note_at"]
    assert "bad data" in call("show", "kelp").out
    assert call("runs", "--json").json[0]["tags"] == ["a", "base"]
    assert "a, base" in call("runs").out
    assert call("runs", "--tag", "a", "--tag", "base", "--json").json
    assert call("runs", "--tag", "a", "--tag", "llm", "--json").json == []
    rows = {row["step"]: row for row in call("checkpoints", "kelp", "--json").json}
    assert (rows[10]["tags"], rows[10]["note"]) == (["eval"], "the good one")
    assert "eval" in call("checkpoints", "kelp").out


def test_the_annotation_of_a_deleted_checkpoint_is_shown_nowhere(
    call: Call, run: RunFolder
) -> None:
    call("annotate", f"kelp:{NAME}", "--tag", "eval", "--note", "the good one")
    run.delete(NAME, "rule")
    rows = {row["step"]: row for row in call("checkpoints", "kelp", "--json").json}
    assert rows[10]["state"] == "deleted"
    assert (rows[10]["tags"], rows[10]["note"], rows[10]["note_at"]) == ([], None, None)
    assert "the good one" in json.dumps([e.data for e in load_events(run.paths)])


def test_one_refused_target_does_not_keep_the_others_from_theirs(
    call: Call, run: RunFolder
) -> None:
    run.delete(NAME, "rule")
    done = call("annotate", f"kelp:{NAME}", "kelp", "--tag", "a")
    assert done.status == 3
    assert "no committed checkpoint" in done.err
    assert "kelp has 3 tags: a, base, llm" in done.out
    assert call("annotate", "nobody", "--tag", "a").status == 3
    refused = call("annotate", "kelp", "--tag", "a b")
    assert refused.status == 2
    assert "expected a tag of 1 to 64" in refused.err
