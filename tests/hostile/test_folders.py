"""Every command that can meet another user's hostile run folders under a shared root."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.hostile.folders import CANARY, HOSTILE
from tests.hostile.testbed import (
    COMMAND_S_MAX,
    VICTIM_RUN,
    CommandResult,
    Testbed,
    contents,
    in_child,
    load_everything,
    open_testbed,
    run_commands,
    timed,
)

from holdfast.contracts.disk.journal import journal_lock
from holdfast.contracts.disk.paths import RunPaths

NAMES = sorted(HOSTILE)
SHARDS = 6
# These runs cannot be read at all and are listed with the reason.
UNREADABLE = frozenset(
    {
        *("pipe-spec", "pipe-journal", "sparse-journal", "sparse-spec", "sparse-request"),
        *("zero-journal", "spec-to-run", "spec-loop", "spec-no-json", "spec-deep", "spec-wrong"),
        *("spec-time", "world-huge", "outcome-huge", "outcome-times", "pipe-request"),
        *("name-of-another", "uid-of-another", "mirror-of-another"),
    }
)

# These folders are tried with all forms of each command; for the others one form is enough,
# because all forms read the same files.
EVERY_FORM = frozenset(
    {
        *("attempts-many", "cause-unknown", "escapes", "facts-forged", "names", "state-unknown"),
        *("bytes-huge", "outcome-huge", "step-huge", "times-forged", "world-huge"),
        *("log-to-secret", "logs-to-home", "pipe-log", "sparse-log", "outcome-to-secret"),
        "spec-controls",
        *("checkpoint-loop", "checkpoints-to-run", "data-loop", "data-to-secret", "pipe-data"),
        *("pipe-manifest", "pipe-metadata", "sparse-data", "sparse-manifest", "spec-wrong"),
    }
)


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    assert os.geteuid() == 0, "the attacker is another uid: run these tests as root"
    load_everything()
    with open_testbed() as made:
        yield made


@pytest.fixture(scope="module")
def index(testbed: Testbed) -> Path:
    """An empty index; each child takes a copy."""
    template = testbed.place / "template.db"
    run_commands([["runs", "--root", str(testbed.place / "none"), "--json"]], template)
    return template


def copy_of(index: Path, name: str) -> Path:
    database = index.with_name(f"{name}.db")
    for suffix in ("", "-wal", "-shm"):
        if Path(f"{index}{suffix}").exists():
            shutil.copy(f"{index}{suffix}", f"{database}{suffix}")
    return database


def check(results: list[CommandResult]) -> None:
    """No command hung, crashed, or printed a secret or a control character."""
    for one in results:
        assert not one.trace, f"{one.command}: {one.trace}"
        assert one.seconds < COMMAND_S_MAX, one.command
        words = one.output + one.warnings
        assert CANARY not in words + one.error, one.command
        for letter in "\x1b\x9b\x07\u202e":
            assert letter not in words, one.command


def read_commands(testbed: Testbed, name: str) -> list[list[str]]:
    """Commands that only read; all their forms if printed or exported content is hostile."""
    run, out = str(testbed.root / name), testbed.place / f"out-{name}"
    checkpoint = f"{run}/checkpoints/step-00000010.a0001.l01"
    commands = [
        ["show", run],
        ["checkpoints", run, "--json"],
        ["lineage", run],
        ["logs", run, "--attempt", "1"],
        ["logs", run, "--attempt", "1", "--all-ranks", "--tail", "5", "--grep", "."],
        ["events", run],
        ["wait", run, "--timeout", "0"],
        ["verify", checkpoint],
        ["export", checkpoint, "--to", "dcp", "--output", f"{out}.dcp"],
        ["doctor", "fit", run, "--gpus", "2"],
        ["prune", run, "--dry-run"],
    ]
    if name in EVERY_FORM:
        commands += [
            ["show", run, "--json"],
            ["events", run, "--json"],
            ["checkpoints", run],
            ["lineage", run, "--format", "mermaid"],
            ["lineage", run, "--format", "openlineage"],
            ["logs", run, "--attempt", "1", "--json"],
            ["logs", run],
            ["verify", checkpoint, "--json"],
            ["export", checkpoint, "--to", "torch", "--output", f"{out}.pt"],
        ]
    return commands


def write_commands(testbed: Testbed, name: str) -> list[list[str]]:
    """Commands that change the run."""
    run = str(testbed.root / name)
    checkpoint = f"{run}/checkpoints/step-00000010.a0001.l01"
    return [
        ["pin", checkpoint],
        ["unpin", checkpoint],
        ["metric", checkpoint, "accuracy=0.5"],
        ["prune", run, "--yes", "--json"],
        ["resume", run],
        ["relaunch", run],
        ["stop", run],
        ["delete", run, "--yes"],
    ]


@pytest.mark.more
@pytest.mark.parametrize("shard", range(SHARDS))
def test_commands_on_a_hostile_folder_finish_and_change_nothing_else(
    testbed: Testbed, index: Path, shard: int
) -> None:
    assert set(HOSTILE) >= EVERY_FORM
    for name in NAMES[shard::SHARDS]:
        theirs, ours = contents(testbed.root / name), testbed.belongings()
        held = lock_as_owner(testbed, name)
        try:
            database = copy_of(index, name)
            check(run_commands(read_commands(testbed, name), database))
            assert contents(testbed.root / name) == theirs, name
            check(run_commands(write_commands(testbed, name), database))
        finally:
            for handle in held:
                os.close(handle)
        assert testbed.belongings() == ours, name


def lock_as_owner(testbed: Testbed, name: str) -> list[int]:
    """Take the locks that a command would wait for, in the folder `locks-held`."""
    if name != "locks-held":
        return []
    paths = testbed.paths(name)
    held = []
    for path in (paths.orders_lock, journal_lock(paths.journal_of("cli"))):
        handle = os.open(path, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
        held.append(handle)
    return held


@pytest.mark.more
def test_unreadable_folders_do_not_hide_other_runs(testbed: Testbed, index: Path) -> None:
    database, root = copy_of(index, "all"), str(testbed.root)
    results = run_commands(
        [
            ["runs", "--root", root, "--json"],
            ["runs", "--root", root],
            ["reindex", root, "--json"],
            ["show", VICTIM_RUN, "--root", root, "--json"],
            ["runs", "--root", root, "--json"],
        ],
        database,
    )
    check(results)
    for output in (results[0].output, results[4].output):
        rows = {row["run"]: row for row in json.loads(output)}
        assert set(rows) >= {VICTIM_RUN, *NAMES}
        assert rows[VICTIM_RUN]["state"] != "unreadable"
        assert rows[VICTIM_RUN]["path"] == str(testbed.victim.run)
        unreadable = {name for name, row in rows.items() if row["state"] == "unreadable"}
        assert unreadable >= UNREADABLE
        assert all(rows[name]["reason"] for name in unreadable)
    report = json.loads(results[2].output)
    assert VICTIM_RUN in report["runs"]
    assert set(report["failed"]) >= UNREADABLE
    assert json.loads(results[3].output)["run"] == VICTIM_RUN


def _text_of(work: Callable[..., object], *arguments: object) -> str:
    return str(work(*arguments))


def _errors_of(paths: RunPaths) -> str:
    """What the server reads about the errors of a run's first attempt."""
    from holdfast.api.errors.files import ErrorFiles, ReadBudget
    from holdfast.api.errors.records import LaunchEnd
    from holdfast.api.errors.stacks import read_stacks
    from holdfast.contracts.disk.rank_logs import choose_attempt

    attempt = choose_attempt(paths, 1)
    files = ErrorFiles(attempt, {}, ReadBudget())
    found = files.of_ranks(LaunchEnd(number=1, ending="crashed", cause=""))
    return f"{found} {files.of_others()} {read_stacks(attempt, (), (), ReadBudget())}"


