"""Nobody's folder concerns anybody else: what is asked of good runs happens in a hostile root.

The root has 100 hostile folders. Another uid has planted folders and links beside them, and holds
every lock that it can open, exclusive or shared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import pytest
from tests.hostile.folders import MANY
from tests.hostile.testbed import (
    ATTACKER,
    COMMAND_S_MAX,
    CommandResult,
    Testbed,
    in_child,
    load_everything,
    open_testbed,
    run_commands,
    timed,
)
from tests.support.other_users import as_user, held_by
from tests.support.runs import RunFolder

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths, list_runs
from holdfast.contracts.disk.visits import own_runs
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.workers.runs import operator
from holdfast.workers.runs.until_capacity import UNTIL_CAPACITY

FLOW_RUN: Final = str(uuid4())
KINDS: Final = {"exclusive": fcntl.LOCK_EX, "shared": fcntl.LOCK_SH}
# Names before, between and after those of the hostile folders.
NAMES: Final = ("a-first", "m-middle", "zz-last")


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    assert os.geteuid() == 0, "the attacker is another uid: run these tests as root"
    load_everything()
    with open_testbed(MANY) as made:
        as_user(ATTACKER, lambda: plant(made.root))
        yield made


def plant(root: Path) -> None:
    """Write what stands beside runs: folders of names that others will use, links and pipes."""
    for uid in (1, 4242):
        (root / f".holdfast-service-{uid}" / "wanted").mkdir(parents=True)
    (root / ".holdfast-service-2").symlink_to(root.parent / "victim")
    (root / "link").symlink_to(root.parent / "victim")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    claimed = RunFolder(root, "a-claims-the-flow-run", "c" * 32)
    claimed.tell("flow", EventKind.SUPERVISED, host="h", pid=1, flow_run=FLOW_RUN)
    # The name of a run that somebody else will submit.
    RunFolder(root, "wanted", "d" * 32).paths.spec.write_text("{")


@pytest.fixture(params=["exclusive", pytest.param("shared", marks=pytest.mark.more)])
def good(testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[list[RunPaths]]:
    """Good runs, all of whose files another uid tries to lock for the time of the test."""
    made = [make_good(testbed.root, f"{name}-{request.param}") for name in NAMES]
    files = [path for one in made for path in (one.directory, *one.directory.rglob("*"))]
    with held_by(ATTACKER, [testbed.root, *files], KINDS[request.param]) as held:
        names = {path.name for path in held}
        assert "spec.json" in names, "it can read the run, and lock what it can read"
        assert not {name for name in names if name.endswith(".lock")}
        yield made
    for paths in made:
        shutil.rmtree(paths.directory)


def make_good(root: Path, name: str) -> RunPaths:
    """A run with an attempt that ended, two checkpoints, and every lock file that there is."""
    run = RunFolder(root, name, uuid4().hex, {"checkpoint": {"keep": {"last": 1}}})
    run.submit(1, 2, 1_700_000_000.0)
    run.claim(1, 1_700_000_001.0)
    for step in (10, 20):
        run.commit(step, 1)
    facts = {"state": "preempted", "cause": "preemption", "evidence": [], "ended_at": 1.7e9 + 9}
    run.tell("flow", EventKind.ATTEMPT_ENDED, attempt=1, **facts)
    flow_run = FLOW_RUN if "first" in name else ""
    run.tell("flow", EventKind.SUPERVISED, host="h", pid=1, flow_run=flow_run)
    for path in (run.paths.flow_lock, run.paths.worker_lock):
        with FlowLock(path) as lock:
            assert lock.try_take()
    operator.request(run.paths, "pause", by="ann", reason="so that all locks exist")
    operator.request(run.paths, "resume", by="ann")
    make_directory(run.paths.exports)
    return run.paths


@contextmanager
def supervisors_recorded() -> Iterator[list[str]]:
    """Record the runs for which a supervisor's process would be started, and start none."""
    from holdfast.flows import start

    started: list[str] = []

    def start_here(paths: RunPaths, *_: object) -> Any:
        started.append(paths.name)
        return start.Started()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "start_here", start_here)
        yield started


def quick(result: CommandResult) -> CommandResult:
    assert not result.trace, f"{result.command}: {result.trace}"
    assert not result.error, f"{result.command}: {result.error}"
    assert result.seconds < COMMAND_S_MAX, result.command
    return result


