"""Verification and fetches before a resume, divided over all ranks.

Ranks that see the same directory each take a share of its bytes or files: all ranks for a directory
under the run's root, and the ranks of a node for one on the node's own disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.contracts.disk.damage import Problems, describe_problems, find_problems
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.errors import AgreementError, DamagedCheckpointError, HoldfastError
from holdfast.trainer.loading.agreement import PortableError, portable, raise_first
from holdfast.trainer.mirror.fetch import Remote, begin_fetch, fetch_files, finish_fetch
from holdfast.trainer.mirror.open_store import open_store
from holdfast.trainer.mirror.upload import Retries
from holdfast.trainer.ranks.collective import TIMEOUT, ControlGroup, attempt
from holdfast.trainer.ranks.identity import Identity

# Work before a load that all ranks share, while no rank waits long in a collective.
#
# Rank 0 decides in a thread, and may ask all ranks to do a part of something. Each part runs in a
# thread too. Meanwhile all ranks meet in short rounds and compare how far they are. So a wait may
# last as long as the work progresses, and an error or the end of one rank is known to all at
# once.

# The interval between rounds grows with the duration of the work.
NAP_MIN_S: Final = 0.001
NAP_MAX_S: Final = 0.5
NAP_SHARE: Final = 0.1
STALLED_S: Final = TIMEOUT.total_seconds()

T = TypeVar("T")


class _Call(IntEnum):
    """What rank 0 wants from the ranks in this round."""

    NOTHING = 0
    PART = 1
    RESULT = 2
    STALLED = 3


@dataclass(frozen=True)
class _Line:
    """What a rank sends in a round. `moved` is how much it has done, in bytes."""

    moved: int
    is_done: bool
    call: _Call


class Meter:
    """Counts bytes. Several threads call `add`."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count


class _Job:
    """A function that runs in a thread. `ended` is set when it has ended."""

    def __init__(self, act: Callable[[], Any], ended: threading.Event) -> None:
        self._act, self._ended = act, ended
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None
        # The process can end while a thread hangs in a read.
        threading.Thread(target=self._run, name="shared-work", daemon=True).start()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def _run(self) -> None:
        self.value, self.error = attempt(self._act)
        self.is_done = True
        self._ended.set()


