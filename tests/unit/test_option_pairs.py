"""Pairs of options that meet: each has the effects of both, or is refused by both names.

The pairs of output options are enumerated from the commands' own parsers. One without a row fails
the test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import T0, RunFolder, build_sample_runs
from typer.core import TyperOption

from holdfast.cli.main import all_commands
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState, Cause

# The options that choose what a command prints, how long it continues, or whether it acts.
OUTPUT: Final = ("--json", "--follow", "--watch", "--wait", "--format", "--dry-run", "--stay")
NEWEST: Final = "gpt:step-00000200.a0003.l01"
FORMS: Final = {*OUTPUT, "--plot", "--report", "--spec"}
# Words of a call, and the parts of its refusal.
REFUSED: Final[dict[tuple[str, str, str], tuple[str, tuple[str, ...]]]] = {
    ("runs", "--watch", "--json"): ("--watch --json", ("--watch", "--json")),
    ("show", "--watch", "--json"): ("gpt --watch --json", ("--watch", "--json")),
    ("show", "--watch", "--spec"): ("gpt --watch --spec", ("--watch", "--spec")),
    ("lineage", "--format", "--json"): ("gpt --format dot --json", ("--json", "--format dot")),
    ("submit", "--wait", "--dry-run"): ("SPEC --wait --dry-run", ("--wait", "--dry-run")),
    ("fork", "--wait", "--dry-run"): (
        f"{NEWEST} --name x --wait --dry-run",
        ("--wait", "--dry-run"),
    ),
    ("supervise", "--stay", "--json"): ("--stay --json", ("--stay", "--json")),
}
# Pairs of other options, which are refused too.
OTHERS: Final = {
    "logs gpt --rank 1 --all-ranks": ("--rank", "--all-ranks"),
    "logs gpt --attempt 1 --all-attempts": ("--attempt", "--all-attempts"),
    "prune gpt --dry-run --yes": ("--yes", "--dry-run"),
    "delete gpt --dry-run --yes": ("--yes", "--dry-run"),
    "checkpoints gpt --mode max": ("--mode", "--best"),
    "supervise gpt --stay": ("--stay",),
    "supervise gpt --all": ("--all",),
    "serve --key FOLDER/key.pem": ("--key", "--certificate"),
    "init FOLDER/x --partition gpu --executor local": ("--partition", "local"),
    "simulate SPEC --trace x --history-days 2 --cost step_s=1": ("--trace", "--history-days"),
    "doctor fit gpt --gpus 0": ("--gpus",),
}
# Pairs whose effects need a run that trains, and the tests that observe them.
ELSEWHERE: Final = {
    ("submit", "--wait", "--json"): "tests/process/test_cli_local.py",
    ("fork", "--wait", "--json"): "tests/process/test_cli_local.py",
    ("bench", "--plot", "--json"): "tests/process/test_bench.py",
    ("drill", "--report", "--json"): "tests/process/test_drill.py",
    ("simulate", "--plot", "--json"): "tests/unit/test_simulation.py",
}


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each command with its name."""
    for word, command in group.commands.items():
        whole = f"{name} {word}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, whole)
        else:
            yield whole, command


def output_pairs() -> set[tuple[str, str, str]]:
    """Each pair of output options of a command. The `--spec` of `fork` is a file."""
    found = set()
    for name, command in commands(all_commands()):
        options = [max(one.opts, key=len) for one in command.params if isinstance(one, TyperOption)]
        mine = [one for one in options if one in FORMS and (name, one) != ("fork", "--spec")]
        found |= {(name, *pair) for pair in combinations(mine, 2)}
    return found


def effects(call: Call, spec: Path) -> dict[tuple[str, str, str], bool]:
    """Pairs that have the effects of both options."""

    def lines(text: str) -> list[Any]:
        return [json.loads(line) for line in text.splitlines()]

    planned = call("prune", "kelp", "--dry-run", "--json").json
    deleted = call("delete", "kelp", "--dry-run", "--json").json
    forked = call("fork", NEWEST, "--name", "x", "--dry-run", "--json").json
    shown = call("show", "gpt", "--spec", "--json").json["settings"]
    events = call("events", "gpt", "--json").json
    return {
        ("show", "--spec", "--json"): shown["resources.gpus_per_node"]["value"] == 2,
        ("events", "--follow", "--json"): lines(call("events", "gpt", "--follow", "--json").out)
        == events,
        ("logs", "--follow", "--json"): [
            one["text"] for one in lines(call("logs", "gpt", "--follow", "--json").out)
        ]
        == ["rank 0\n"],
        ("submit", "--dry-run", "--json"): call("submit", spec, "--dry-run", "--json").json
        == call("submit", spec, "--dry-run").json,
        ("fork", "--dry-run", "--json"): forked["run"] == "x",
        ("prune", "--dry-run", "--json"): planned["dry_run"] and len(planned["deleted"]) == 2,
        ("delete", "--dry-run", "--json"): deleted["run"] == "kelp",
    }


@pytest.fixture
def spec(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample runs with a log, an ended run `kelp`, and a spec."""
    root.mkdir(parents=True)
    for run in build_sample_runs(root):
        if run.name == "gpt" and (run.paths.attempt(3).directory).is_dir():
            log = run.paths.attempt(3).rank_log(0, 1, 0)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("rank 0\n")
    monkeypatch.chdir(tmp_path)
    kelp = RunFolder(root, "kelp", "c" * 32, {"checkpoint": {"keep": {"last": 1}}})
    kelp.submit(1, 2, T0)
    for step in (10, 20, 30):
        kelp.commit(step, 1)
    kelp.tell("flow", EventKind.DECISION, after_attempt=1, action="stop", gpus=2, reason="x")
    kelp.record_attempt_end(1, AttemptState.FAILED, Cause.USER_ERROR, 30, T0 + 40)
    (tmp_path / "train.py").touch()
    path = tmp_path / "spec.toml"
    path.write_text('name = "new"\ncommand = ["train.py"]\nconfig.steps = 5\n')
    return path


@pytest.mark.more
def test_each_pair_of_output_options_has_its_effects(call: Call, spec: Path) -> None:
    seen = effects(call, spec)
    assert output_pairs() == seen.keys() | REFUSED.keys() | ELSEWHERE.keys()
    assert [pair for pair, has_effects in seen.items() if not has_effects] == []
    # The others do what the options say without each other.
    assert len(call("checkpoints", "kelp", "--json").json) == 3


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        *((f"{pair[0]} {words}", parts) for pair, (words, parts) in REFUSED.items()),
        *OTHERS.items(),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_both_names(
    words: str, parts: tuple[str, ...], call: Call, spec: Path, tmp_path: Path
) -> None:
    (tmp_path / "key.pem").write_text("key")
    known = {"SPEC": str(spec)}
    given = [known.get(word, word).replace("FOLDER", str(tmp_path)) for word in words.split()]
    done = call(*given)
    assert done.status == 2, done
    assert all(part in done.err for part in parts), done.err
    assert done.out == ""
