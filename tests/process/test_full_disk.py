"""A disk that fills during a real run: the agent frees what the keep rules allow."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, wait_until
from tests.support.histories import spec_of
from tests.support.runs import RunFolder
from tests.support.storage import small_storage

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.errors import HoldfastError, SpecError
from holdfast.contracts.records.documents import Outcome, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.launch.torchrun import unwritten_in
from holdfast.workers.agent.leading import failed_outcome
from holdfast.workers.checkpoints import deletion
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator, run_folders

MB = 1 << 20
DISK_MB = 24
FLOATS_PER_MB = MB // 4
LEFT_BYTES = 2 * MB
NONE = "deleted 0 checkpoints that nothing keeps"

pytestmark = pytest.mark.timeout(280)


def test_agent_frees_a_full_disk_reports_it_and_training_continues(tmp_path: Path) -> None:
    with small_storage(tmp_path, f"{DISK_MB}m") as root:
        run = LocalRun(
            root,
            gpus=1,
            steps=480,
            sleep_s=0.03,
            padding=5 * FLOATS_PER_MB,
            hurry=str(tmp_path / "hurry"),
            checkpoint={"interval": 10, "keep": {"last": 1}},
        )
        attempt = run.submit()
        try:
            # No flow prunes here, so the disk fills and the agent frees space by the keep rules.
            deleted = wait_until(lambda: run.events(EventKind.CHECKPOINT_DELETED), "a deletion")
            assert {event.data["by"] for event in deleted} == {"a full disk"}
            assert deleted[0].data["reason"] == "not among the last 1"
            assert deleted[0].writer == "agent-0000"
            # The rest of the disk is filled from outside: the rules allow no further deletion.
            filler = root / "filler"
            failed = wait_until(lambda: _refusals_once_filled(filler, run), "a save that fails")
            assert "(the newest, last 1). Lower checkpoint.keep, unpin checkpoints," in failed[-1]
            assert len(committed_checkpoints(run.paths)) == 1, "the newest must stay"
            step = max(event.data["step"] for event in run.events(EventKind.SAVE_FAILED))
            run.wait_for_step(attempt, step + 5)
            filler.unlink()
            (tmp_path / "hurry").touch()
            view = run.wait_for_end()
            assert (view.state, view.last_step) == (AttemptState.COMPLETED, 480)
            assert committed_checkpoints(run.paths)[-1].step == 480
            assert "was not saved: " in attempt.rank_log(0, 1, 0).read_text()
        finally:
            run.end_all()


def _refusals_once_filled(filler: Path, run: LocalRun) -> list[str]:
    """Leave `LEFT_BYTES` for journals and logs, none for a checkpoint; returns failed saves.

    Everything that a save could free is deleted first. Otherwise each save would fit into the
    space of an older one.
    """
    deletion.apply(run.paths, by="tests", writer="cli")
    with open(filler, "ab") as stream, contextlib.suppress(OSError):
        stream.write(bytes(max(0, _free_bytes(filler) - LEFT_BYTES)))
    # A save that was being written at the same time has used some of the space.
    too_much = LEFT_BYTES - _free_bytes(filler)
    if too_much > 0:
        os.truncate(filler, max(0, filler.stat().st_size - too_much))
    errors = [str(event.data["error"]) for event in run.events(EventKind.SAVE_FAILED)]
    return [error for error in errors if "space left on device: step" in error and NONE in error]


def _free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def _fill(root: Path) -> Path:
    filler = root / "filler"
    with open(filler, "ab", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    return filler


@pytest.mark.more
def test_a_full_disk_at_the_last_save_ends_the_attempt_and_the_next_one_resumes(
    tmp_path: Path,
) -> None:
    with small_storage(tmp_path, "4m") as root:
        hurry = tmp_path / "hurry"
        settings: dict[str, Any] = {"steps": 60, "sleep_s": 0.2, "hurry": str(hurry)}
        run = LocalRun(root, gpus=1, checkpoint={"interval": 30}, **settings)
        attempt = run.submit()
        try:
            wait_until(lambda: committed_checkpoints(run.paths), "a checkpoint")
            filler = _fill(root)
            hurry.touch()
            view = run.wait_for_end()
            assert (view.cause, view.last_step) == (Cause.STORAGE_FULL, 60), view.evidence
            # The record says so. The storage had no room for the traceback.
            expected = "the save of step 60 failed: [Errno 28] No space left on device: step 60"
            assert view.evidence[0].startswith(expected)
            outcome = read_document(Outcome, attempt.outcome)
            assert outcome is not None, "the agent must find room for the outcome"
            assert len(outcome.launches) == 1, "training must not begin again in place"
            assert decide(run.history(), None, now=time.time()).action == "relaunch"
            filler.unlink()
            run.submit()
            after = run.wait_for_end()
            assert after.state is AttemptState.COMPLETED
            assert after.resumed_from is not None
            assert "step-00000030" in after.resumed_from
        finally:
            run.end_all()


def test_an_error_file_that_found_no_room_shows_it(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    with small_storage(tmp_path, "1m") as folder:
        (folder / "error.json").touch()
        assert unwritten_in(folder) == "", "an empty file alone says nothing"
        _fill(folder)
        text = unwritten_in(folder)
        assert text.startswith("No space left on device: a rank could not write its error to")
        with pytest.raises(OSError, match="No space left") as caught:
            (folder / "more").write_bytes(bytes(4096))
    # A failure of the agent itself has the cause that its error names.
    outcome = failed_outcome(load_context(attempt.request), caught.value)
    assert outcome.cause is Cause.STORAGE_FULL
    assert "No space left on device" in outcome.evidence[0]


def test_full_disk_uses_no_attempts_and_the_run_can_be_cancelled(tmp_path: Path) -> None:
    spec = spec_of()
    with small_storage(tmp_path, "1m") as root:
        paths, _ = run_folders.attach_or_create(spec, root, created_by="ann")
        filler = _fill(root)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                submit_next(paths, gpus=spec.gpus, reason="x", exclude=())
        assert paths.list_attempts() == []
        assert "will not be relaunched" in operator.request(paths, "cancel", by="ann")
        assert load_history(paths).state is RunState.CANCELLED
        _fill(root)
        with pytest.raises(SpecError, match="is cancelled, so there is nothing to cancel"):
            operator.request(paths, "cancel", by="ann")
        filler.unlink()


@pytest.mark.more
def test_request_on_a_completely_full_disk_names_the_directory(tmp_path: Path) -> None:
    with small_storage(tmp_path, "1m") as root:
        paths, _ = run_folders.attach_or_create(spec_of(), root, created_by="ann")
        run_folders.release_reserve(paths)
        _fill(root)
        with pytest.raises(HoldfastError, match="free some space there and repeat the request"):
            operator.request(paths, "cancel", by="ann")
