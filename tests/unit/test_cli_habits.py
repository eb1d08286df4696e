"""Commands for daily use: wait, events, filters of logs and runs, several runs, completion."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.unit.test_cli import ended_run

from holdfast.cli.shared.arguments import complete_run, parse_moment
from holdfast.cli.shared.output import time_text
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs.run_folders import create_run

__all__ = ["ended_run"]
HOUR_S = 3600.0


@pytest.fixture
def live_run(root: Path, home: Path) -> RunPaths:
    """A second run, live and without an attempt."""
    spec = RunSpec.model_validate(
        {"name": "wrack", "command": ["train.py"], "launch": {"working_directory": str(home)}}
    )
    return create_run(spec, root, created_by="ann")


def write_log(run: RunPaths, rank: int, text: str, *, age_s: float = 0.0) -> Path:
    path = run.attempt(1).rank_log(0, 1, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_wait_returns_1_for_a_run_that_did_not_complete(call: Call, ended_run: RunPaths) -> None:
    call("cancel", "kelp")
    waited = call("wait", "kelp", "--json")
    assert waited.status == 1
    assert [(one["run"], one["state"]) for one in waited.json] == [("kelp", "cancelled")]


def test_wait_gives_up_after_its_timeout(call: Call, live_run: RunPaths) -> None:
    waited = call("wait", "wrack", "--timeout", 0, "--json")
    assert waited.status == 1
    assert waited.json[0]["state"] == "queued"
    assert waited.json[0]["reason"] == "it has not ended"


def test_events_are_selected_by_kind_time_and_number(call: Call, ended_run: RunPaths) -> None:
    with JournalWriter(ended_run.journal_of("flow")) as journal:
        for number in range(3):
            journal.append(EventKind.NOTE, text=f"note {number}")
    found = call("events", "kelp", "--kind", "note", "--json").json
    assert [one["data"]["text"] for one in found] == ["note 0", "note 1", "note 2"]
    last = call("events", "kelp", "--kind", "note", "--tail", 1, "--json").json
    assert [one["data"]["text"] for one in last] == ["note 2"]
    assert call("events", "kelp", "--since", "2999-01-01", "--json").json == []
    assert len(call("events", "kelp", "--since", "1h", "--json").json) > 3
    text = call("events", "kelp", "--kind", "resumed").out
    assert "resumed" in text
    assert "checkpoint null" in text
    assert call("events", "kelp", "--since", "yesterday").status == 2


def test_events_follow_ends_with_the_run(call: Call, ended_run: RunPaths) -> None:
    call("cancel", "kelp")
    lines = call("events", "kelp", "--follow", "--json").out.splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert "operator_request" in kinds


def test_show_and_cancel_accept_several_runs(
    call: Call, ended_run: RunPaths, live_run: RunPaths
) -> None:
    shown = call("show", "kelp", "wrack", "--json").json
    assert [one["run"] for one in shown] == ["kelp", "wrack"]
    assert call("show", "kelp", "--json").json["run"] == "kelp", "one run is one object"
    done = call("cancel", "kelp", "wrack", "--json")
    assert done.status == 0
    assert {one["state"] for one in done.json} == {"cancelled"}
    assert call("cancel", "kelp", "nobody").status == 3


def test_one_refused_run_does_not_stop_the_others(
    call: Call, ended_run: RunPaths, live_run: RunPaths
) -> None:
    call("cancel", "kelp")
    done = call("pause", "kelp", "wrack", "--json")
    assert done.status != 0
    assert [one["run"] for one in done.json] == ["wrack"]
    assert "is cancelled, so there is nothing to pause" in done.err


def test_show_watches_until_the_run_ends(call: Call, ended_run: RunPaths) -> None:
    call("cancel", "kelp")
    assert "cancelled" in call("show", "kelp", "--watch").out
    assert call("show", "kelp", "--watch", "--json").status == 2


def test_runs_are_filtered_by_state_and_user(
    call: Call, ended_run: RunPaths, live_run: RunPaths
) -> None:
    def names(*arguments: str) -> list[str]:
        return [one["run"] for one in call("runs", *arguments, "--json").json]

    assert names("--user", "ann") == ["wrack"]
    assert names("--user", "tester", "--limit", "1") == ["kelp"]
    assert names("--state", "completed") == []
    assert sorted(names("--state", "queued", "--state", "paused")) == sorted(
        one.name for one in (ended_run, live_run) if load_history(one).state == "queued"
    )
    assert call("runs", "--state", "sleeping").status == 2


def test_logs_of_all_ranks_can_be_searched_and_truncated(call: Call, ended_run: RunPaths) -> None:
    write_log(ended_run, 0, "step 1\nstep 2\nloss 3.5\n")
    write_log(ended_run, 1, "step 1\nno end of line")
    assert call("logs", "kelp", "--tail", 1).out == "loss 3.5\n"
    nothing = call("logs", "kelp", "--tail", 0)
    assert (nothing.out, "no output" in nothing.err) == ("", False)
    assert call("logs", "kelp", "--grep", r"^step \d$").out == "step 1\nstep 2\n"
    assert call("logs", "kelp", "--all-ranks", "--grep", "step 1|end").out == (
        "0: step 1\n1: step 1\n1: no end of line\n"
    )
    files = call("logs", "kelp", "--all-ranks", "--tail", 1, "--json").json["logs"]
    assert [one["text"] for one in files] == ["0: loss 3.5\n", "1: no end of line\n"]
    assert call("logs", "kelp", "--grep", "(").status == 2


def test_files_with_unknown_names_are_not_shown_as_logs(call: Call, ended_run: RunPaths) -> None:
    log = write_log(ended_run, 0, "ours\n")
    (log.parent / "rank-x.y.stdout.log").write_text("theirs\n")
    shown = call("logs", "kelp", "--all-ranks")
    assert (shown.status, shown.out) == (0, "0: ours\n")


def test_an_event_with_line_breaks_prints_as_one_line(call: Call, ended_run: RunPaths) -> None:
    with JournalWriter(ended_run.journal_of("flow")) as journal:
        journal.append(EventKind.NOTE, text="first\n2026-01-01 00:00:00  run_ended  forged")
    assert len(call("events", "kelp", "--kind", "note").out.splitlines()) == 1


def test_logs_without_new_output_are_left_out(call: Call, ended_run: RunPaths) -> None:
    write_log(ended_run, 0, "old\n", age_s=2 * HOUR_S)
    write_log(ended_run, 1, "new\n")
    assert call("logs", "kelp", "--all-ranks", "--since", "1h").out == "1: new\n"


def test_reindex_is_also_a_db_command(call: Call, ended_run: RunPaths) -> None:
    direct, grouped = call("reindex", "--json"), call("db", "reindex", "--json")
    assert direct.json["runs"] == grouped.json["runs"] == ["kelp"]


def test_run_names_are_completed_by_the_shell(ended_run: RunPaths, live_run: RunPaths) -> None:
    context = type("Context", (), {"params": {"root": str(ended_run.directory.parent)}})()
    assert complete_run(context, "k") == ["kelp"]
    assert complete_run(context, "") == ["kelp", "wrack"]
    context.params["root"] = "/nonexistent"
    assert complete_run(context, "") == []


@pytest.mark.parametrize(
    ("text", "age_s"), [("90s", 90), ("15m", 900), ("2h", 7200), ("3d", 259200)]
)
def test_a_duration_means_that_long_before_now(text: str, age_s: float) -> None:
    assert parse_moment(text) == pytest.approx(time.time() - age_s, abs=5)


def test_a_run_of_another_root_is_found_by_every_command(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("show", "kelp")
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path / "elsewhere"))
    for command in ("show", "checkpoints", "lineage", "events", "cancel"):
        assert call(command, "kelp").status == 0, command
    assert call("cancel", "kelp", "--root", tmp_path / "elsewhere").status == 3


def test_a_name_found_in_several_other_roots_is_refused(
    call: Call, ended_run: RunPaths, live_run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ended_run.directory.parent
    spec = json.loads(live_run.spec.read_text())["spec"]
    create_run(RunSpec.model_validate(spec), root.parent / "second", created_by="ann")
    for each in (root, root.parent / "second"):
        call("show", "wrack", "--root", each)
    monkeypatch.setenv("HOLDFAST_ROOT", str(root.parent / "third"))
    refused = call("cancel", "wrack")
    assert refused.status == 2
    assert "names several runs" in refused.err
    assert load_history(live_run).state == "queued"


def test_prune_deletes_nothing_when_answered_no(
    call: Call, ended_run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    before = ended_run.list_checkpoints()
    assert call("prune", "kelp").status == 5
    assert ended_run.list_checkpoints() == before


def test_time_can_name_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert time_text(0.0) == "1970-01-01 09:00:00"
        assert time_text("1970-01-01T00:00:00Z", zone=True) == "1970-01-01 09:00:00 JST"
        assert time_text(None, zone=True) == "-"
    finally:
        monkeypatch.undo()
        time.tzset()
