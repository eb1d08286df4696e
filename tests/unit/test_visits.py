"""Work on many runs: no folder's error ends the work on the others."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling
from tests.support.other_users import STRANGER
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths, list_runs
from holdfast.contracts.disk.visits import own_runs, visit
from holdfast.contracts.errors import (
    LineageError,
    RunConflictError,
    RunFailedError,
    UnreadableRunError,
)
from holdfast.contracts.records import history_cache
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.flows import operations, start
from holdfast.flows.supervisor import service
from holdfast.flows.supervisor.cancellation import cancel_run_of_flow, find_supervised
from holdfast.flows.supervisor.flow_lock import service_folder
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import deletion
from holdfast.workers.runs import operator
from holdfast.workers.runs.until_capacity import UNTIL_CAPACITY, ready_runs

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("home")]
FLOW_RUN = str(uuid4())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a good run between a damaged one of this user's and a hostile one."""
    good = RunFolder(tmp_path, "mine", "a" * 32, {"checkpoint": {"keep": {"last": 1}}})
    good.submit(1, 2, 1.7e9)
    for step in (10, 20):
        good.commit(step, 1)
    good.tell("flow", EventKind.SUPERVISED, host="h", pid=1, flow_run=FLOW_RUN)
    damaged = RunFolder(tmp_path, "bad", "b" * 32)
    damaged.paths.spec.write_text("{")
    hostile = RunFolder(tmp_path, "evil", "e" * 32)
    # It claims the flow run too.
    hostile.tell("flow", EventKind.SUPERVISED, host="h", pid=1, flow_run=FLOW_RUN)
    give_away(hostile.paths.directory)
    unreadable = RunFolder(tmp_path, "ugly", "c" * 32)
    unreadable.paths.journal.mkdir(exist_ok=True)
    os.mkfifo(unreadable.paths.journal / "x.jsonl")
    give_away(unreadable.paths.directory)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "spec.json").symlink_to("spec.json")
    return tmp_path


def give_away(folder: Path) -> None:
    """Make the folder and everything in it another user's."""
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, STRANGER, STRANGER)


def test_a_run_that_cannot_be_read_is_yielded_with_the_reason(root: Path) -> None:
    seen = {one.paths.name: one for one in visit(list_runs(root), load_history)}
    assert set(seen) == {"bad", "evil", "loop", "mine", "ugly"}
    assert seen["mine"].result is not None
    assert seen["mine"].result.state.is_live
    assert seen["mine"].reason == ""
    assert "not a valid RunRecord" in seen["bad"].reason
    assert "not a regular file" in seen["ugly"].reason
    assert [paths.name for paths in own_runs(root)] == ["bad", "loop", "mine"]


def test_no_error_ends_a_loop_but_those_that_concern_all_runs(root: Path) -> None:
    errors: list[Exception] = [
        OSError("away"),
        UnreadableRunError("damaged"),
        KeyError("x"),
        RuntimeError("Symlink loop"),
        AssertionError("a bug"),
    ]
    raised = iter(errors)

    def fail(paths: RunPaths) -> None:
        raise next(raised)

    seen = list(visit(list_runs(root), fail))
    assert [one.error for one in seen] == errors
    reasons = ["away", "damaged", "KeyError: 'x'", "RuntimeError: Symlink loop"]
    assert [one.reason for one in seen] == [*reasons, "AssertionError: a bug"]
    raised = iter([LineageError("no database")])
    with pytest.raises(LineageError):
        list(visit(list_runs(root), fail, raises=(LineageError,)))


