"""Copy a rank's tensors into its staging slot at memory speed.

Plain CPU tensors are copied by `memmove`, which releases the interpreter lock: one parallel region
for all tensors, with as many threads as torch may use for this rank. `Tensor.copy_` would open one
parallel region per tensor and wait for its slowest thread each time.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from holdfast.trainer.process import devices

# The piece that one thread takes at a time: large compared with the cost of taking it.
PIECE_BYTES: Final = 8 * 1024 * 1024
# The bytes of one `memmove`: the fastest size between 16 KiB and 2 MiB. The largest size took a
# fifth to a third longer (docs/decisions/0016).
MOVE_BYTES: Final = 512 * 1024

_Move = tuple[int, int, int]
"""(destination, source, bytes): addresses in this process"""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""(view, source)"""


class Copier:
    """Copies repeatedly into the same views, with `threads` threads including the caller."""

    def __init__(self, views: Sequence[torch.Tensor], threads: int) -> None:
        self._views = list(views)
        self._places = [(view.data_ptr(), view.nbytes) for view in views]
        self._threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="holdfast-copy")

    def copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its view. All bytes are there on return.

        The copies follow all work queued on the sources' devices, on any stream: a program may
        update a tensor on a stream that its current one does not wait for yet.
        """
        on_devices: dict[torch.device, list[_Pair]] = {}
        others: list[_Pair] = []
        moves: list[_Move] = []
        for view, (address, size), source in zip(self._views, self._places, sources, strict=True):
            if not size:
                continue
            # Not by a function: this is most of the time of a small tensor.
            if source.device.type in devices.STREAMED:
                on_devices.setdefault(source.device, []).append((view, source))
            elif is_plain(source) and source.nbytes == size and source.dtype is view.dtype:
                moves.append((address, source.data_ptr(), size))
            else:
                others.append((view, source))
        devices.synchronize(on_devices)
        try:
            with torch.no_grad():
                for pairs in on_devices.values():
                    for view, source in pairs:
                        devices.begin_copy(view, source)
                for view, source in others:
                    view.copy_(source)
            self._move(moves)
        finally:
            # Always wait: on return, the caller may change or free the sources.
            for device in on_devices:
                devices.finish_copies(device)

    def close(self) -> None:
        """Release threads and views."""
        if self._pool is not None:
            self._pool.shutdown()
        self._views.clear()

    def _move(self, moves: list[_Move]) -> None:
        if self._pool is None:
            _move_all(moves)
            return
        pieces = deque(cut(moves))
        others = [
            self._pool.submit(_take_and_move, pieces)
            for _ in range(min(self._threads, len(pieces)) - 1)
        ]
        _take_and_move(pieces)
        for other in others:
            other.result()


def is_plain(source: torch.Tensor) -> bool:
    """Return True if the tensor's bytes lie in memory in the order of its values."""
    return (
        type(source) in _PLAIN_TYPES
        and source.layout is torch.strided
        and source.device.type == "cpu"
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


def cut(moves: Sequence[_Move]) -> list[list[_Move]]:
    """Split the moves into pieces of at most `PIECE_BYTES` for the threads."""
    pieces: list[list[_Move]] = []
    room = 0
    for to, source, size in moves:
        done = 0
        while done < size:
            if room == 0:
                pieces.append([])
                room = PIECE_BYTES
            part = min(size - done, room)
            pieces[-1].append((to + done, source + done, part))
            done, room = done + part, room - part
    return pieces


_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def _take_and_move(pieces: deque[list[_Move]]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        _move_all(piece)


def _move_all(moves: Sequence[_Move]) -> None:
    memmove = ctypes.memmove
    for to, source, size in moves:
        for at in range(0, size, MOVE_BYTES):
            memmove(to + at, source + at, min(MOVE_BYTES, size - at))
