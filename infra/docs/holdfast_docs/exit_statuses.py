"""The exit statuses of Holdfast's programs and their meaning. The documentation's table."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from holdfast.cli import exit_status as status
from holdfast.trainer import standby
from holdfast.workers.agent import guard

EXIT_STATUSES: Final[Mapping[str, Mapping[int, str]]] = {
    "holdfast": {
        0: "the command succeeded",
        status.FAILED: "the command found something bad or failed: a run that ended as failed "
        "(`submit --wait`), a damaged checkpoint (`verify`), a failed check (`doctor`), a broken "
        "invariant (`drill`), a run that cannot be read (`reindex`), another revision of the "
        "schema (`db current`), or a run that has not ended in time (`wait --timeout`)",
        status.MISUSE: "the arguments are wrong: an unknown option, an invalid spec or value",
        status.NOT_FOUND: "there is no such run, attempt, checkpoint or folder",
        status.UNAVAILABLE: "something that the command needs cannot be used: the database, "
        "Prefect, the scheduler, a disk, a secret",
        status.REFUSED: "the request was refused: the name belongs to another run, another "
        "request is pending, a preflight check failed, the scheduler refused the job, or you "
        "answered no",
        status.INTERRUPTED: "you interrupted `submit --wait` or `wait`. The run continues",
        128 + signal.SIGTERM: "a drill or an export was ended by SIGTERM, after it removed what it "
        "had begun",
    },
    "python -m holdfast.flows.detached": {
        0: "the run completed",
        1: "the run failed or was cancelled",
        status.MISUSE: "the call is wrong",
    },
    "torchrun under the agent": {
        0: "all ranks exited with status 0. The agent compares this with what the program "
        "promised before it reports the attempt as completed",
        guard.KILLED_EXIT_CODE: "the agent ended the launch, or the agent was killed. Every "
        "process of the launch was killed",
    },
    "a rank of a warm standby": {
        standby.UNUSED_EXIT_CODE: "the attempt ended without a restart in place, so the standby "
        "was not needed",
    },
}
