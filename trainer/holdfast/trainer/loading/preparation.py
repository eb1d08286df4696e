"""Verification and fetches before a resume, divided over all ranks.

Ranks that see the same directory each take a share of its bytes or files: all ranks for a directory
under the run's root, and the ranks of a node for one on the node's own disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from holdfast.contracts.disk.damage import Problems, describe_problems, find_problems
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.trainer.loading.shared_work import Meter, SharedWork
from holdfast.trainer.mirror.fetch import Remote, begin_fetch, fetch_files, finish_fetch
from holdfast.trainer.mirror.open_store import open_store
from holdfast.trainer.mirror.upload import Retries
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.identity import Identity

T = TypeVar("T")


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