@pytest.mark.more
def test_orders_by_commands_are_recorded_and_start_a_supervisor(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    for paths in good:
        checkpoint = f"{paths.name}:step-00000010.a0001.l01"
        commands = [
            ["pin", checkpoint],
            ["unpin", checkpoint],
            ["pause", paths.name],
            ["cancel", paths.name],
            ["prune", paths.name, "--yes", "--json"],
            ["verify", f"{paths.name}:step-00000020.a0001.l01", "--json"],
            ["show", paths.name, "--json"],
        ]
        rooted = [[*command, "--root", str(testbed.root)] for command in commands]
        results = run_commands(rooted, testbed.place / f"{paths.name}.db")
        *_, prune, verify, show = [quick(one) for one in results]
        assert [one["step"] for one in json.loads(prune.output)["deleted"]] == [10]
        assert json.loads(verify.output)["ok"]
        assert json.loads(show.output)["state"] == RunState.CANCELLED


def test_supervise_all_starts_a_supervisor_for_each_own_live_run(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    def work() -> list[Any]:
        with supervisors_recorded() as started:
            arguments = ["supervise", "--all", "--root", str(testbed.root), "--json"]
            database = testbed.place / "supervise.db"
            result = quick(_one_command(arguments, database))
            return [started, json.loads(result.output)]

    started, told = in_child(work)
    assert {paths.name for paths in good} <= set(started)
    assert {one["run"] for one in told if one["started"]} == set(started)
    mine = {paths.name for paths in own_runs(testbed.root)}
    assert set(started) <= mine


def test_submit_relaunch_and_resume_start_the_run_that_was_asked_for(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    program, spec = testbed.place / "train.py", testbed.place / "wanted.toml"
    program.write_text("")
    spec.write_text(
        f'name = "wanted"\ncommand = ["{program}"]\n'
        f'launch.working_directory = "{testbed.place}"\nresources.gpus_per_node = 1\n'
    )

    def work() -> list[str]:
        with supervisors_recorded() as started:
            database = testbed.place / "submit.db"
            root = ["--root", str(testbed.root)]
            quick(_one_command(["submit", str(spec), "--no-preflight", *root], database))
            for paths in good:
                operator.request(paths, "pause", by="ann")
                quick(_one_command(["resume", paths.name, *root], database))
                quick(_one_command(["relaunch", paths.name, *root], database))
            return started

    started = in_child(work)
    assert started[0].startswith("wanted.r")
    assert set(started[1:]) == {paths.name for paths in good}
    assert all(load_history(paths).state.is_live for paths in good)


def _one_command(arguments: list[str], database: Path) -> CommandResult:
    from tests.hostile.testbed import _run

    os.environ["HOLDFAST_DATABASE_URL"] = f"sqlite:///{database}"
    return _run(arguments)


def in_flow(name: str, work: Callable[[], Any]) -> Any:
    """Run a flow's function in a child, within the time of a command."""
    from holdfast.flows import operations

    def child() -> Any:
        with pytest.MonkeyPatch.context() as patch, supervisors_recorded() as started:
            patch.setattr(operations, "get_run_logger", lambda: logging.getLogger("test"))
            found: list[Any] = []

            def run() -> str:
                found.append(work())
                return ""

            quick(timed(name, run))
            return [found[0], started]

    return in_child(child)


def test_flows_of_operators_work_on_all_good_runs(testbed: Testbed, good: list[RunPaths]) -> None:
    from holdfast.flows import operations

    for paths in good:
        operator.request(paths, "pause", by="ann", reason=UNTIL_CAPACITY)
    root = str(testbed.root)
    pruned, _ = in_flow("prune", lambda: operations.prune.fn(root=root))
    steps = {one["run"]: [each["step"] for each in one["deleted"]] for one in pruned["runs"]}
    assert {paths.name: steps[paths.name] for paths in good} == {p.name: [10] for p in good}
    resumed, started = in_flow("resume", lambda: operations.resume.fn(root=root))
    assert set(resumed["resumed"]) >= {paths.name for paths in good}
    assert set(started) >= {paths.name for paths in good}
    assert set(started) <= {paths.name for paths in own_runs(testbed.root)}


def test_a_cancellation_by_prefect_reaches_the_run_of_the_flow(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import Cancelling

    from holdfast.flows.operations import prune
    from holdfast.flows.supervisor.cancellation import cancel_run_of_flow, find_supervised

    parameters = {"root": str(testbed.root)}
    made = FlowRun(id=UUID(FLOW_RUN), flow_id=uuid4(), name="otter", parameters=parameters)

    def cancel() -> None:
        cancel_run_of_flow(prune, made, Cancelling())

    def find() -> str:
        paths = find_supervised(testbed.root, FLOW_RUN)
        return str(paths.directory) if paths else ""

    found, _ = in_flow("find", find)
    assert Path(found).name.startswith("a-first")
    in_flow("cancel", cancel)
    assert load_history(RunPaths(Path(found))).state is RunState.CANCELLED


def test_a_service_and_a_lost_supervisor_s_successor_take_up_every_good_run(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    from holdfast.flows.supervisor import service
    from holdfast.lineage.index import Index

    def work() -> list[str]:
        taken: list[str] = []
        with pytest.MonkeyPatch.context() as patch, Index() as index:
            patch.setattr(service, "carry", lambda paths, *_: _take(paths, taken))
            one = service.SupervisorService(testbed.root, index, logging.getLogger("test"))

            def look() -> str:
                one._look_at_all()
                return ""

            with one._only_one():
                quick(timed("look", look))
            for thread in one._threads.values():
                thread.join(COMMAND_S_MAX)
        return taken

    def _take(paths: RunPaths, taken: list[str]) -> Any:
        with FlowLock(paths.flow_lock) as lock:
            if lock.try_take():
                taken.append(paths.name)
        return load_history(paths)

    taken = in_child(work)
    assert {paths.name for paths in good} <= set(taken)
    assert set(taken) <= {paths.name for paths in own_runs(testbed.root)}


@pytest.mark.more
def test_the_server_and_a_reindex_read_every_good_run(
    testbed: Testbed, good: list[RunPaths]
) -> None:
    database = testbed.place / "serve.db"

    def serve() -> Any:
        os.environ["HOLDFAST_DATABASE_URL"] = f"sqlite:///{database}"
        from holdfast.api.hub import Hub
        from holdfast.api.store import IndexStore
        from holdfast.api.watch import Watch
        from holdfast.lineage.index import Index

        watch = Watch(IndexStore(Index()), Hub(), (testbed.root,))
        watch.look()
        for paths in list_runs(testbed.root):
            if paths in good:
                watch._reconcile_own(paths)
        return [sorted(map(str, watch.unreadable())), watch.lag_s() is not None]

    began = time.monotonic()
    unreadable, is_complete = in_child(serve)
    assert time.monotonic() - began < 60
    assert is_complete
    assert not {str(paths.directory) for paths in good} & set(unreadable)
    (result,) = run_commands([["reindex", str(testbed.root), "--json"]], database)
    report = json.loads(quick(result).output)
    assert {paths.name for paths in good} <= set(report["runs"])
