"""Copying a rank's tensors into its staging slot, at the speed of memory.

On a CPU plain tensors are copied by `memmove`, which leaves the interpreter free: one parallel
region for all of them, by as many threads as torch may use for this rank. `Tensor.copy_` makes a
parallel region of each tensor, and waits for its slowest thread a thousand times.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

# What one thread takes at a time: large beside the cost of taking it.
PIECE_BYTES: Final = 8 * 1024 * 1024
# What one `memmove` copies: the fastest of the sizes from 16 KiB to 2 MiB; the largest took a fifth
# to a third longer (docs/decisions/0016).
MOVE_BYTES: Final = 512 * 1024

_Move = tuple[int, int, int]
"""(destination, source, bytes), addresses of this process"""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""(view, source)"""


class Copier:
    """Copies into the same views again and again; `threads` copy at once, the caller included."""

    def __init__(self, views: Sequence[torch.Tensor], threads: int) -> None:
        self._views = list(views)
        self._places = [(view.data_ptr(), view.nbytes) for view in views]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="holdfast-copy")

    def copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its view; returns when the bytes are there.

        From GPUs the copies run on a side stream of each device. It waits for what is queued on
        that device's current stream, so they are ordered after the optimizer's kernels there.
        """
        on_gpus: dict[torch.device, list[_Pair]] = {}
        others: list[_Pair] = []
        moves: list[_Move] = []
        for view, (address, size), source in zip(self._views, self._places, sources, strict=True):
            if not size:
                continue
            if source.device.type == "cuda":
                on_gpus.setdefault(source.device, []).append((view, source))
            elif is_plain(source) and source.nbytes == size and source.dtype is view.dtype:
                moves.append((address, source.data_ptr(), size))
            else:
                others.append((view, source))
        begun = []
        try:
            with torch.no_grad():
                for device, pairs in on_gpus.items():
                    begun.append(self._stream_of(device))
                    _begin_copies(pairs, device, begun[-1])
                for view, source in others:
                    view.copy_(source)
            self._move(moves)
        finally:
            # Whatever happened: the caller may change or free the sources from here on.
            for stream in begun:
                stream.synchronize()

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def close(self) -> None:
        """Let threads and views go."""
        if self._pool is not None:
            self._pool.shutdown()
        self._views.clear()
        self._streams.clear()

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


def find_gpu(sources: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of the first source that is on a GPU."""
    return next((s.device for s in sources if s.device.type == "cuda"), None)


def is_plain(source: torch.Tensor) -> bool:
    """True for a tensor whose bytes lie in memory as its values are, in order."""
    return (
        type(source) in _PLAIN_TYPES
        and source.layout is torch.strided
        and source.device.type == "cpu"
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


def cut(moves: Sequence[_Move]) -> list[list[_Move]]:
    """The same bytes in pieces of `PIECE_BYTES` or less, for threads to take."""
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


def _begin_copies(pairs: Sequence[_Pair], device: torch.device, stream: torch.cuda.Stream) -> None:
    """Queue copies from `device` on `stream`, after what is queued on its current stream."""
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for view, source in pairs:
            view.copy_(source, non_blocking=True)
