"""The time that this rank waits for its next batch, in the rank status table.

torch has no hook for it, so the method that gives the next batch is wrapped, in the iterators of
torch's DataLoader and of torchdata's, if the program has loaded it. Their subclasses in frameworks
call it. Other loaders are not measured: their time counts as the rank's own work.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Final

from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.contracts.node.rank_status import RankRecord
from holdfast.trainer.ranks import forks

_TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_NEXT: Final = "__next__"


class DataWaits:
    """Records the waits of the thread that creates it. `close` must be called."""

    def __init__(self, record: RankRecord) -> None:
        self._record, self._thread, self._owner = record, threading.get_ident(), forks.count
        self._is_waiting = False
        stateful = getattr(sys.modules.get(_TORCHDATA), "_StatefulBaseDataLoaderIter", None)
        self._wrapped = [
            (each, each.__dict__[_NEXT], self._wrap(each.__dict__[_NEXT]))
            for each in (_BaseDataLoaderIter, stateful)
            if each is not None and _NEXT in each.__dict__
        ]
        for each, _, method in self._wrapped:
            setattr(each, _NEXT, method)

    def close(self) -> None:
        """Stop recording."""
        for each, inner, method in self._wrapped:
            # A library may have wrapped it again. Then this one stays, and records nothing.
            if each.__dict__.get(_NEXT) is method:
                setattr(each, _NEXT, inner)
        self._owner = -1

    def _wrap(self, inner: Any) -> Any:
        @functools.wraps(inner)
        def next_batch(iterator: Any) -> Any:
            # A loader may read another one, and a thread of the program or a forked worker of a
            # loader does not keep this rank waiting.
            if (
                self._is_waiting
                or forks.count != self._owner
                or threading.get_ident() != self._thread
            ):
                return inner(iterator)
            self._is_waiting = True
            self._record.begin_data_wait()
            try:
                return inner(iterator)
            finally:
                self._is_waiting = False
                # The program may have closed the session inside.
                if self._owner != -1:
                    self._record.end_data_wait()

        return next_batch
