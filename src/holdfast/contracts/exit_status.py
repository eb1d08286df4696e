"""Exit statuses of Holdfast's programs. The documentation is generated from these tables."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

DONE: Final = 0
# The run, checkpoint or check that the command is about is bad or failed.
FAILED: Final = 1
# The arguments are wrong.
MISUSE: Final = 2
NOT_FOUND: Final = 3
# The database, Prefect, the scheduler or the disk cannot be used.
UNAVAILABLE: Final = 4
# The arguments are right, but the state of the run or a check forbids it.
REFUSED: Final = 5
INTERRUPTED: Final = 128 + signal.SIGINT
KILLED: Final = 128 + signal.SIGKILL
TERMINATED: Final = 128 + signal.SIGTERM
# A warm standby that is not needed.
NOT_NEEDED: Final = 75

EXIT_STATUSES: Final[Mapping[str, Mapping[int, str]]] = {
    "holdfast": {
        DONE: "the command succeeded",
        FAILED: "the command found something bad or failed: a run that ended as failed "
        "(`submit --wait`), a damaged checkpoint (`verify`), a failed check (`doctor`), a broken "
        "invariant (`drill`), a run that cannot be read (`reindex`), another revision of the "
        "schema (`db current`), or a run that has not ended in time (`wait --timeout`)",
        MISUSE: "the arguments are wrong: an unknown option, an invalid spec or value",
        NOT_FOUND: "there is no such run, attempt, checkpoint or folder",
        UNAVAILABLE: "something that the command needs cannot be used: the database, Prefect, the "
        "scheduler, a disk, a secret",
        REFUSED: "the request was refused: the name belongs to another run, another "
        "request is pending, a preflight check failed, the scheduler refused the job, or you "
        "answered no",
        INTERRUPTED: "you interrupted `submit --wait` or `wait`. The run continues",
        TERMINATED: "a drill or an export was ended by SIGTERM, after it removed what it had begun",
    },
    "python -m holdfast.flows.detached": {
        DONE: "the run completed",
        FAILED: "the run failed or was cancelled",
        MISUSE: "the call is wrong",
    },
    "torchrun under the agent": {
        DONE: "all ranks exited with status 0. The agent compares this with what the program "
        "promised before it reports the attempt as completed",
        KILLED: "the agent ended the launch, or the agent was killed. Every process of the launch "
        "was killed",
    },
    "a rank of a warm standby": {
        NOT_NEEDED: "the attempt ended without a restart in place, so the standby was not needed",
    },
}
