"""A question for a rank's stacks while its interpreter ends does not hide why it ends."""

from __future__ import annotations

import faulthandler
import os

import pytest
from tests.support.forked_child import start_child

from holdfast.trainer.ranks import rank_context as stacks


def end_after_a_question() -> None:
    stacks._stacks_file()
    os.kill(os.getpid(), stacks.STACKS_SIGNAL)
    # As the interpreter does when it ends.
    faulthandler.unregister(stacks.STACKS_SIGNAL)
    os.kill(os.getpid(), stacks.STACKS_SIGNAL)
    raise RuntimeError("a bad batch")


def test_late_question_for_stacks_does_not_kill_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    _, status = os.waitpid(start_child(end_after_a_question), 0)
    assert os.waitstatus_to_exitcode(status) == 1, "before, the signal ended it"
    assert "RuntimeError: a bad batch" in capfd.readouterr().err
