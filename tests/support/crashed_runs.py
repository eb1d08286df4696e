"""A run whose first attempt worked and whose second one crashed, with the files of its ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.states import AttemptState, Cause

SECRET: Final = "correct-horse-battery"
RANKS: Final = 4
LOST_PEER: Final = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in main\n'
    f"    login('{SECRET}')\n"
    "ConnectionError: Connection closed by peer [10.0.0.7]:{port}\n"
)


def write_crash(run: RunFolder, number: int) -> None:
    """A launch whose rank 3 was killed, the error files of its peers, and the attempt's end."""
    attempt = run.paths.attempt(number)
    with JournalWriter(attempt.node_journal(0)) as journal:
        journal.append(
            EventKind.LAUNCH_ENDED,
            attempt=number,
            launch=1,
            ending="crashed",
            exit_code=1,
            last_step=None,
            rank=3,
            host="node-b",
            rank_exit_code=-9,
        )
    for rank in range(RANKS):
        link = attempt.rank_log(0, 1, rank, "stderr")
        folder = link.parent / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").touch()
        link.symlink_to(os.path.relpath(folder / "stderr.log", link.parent))
        if rank != 3:
            text = LOST_PEER.format(port=rank)
            extra = {"py_callstack": text, "timestamp": T0 + 560 + rank}
            content = {"message": {"message": text, "extraInfo": extra}}
            (folder / "error.json").write_text(json.dumps(content))


def crashed_run(root: Path) -> RunFolder:
    """The run `crashed` under `root`. A source line of its tracebacks contains `SECRET`."""
    environment = {"LOGIN_PASSWORD": SECRET}
    run = RunFolder(root, "crashed", "a" * 32, {"environment": environment})
    run.submit(1, 2, T0)
    run.claim(1, T0 + 1)
    run.launch(1, 1, 0, None)
    name = run.commit(50, 1, at=T0 + 60)
    run.finish(1, AttemptState.PREEMPTED, Cause.PREEMPTION, 50, T0 + 90)
    run.submit(2, RANKS, T0 + 500)
    run.claim(2, T0 + 501, "node-b")
    run.launch(2, 1, 50, f"crashed:{name}", RANKS)
    write_crash(run, 2)
    run.finish(2, AttemptState.FAILED, Cause.INFRASTRUCTURE, 50, T0 + 600, host="node-b")
    return run