def test_a_cancellation_finds_the_run_behind_folders_that_cannot_be_read(root: Path) -> None:
    assert find_supervised(root, FLOW_RUN) == RunPaths(root / "mine")
    assert find_supervised(root, str(uuid4())) is None

    parameters = {"root": str(root)}
    made = FlowRun(id=UUID(FLOW_RUN), flow_id=uuid4(), name="otter", parameters=parameters)
    cancel_run_of_flow(operations.prune, made, Cancelling(message="ann: wrong data"))
    asked = load_history(RunPaths(root / "mine")).pending_request
    assert asked is not None
    assert (asked["action"], asked["by"]) == ("cancel", "prefect flow run otter")
    assert asked["reason"] == "ann: wrong data"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.mark.usefixtures("log")
def test_the_flow_prune_reports_what_it_cannot_read_and_prunes_the_rest(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = operations.prune.fn(root=str(root))
    assert [one["run"] for one in done["runs"]] == ["mine"]
    assert [one["step"] for one in done["runs"][0]["deleted"]] == [10]
    assert set(done["unreadable"]) == {"bad", "loop"}
    assert "bad: not pruned: " in caplog.text


@pytest.mark.usefixtures("log")
def test_a_prune_that_fails_in_one_run_fails_after_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunFolder(root, "kelp", "d" * 32, {"checkpoint": {"keep": {"last": 1}}})
    real = deletion.prune

    def prune(paths: RunPaths, **options: Any) -> dict[str, Any]:
        if paths == other.paths:
            raise OSError("read-only file system")
        return real(paths, **options)

    monkeypatch.setattr(deletion, "prune", prune)
    with pytest.raises(RunFailedError, match="not pruned: kelp: read-only file system"):
        operations.prune.fn(root=str(root))
    names = [path.name for path in RunPaths(root / "mine").list_checkpoints()]
    assert names == ["step-00000020.a0001.l01"]


def paused(root: Path, name: str, uid: str, **fields: Any) -> RunFolder:
    """A run that is paused until capacity returns."""
    made = RunFolder(root, name, uid, fields)
    operator.request(made.paths, "pause", by="alice", reason=UNTIL_CAPACITY)
    return made


@pytest.mark.usefixtures("log")
def test_the_flow_resume_continues_the_others_if_one_run_lacks_a_secret(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"environment": {"TOKEN": {"from_env": "NO_SUCH_VARIABLE"}}}
    lacking, fine = paused(root, "lacking", "f" * 32, **secret), paused(root, "whole", "d" * 32)
    started: list[RunPaths] = []
    monkeypatch.setattr(start, "start_if_alone", started.append)
    assert [paths.name for paths in ready_runs(root)] == ["lacking", "whole"]
    with pytest.raises(RunFailedError, match=r"not resumed: lacking: .*secrets have no value"):
        operations.resume.fn(root=str(root))
    assert started == [fine.paths]
    assert load_history(fine.paths).state is not RunState.PAUSED
    assert load_history(lacking.paths).state is RunState.PAUSED


def test_the_service_supervises_the_run_behind_folders_that_cannot_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised: list[str] = []
    monkeypatch.setattr(
        service.SupervisorService, "_supervise", lambda _, paths: supervised.append(paths.name)
    )
    monkeypatch.setattr(history_cache, "load_tallied", _fail_for("bad", ArithmeticError("a bug")))
    with Index() as index:
        one = service.SupervisorService(root, index, logging.getLogger("test"))
        with one._only_one():
            one._look_at_all()
    assert supervised == ["mine"]


def _fail_for(name: str, error: Exception) -> Any:
    def load(paths: RunPaths) -> Any:
        if paths.name == name:
            raise error
        return load_history(paths)

    return load


@pytest.mark.parametrize("is_foreign", [False, True])
def test_the_service_makes_nothing_through_a_link(
    tmp_path: Path, root: Path, is_foreign: bool
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    folder = service_folder(root)
    folder.symlink_to(victim)
    if is_foreign:
        os.lchown(folder, STRANGER, STRANGER)
    with Index() as index, pytest.raises(RunConflictError, match="delete it"):
        service.SupervisorService(root, index, logging.getLogger("test")).run()
    assert list(victim.iterdir()) == []
