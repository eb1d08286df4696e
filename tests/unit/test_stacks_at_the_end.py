"""A question for a rank's stacks while its interpreter ends does not hide why it ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import faulthandler, os
from holdfast.trainer.ranks import rank_context as stacks
stacks._stacks_file()
os.kill(os.getpid(), stacks.STACKS_SIGNAL)
# As the interpreter does when it ends.
faulthandler.unregister(stacks.STACKS_SIGNAL)
os.kill(os.getpid(), stacks.STACKS_SIGNAL)
raise RuntimeError("a bad batch")
"""


def test_late_question_for_stacks_does_not_kill_the_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, "before, the signal ended it"
    assert "RuntimeError: a bad batch" in done.stderr