class SharedWork:
    """Parts of work for all ranks. `parts` has a function for each kind of part, by name.

    A function is called with a meter, which it moves as it works, and with what rank 0 gave to
    `divide`. If nothing moves on any rank for `stalled_s` seconds, all ranks raise an error.
    """

    def __init__(
        self,
        ranks: ControlGroup,
        parts: Mapping[str, Callable[..., Any]],
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._ranks, self._parts, self._stalled_s = ranks, parts, stalled_s
        self._changed = threading.Event()
        self._meter = Meter()
        self._asked: tuple[str, tuple[Any, ...]] | None = None
        self._answers: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def divide(self, name: str, *given: Any) -> list[Any]:
        """Let every rank do its part `name`, and return the results by rank.

        Only the function that `lead` runs calls this. Raises the first error of a rank; damage
        comes before other errors, because it may have caused them.
        """
        self._asked = name, given
        self._changed.set()
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def lead(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0, and return its result on every rank. Every rank calls this.

        Raises the error of `decide` on every rank. Raises `AgreementError` on every rank if nothing
        moves any more.
        """
        leader = _Job(decide, self._changed) if self._ranks.rank == 0 else None
        try:
            result: T = self._meet(leader)
        except Exception as error:
            # The leader's thread may wait for an answer.
            self._answers.put(HoldfastError(f"the ranks no longer work together: {error}"))
            raise
        return result

    def _meet(self, leader: _Job | None) -> Any:
        part: _Job | None = None
        began = moved_at = time.monotonic()
        before: list[_Line] = []
        while True:
            if leader is not None:
                self._nap(time.monotonic() - began)
            lines = self._ranks.gather(partial(self._line, leader, part, moved_at))
            call = lines[0].call
            if call is _Call.RESULT:
                return self._ranks.share(lambda: leader.result() if leader else None)
            if call is _Call.STALLED:
                raise self._stalled(lines)
            if call is _Call.PART:
                part, began = self._begin(), time.monotonic()
            elif part is not None and all(one.is_done for one in lines):
                self._answer(part, is_leading=leader is not None)
                part, began = None, time.monotonic()
            if lines != before:
                before, moved_at = lines, time.monotonic()

    def _nap(self, elapsed_s: float) -> None:
        self._changed.wait(min(NAP_MAX_S, max(NAP_MIN_S, elapsed_s * NAP_SHARE)))
        self._changed.clear()

    def _line(self, leader: _Job | None, part: _Job | None, moved_at: float) -> _Line:
        """Return this rank's line of a round. Rank 0's clock shows whether the work has stalled."""
        call = _Call.NOTHING
        if leader is not None:
            is_free = part is None
            if is_free and leader.is_done:
                call = _Call.RESULT
            elif is_free and self._asked:
                call = _Call.PART
            elif time.monotonic() - moved_at > self._stalled_s:
                call = _Call.STALLED
        return _Line(self._meter.count, part is None or part.is_done, call)

    def _begin(self) -> _Job:
        """Send what rank 0 asked for to all ranks, and begin this rank's part."""
        asked, self._asked = self._asked, None
        name, given = self._ranks.share(lambda: asked) or ("", ())
        return _Job(lambda: self._parts[name](self._meter, *given), self._changed)

    def _answer(self, part: _Job, *, is_leading: bool) -> None:
        """Give the results of all ranks to the function that asked for them."""
        own = (part.value, portable(part.error))
        outcomes: list[tuple[Any, PortableError | None]] = self._ranks.gather(lambda: own)
        if not is_leading:
            return
        errors = [error for _, error in outcomes]
        damage = [e if e and e[0] == DamagedCheckpointError.__name__ else None for e in errors]
        _, error = attempt(lambda: raise_first(part.error, damage if any(damage) else errors))
        self._answers.put(error or [value for value, _ in outcomes])

    def _stalled(self, lines: list[_Line]) -> AgreementError:
        """Return the error for work that does not progress. It names the ranks."""
        # Between two parts, all wait for the decision of rank 0.
        waiting = [str(rank) for rank, one in enumerate(lines) if not one.is_done] or ["0"]
        return AgreementError(
            f"ranks that prepare the resume have read nothing for {self._stalled_s:.0f} s: "
            f"{', '.join(waiting)}; expected progress. The storage or the mirror may hang: look at "
            "these ranks' stacks and at the logs of their nodes, then start again"
        )


class Preparation:
    """What rank 0 asks of all ranks while it chooses a checkpoint. All ranks create it.

    Only the function that `lead` runs calls `verify` and `fetch`.
    """

    def __init__(self, identity: Identity, ranks: ControlGroup, tiers: Tiers) -> None:
        self._identity, self._tiers = identity, tiers
        self._place = (identity.rank, identity.world_size)
        if tiers.local:
            self._place = (identity.local_rank, identity.local_ranks)
        parts: dict[str, Callable[..., Any]] = {
            "verify": self._verify_share,
            "begin": self._begin_fetch,
            "fetch": self._fetch_share,
            "finish": self._finish_fetch,
        }
        self._work = SharedWork(ranks, parts)

    def lead(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0 and return its result on every rank; see `SharedWork.lead`."""
        return self._work.lead(decide)

    def verify(self, directory: Path, manifest: Manifest) -> list[str]:
        """Return a line for each damaged file, as `find_damage` does. Every rank reads a share."""
        return describe_problems(manifest, self._work.divide("verify", directory, manifest))

    def fetch(self, remote: Remote, directory: Path, url: str) -> int:
        """Copy a checkpoint of the mirror into `directory`. Return the bytes read for node 0.

        With a node-local tier, each node copies it to its own disk. Raises as `mirror.fetch.fetch`,
        if one rank cannot fetch its share.
        """
        began = time.monotonic()
        self._work.divide("begin", remote, directory)
        counts = self._work.divide("fetch", remote, directory, url)
        self._work.divide("finish", remote, directory, url, time.monotonic() - began)
        return sum(counts)

    def _verify_share(self, meter: Meter, directory: Path, manifest: Manifest) -> Problems:
        share = self._identity.rank, self._identity.world_size
        return find_problems(directory, manifest, progress=meter.add, share=share)

    def _begin_fetch(self, _: Meter, remote: Remote, directory: Path) -> None:
        if self._place[0] == 0:
            begin_fetch(remote, self._directory(remote, directory))

    def _fetch_share(self, meter: Meter, remote: Remote, directory: Path, url: str) -> int:
        files = share_files(remote.manifest.files, *self._place)
        if not files:
            return 0
        retries = Retries()
        store = retries.do(open_store, url)
        place = self._directory(remote, directory)
        count = fetch_files(store, remote, files, place, retries=retries, progress=meter.add)
        return 0 if self._tiers.local and self._identity.node else count

    def _finish_fetch(
        self, _: Meter, remote: Remote, directory: Path, url: str, seconds: float
    ) -> None:
        if self._place[0] == 0:
            finish_fetch(remote, self._directory(remote, directory), url=url, seconds=seconds)

    def _directory(self, remote: Remote, shared: Path) -> Path:
        """Return where this node's ranks write the files: `shared`, or on the node's own disk."""
        folder = self._tiers.node_folder(self._identity.run, self._identity.run_uid)
        return shared if folder is None else folder.checkpoint(remote.name)


def share_files(files: tuple[FileEntry, ...], number: int, count: int) -> list[FileEntry]:
    """Return the files of share `number` of `count`. Shares have about equally many bytes."""
    total = max(1, sum(entry.bytes for entry in files))
    starts = accumulate((entry.bytes for entry in files), initial=0)
    return [
        entry
        for entry, start in zip(files, starts, strict=False)
        if min(start * count // total, count - 1) == number
    ]
