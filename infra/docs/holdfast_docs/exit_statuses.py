"""The exit statuses of Holdfast's programs and their meaning. The documentation's table."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from holdfast.cli.shared import exit_status as status
from holdfast.trainer.process import standby
from holdfast.workers.agent import guard

_number: Final = attrgetter("number")

EXIT_STATUSES: Final[Mapping[str, Mapping[int, str]]] = {
    "holdfast": {one.number: one.meaning for one in sorted(status.STATUSES, key=_number)},
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
