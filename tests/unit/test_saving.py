"""Whether a program saves by Holdfast, and what `show` and the API say if it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.cli.main import main
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.saving import (
    SESSION_WAIT_S,
    saves_by_holdfast,
    trained_in,
    trained_in_view,
    why_nothing_is_saved,
)
from holdfast.contracts.states import AttemptState, Cause
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import run_queries
from holdfast.workers.runs import operator

OPAQUE = {"program": {"checkpoints": "out/{step}"}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for name in ("HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def claimed(root: Path, **fields: Any) -> RunFolder:
    """A run whose first attempt trains."""
    made = RunFolder(root, "kelp", "1" * 32, **fields)
    made.submit(1, 2, T0)
    made.claim(1, T0)
    return made


def seen(run: RunFolder, now: float = T0 + 5) -> tuple[bool | None, str]:
    """Return the same answers from the run's folder and from the index."""
    trained = trained_in(load_history(run.paths), now)
    answers = saves_by_holdfast(trained), why_nothing_is_saved(trained)
    with open_database() as database:
        ingest_run(database, run.paths)
        view = trained_in_view(run_queries.show_run(database, str(run.paths.directory)), now)
    assert (saves_by_holdfast(view), why_nothing_is_saved(view)) == answers
    return answers


def test_a_completed_run_without_a_session_saved_nothing(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    run.finish(1, AttemptState.COMPLETED, None, None, T0 + 3)
    assert seen(run) == (False, "the program has no Session, so nothing is saved")


def test_a_live_run_is_judged_after_a_while(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    so_far = "no rank has opened a Session so far, so nothing is saved"
    assert seen(run) == (None, so_far)
    assert seen(run, T0 + SESSION_WAIT_S) == (False, so_far)
    run.launch(1, 1, 0, None)
    assert seen(run, T0 + SESSION_WAIT_S) == (True, "")


def test_a_launch_that_failed_early_shows_nothing(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    run.finish(1, AttemptState.FAILED, Cause.USER_ERROR, None, T0 + 3)
    assert seen(run)[0] is None


def test_a_run_that_has_not_started_is_unknown(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "kelp", "1" * 32)
    assert seen(run) == (None, "")
    run.submit(1, 2, T0)
    assert seen(run) == (None, "")


def test_one_attempt_with_a_session_speaks_for_all(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    run.launch(1, 1, 0, None)
    run.finish(1, AttemptState.PREEMPTED, Cause.PREEMPTION, 4, T0 + 3)
    run.submit(2, 2, T0 + 4)
    run.claim(2, T0 + 4)
    assert seen(run, T0 + 2 * SESSION_WAIT_S) == (True, "")


def test_the_programs_own_checkpoints_count(tmp_path: Path) -> None:
    run = claimed(tmp_path, spec_fields=OPAQUE)
    run.finish(1, AttemptState.COMPLETED, None, None, T0 + 3)
    assert seen(run) == (True, "")


def test_commits_without_a_session_count(tmp_path: Path) -> None:
    """As of the drop-in for torch.distributed.checkpoint, whose program may begin without any."""
    run = claimed(tmp_path)
    run.tell("flow", EventKind.COMMITTED, attempt=1, launch=1, checkpoint="x", step=3)
    trained = trained_in(load_history(run.paths), T0 + SESSION_WAIT_S)
    assert saves_by_holdfast(trained) is True


def test_a_stop_promises_no_checkpoint_that_there_will_not_be(tmp_path: Path) -> None:
    run = claimed(tmp_path)
    assert operator.request(run.paths, "stop", by="ann") == (
        "attempt 1 ends without a last checkpoint: no rank has opened a Session so far, so nothing "
        "is saved (stop)"
    )
    other = RunFolder(tmp_path, "sprout", "2" * 32)
    other.submit(1, 2, T0)
    other.claim(1, T0)
    other.launch(1, 1, 0, None)
    assert operator.request(other.paths, "stop", by="ann") == (
        "attempt 1 ends after one last checkpoint (stop)"
    )


def test_show_says_that_a_program_saves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = claimed(home / "runs")
    run.finish(1, AttemptState.COMPLETED, None, None, T0 + 3)

    def show(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["holdfast", "show", "kelp", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in {0, None}
        return capsys.readouterr().out

    text = show()
    assert "warning: the program has no Session, so nothing is saved by Holdfast" in text
    assert "steps lost" not in text
    assert json.loads(show("--json"))["saves_by_holdfast"] is False
    run.launch(1, 1, 0, None)
    assert "Session" not in show()
    assert json.loads(show("--json"))["saves_by_holdfast"] is True
