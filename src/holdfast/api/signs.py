"""The signs of life of a live run: the lock of its supervisor, and its agents' heartbeats.

A process that was killed writes nothing. The watch looks for these signs in every round, so when
they ended is known whether or not a client asks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.records.supervision import is_supervised
from holdfast.workers.nodes.heartbeats import BEATS_MISSED_MAX

# A probe of a lock on shared storage is a question to its server.
PROBE_S: Final = 2.0
# Beside the missed heartbeats, for the way of a file through shared storage.
BEAT_EXTRA_S: Final = 1.0


@dataclass
class LifeSigns:
    """What the watch last saw of one run. `now` is seconds of this host's monotonic clock.

    `supervised_at` is when it last saw a supervisor, in Unix seconds. `silent_s` is the time
    without a new heartbeat of `attempt`, whose agents write one every `every_s`.
    """

    supervised_at: float | None = None
    is_unsupervised: bool = False
    attempt: int | None = None
    silent_s: float = 0.0
    every_s: float = 0.0
    _was_free: bool = False
    _probe_at: float = 0.0
    _heard_at: float = 0.0
    _stamp: tuple[object, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether a heartbeat is late, which is a reason to ask the scheduler about the job."""
        return self.every_s > 0 and self.silent_s > self.every_s + BEAT_EXTRA_S

    @property
    def is_silent(self) -> bool:
        limit_s = BEATS_MISSED_MAX * self.every_s + BEAT_EXTRA_S
        return self.every_s > 0 and self.silent_s > limit_s

    @property
    def missing(self) -> tuple[bool, bool]:
        """Whether the supervisor is missing, and whether the heartbeats are."""
        return self.is_unsupervised, self.is_silent

    def probe(self, lock: Path, now: float) -> None:
        """Look whether a supervisor holds `lock`. Call it after an ingest of the run."""
        if now < self._probe_at:
            return
        if is_supervised(lock) is not False:
            self.supervised_at, self._probe_at = time.time(), now + PROBE_S
            self.is_unsupervised = self._was_free = False
            return
        # The supervisor of a run that has just ended has left too, and the run counts as live until
        # its next ingest. So the lock must be free in two rounds.
        if self._was_free:
            self.is_unsupervised, self._probe_at = True, now + PROBE_S
        self._was_free = True

    def hear(self, attempt: int, stamp: tuple[object, ...], now: float) -> bool:
        """Take the stamp of the newest attempt's heartbeats; return True if it is new."""
        gap_s, self._heard_at = now - self._heard_at, now
        if (attempt, stamp) == (self.attempt, self._stamp):
            # The server, and perhaps the agents too, were suspended during a long gap.
            self.silent_s += min(gap_s, self.every_s)
            return False
        if attempt != self.attempt:
            self.every_s = 0.0
        self.attempt, self._stamp, self.silent_s = attempt, stamp, 0.0
        return True
