"""Secrets in a program's error output reach no log, journal, index row or flow state."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import (
    RunFailedError,
    SchedulerError,
    SpecError,
    SubmissionRefusedError,
)
from holdfast.contracts.records.history import load_history
from holdfast.contracts.redaction import HIDDEN
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows import train
from holdfast.flows.supervisor import submission
from holdfast.flows.supervisor.redactor import Redactor
from holdfast.flows.supervisor.summary import end_reason
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.lineage.queries import run_queries

# Secrets that are recognized by their name, by a reference, and by their form.
BY_NAME: Final = "plain-Zq8vR3mK1x"
BY_REFERENCE: Final = "file-Lp2tB9sD4yHc"
BY_FORM: Final = "hf_abcdefghijklmnopqrstuvwxyz"
MESSAGE: Final = f"RuntimeError: refused with {BY_NAME}, {BY_REFERENCE} and {BY_FORM}"
TRACEBACK: Final = f"Traceback (most recent call last):\n  File x\n{MESSAGE}\n"
SHOWN: Final = f"RuntimeError: refused with {HIDDEN}, {HIDDEN} and {HIDDEN}"


def assert_hidden(text: str) -> None:
    assert [word for word in (BY_NAME, BY_REFERENCE, BY_FORM) if word in text] == []


class UnseenRun(RunFolder):
    """A run whose supervisor has not recorded how its attempt ended."""

    def record_attempt_end(self, *_: Any) -> None:
        """Leave it to the supervisor."""


@pytest.fixture
def failed(tmp_path: Path, home: Path) -> RunFolder:
    """A run whose only attempt failed by an error of the program, and a separate index."""
    file = tmp_path / "token"
    file.write_text(BY_REFERENCE)
    file.chmod(0o600)
    environment = {"HF_TOKEN": BY_NAME, "OTHER": {"from_file": str(file)}}
    folder = UnseenRun(tmp_path / "root", "kelp", "u" * 32, {"environment": environment})
    folder.submit(1, 1, T0)
    folder.claim(1, T0 + 1)
    ending: dict[str, Any] = {"evidence": (MESSAGE,), "traceback": TRACEBACK}
    folder.finish(1, AttemptState.FAILED, Cause.USER_ERROR, 5, T0 + 2, **ending)
    return folder


def _refuse(
    paths: RunPaths, *, gpus: int, reason: str, exclude: Sequence[str], **_: object
) -> AttemptPaths:
    raise SchedulerError(f"{paths.name}: {gpus} {reason} {exclude}")


def test_a_failed_run_shows_its_reason_without_secrets(
    failed: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log, redactor = logging.getLogger("tests"), Redactor()
    with Index() as index:
        supervisor = Supervisor(
            paths=failed.paths, index=index, log=log, submit=_refuse, redactor=redactor
        )
        history = supervisor.run()
        row = run_queries.show_run(index.open(), str(failed.paths.directory))
    assert_hidden(json.dumps(row))
    kinds = {EventKind.DECISION, EventKind.RUN_ENDED}
    reasons = [e.data["reason"] for e in history.events if e.kind in kinds]
    assert reasons == [f"user_error: {SHOWN}"] * 2
    assert SHOWN in end_reason(history)
    # The secret file is gone after the run; the redactor still knows its value.
    (failed.root.parent / "token").unlink()
    with pytest.raises(RunFailedError) as raised:
        train.conclude(history, log, redactor)
    assert SHOWN in str(raised.value)
    assert_hidden(str(raised.value))
    assert "the first failing rank" in caplog.text
    assert SHOWN in caplog.text
    assert_hidden(caplog.text)


def test_a_reason_in_an_old_journal_is_shown_without_secrets(failed: RunFolder) -> None:
    facts = {"action": "stop", "gpus": 0, "exclude": [], "delay_s": 0.0, "after_attempt": 1}
    failed.tell("flow", EventKind.DECISION, reason=MESSAGE, **facts)
    history = load_history(failed.paths)
    assert end_reason(history).startswith(SHOWN)


def test_the_supervisors_log_has_no_secrets(
    failed: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    redactor = Redactor()
    redactor.learn(failed.spec.model_dump(mode="json"), failed.paths)
    log = redactor.log(redactor.log(logging.getLogger("tests")))
    log.warning("the scheduler does not answer: %s", SchedulerError(MESSAGE))
    log.warning(MESSAGE)
    log.warning("50% done")
    assert_hidden(caplog.text)
    assert "50% done" in caplog.text
    assert [record.getMessage() for record in caplog.records][1] == SHOWN


def _chained() -> None:
    try:
        raise OSError(5, MESSAGE)
    except OSError as error:
        raise SubmissionRefusedError(f"sbatch: {MESSAGE}") from error


def _grouped() -> None:
    raise ExceptionGroup(MESSAGE, [ValueError(MESSAGE), KeyError(MESSAGE)])


def _noted() -> None:
    error = SpecError("no plan", [MESSAGE])
    error.add_note(MESSAGE)
    raise error


class _OwnTextError(Exception):
    def __str__(self) -> str:
        return MESSAGE


def _own_text() -> None:
    raise _OwnTextError


@pytest.mark.parametrize("fail", [_chained, _grouped, _noted, _own_text])
def test_errors_that_leave_a_flow_have_no_secrets(failed: RunFolder, fail: Any) -> None:
    redactor = Redactor()
    redactor.learn(failed.spec.model_dump(mode="json"), failed.paths)
    with pytest.raises(Exception) as raised, redactor.errors():  # noqa: PT011
        fail()
    words = "".join(traceback.format_exception(raised.value))
    assert HIDDEN in words
    assert_hidden(words)
    if fail is _chained:
        # The supervisor decides by the type.
        assert type(raised.value) is SubmissionRefusedError


def test_an_error_without_secrets_is_raised_unchanged() -> None:
    error = FileNotFoundError(2, "No such file or directory", "/x")
    with pytest.raises(FileNotFoundError) as raised, Redactor().errors():
        raise error
    assert raised.value is error
    assert raised.value.filename == "/x"


def test_the_error_of_a_refused_attempt_has_no_secrets(
    failed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> AttemptPaths:
        raise SchedulerError(f"sbatch refused: {MESSAGE}")

    monkeypatch.setattr(submission, "submit_next", refuse)
    with pytest.raises(SchedulerError) as raised:
        train.submit_attempt.fn(failed.paths, gpus=1, reason="first", exclude=())
    assert str(raised.value) == f"sbatch refused: {SHOWN}"