def test_server_indexes_readable_runs_and_reads_no_log_outside_a_run(
    testbed: Testbed, index: Path
) -> None:
    database, ours = copy_of(index, "serve"), testbed.belongings()
    theirs = {name: contents(testbed.root / name) for name in NAMES}

    def serve() -> dict[str, object]:
        os.environ["HOLDFAST_DATABASE_URL"] = f"sqlite:///{database}"
        from holdfast.api.hub import Hub
        from holdfast.api.logs import parts as logs
        from holdfast.api.store import IndexStore
        from holdfast.api.vitals import read_nodes
        from holdfast.api.watch import Watch
        from holdfast.contracts.disk.rank_logs import choose_attempt
        from holdfast.lineage.index import Index
        from holdfast.workers.nodes.heartbeats import live_step

        watch = Watch(IndexStore(Index()), Hub(), (testbed.root,))
        assert watch.lag_s() is None

        def a_round() -> str:
            watch.look()
            return ""

        rounds = [timed(f"round {number}", a_round) for number in range(2)]
        results = [one.trace for one in rounds]
        for name in NAMES:
            paths = testbed.paths(name)

            def look(paths: RunPaths = paths) -> str:
                attempt = choose_attempt(paths, 1)
                found = logs.list_logs(attempt)
                part = logs.read_log(
                    paths,
                    attempt,
                    0,
                    stream="stdout",
                    launch=None,
                    offset=None,
                    limit=1000,
                )
                return f"{found} {part.text}"

            for one in (
                timed(f"log {name}", look),
                timed(f"errors {name}", partial(_errors_of, paths)),
                timed(f"nodes {name}", partial(_text_of, read_nodes, paths, 2)),
                timed(f"step {name}", partial(_text_of, live_step, paths)),
            ):
                results.append(one.trace)
                assert CANARY not in one.output + one.error
        known = {Path(row["path"]).name for row in watch._store.live_runs()}
        return {
            "traces": [trace for trace in results if trace],
            "known": sorted(known),
            "problems": sorted(Path(name).name for name in watch.problems),
            "lag": watch.lag_s(),
        }

    said = in_child(serve)
    assert said["traces"] == []
    assert VICTIM_RUN in said["known"]
    # It is random which of two folders with the same uid is read first; the rows are correct.
    assert set(said["problems"]) >= UNREADABLE - {"uid-of-another", "mirror-of-another"}
    assert said["lag"] is not None
    assert testbed.belongings() == ours
    assert {name: contents(testbed.root / name) for name in NAMES} == theirs
