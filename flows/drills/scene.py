"""What a fault may reach."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.contracts.errors import ServiceError
from holdfast.flows.drills.kinds import Recovery
from holdfast.flows.drills.stand import Stand
from holdfast.flows.drills.subject import Subject
from holdfast.flows.start import start_here


@dataclass
class Scene:
    """What a fault may reach: the run, the chance that moves it, and the stand if there is one.

    `recovery` is set by a fault of which something else comes this time than its kind says,
    `is_poisoned` by one after which steps have no loss until it is recovered from, `acted_at`
    (Unix seconds) by one that has to wait for its moment.
    """

    subject: Subject
    chance: random.Random
    stand: Stand | None = None
    recovery: Recovery | None = None
    is_poisoned: bool = False
    acted_at: float = 0.0

    def need_stand(self) -> Stand:
        """The stand. Raises `ServiceError` on a live run, whose servers are not the drill's."""
        if self.stand is None:
            raise ServiceError("only a throw-away run has a disk and a database to take away")
        return self.stand

    def start_flow(self) -> None:
        """Start another flow for the run, by the means of where it lives."""
        if self.stand is not None:
            self.stand.start_flow(self.subject.paths)
        else:
            start_here(self.subject.paths)
