"""Copy a rank's tensors into its staging slot at memory speed.

Plain CPU tensors are copied by `memmove`, which releases the interpreter lock: one parallel region
for all tensors, with as many threads as torch may use for this rank. `Tensor.copy_` would open one
parallel region per tensor and wait for its slowest thread each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from holdfast.trainer.process import devices

# The piece that one thread takes at a time: large compared with the cost of taking it.
PIECE_BYTES: Final = 8 * 1024 * 1024
# The bytes of one `memmove`: the fastest size between 16 KiB and 2 MiB. The largest size took a
# fifth to a third longer (docs/decisions/0016).
MOVE_BYTES: Final = 512 * 1024

# Smaller tensors, and smaller sums, are copied at once: that costs less than a thread.
LATE_BYTES_MIN: Final = 64 * 1024
LATE_SUM_MIN: Final = 1024 * 1024
# The bytes of one `memmove` beside training. Each takes the interpreter lock once.
LATE_MOVE_BYTES: Final = 8 * 1024 * 1024
# The thread beside training has a nice value that is higher by this. So it gets a quarter of a core
# that training wants too.
YIELDS: Final = 5
# At least one word of so many bytes is compared after a late copy. Each is a cache miss.
SAMPLE_BYTES: Final = 1024 * 1024
WORD_BYTES: Final = 8

_libc: Final = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_Move = tuple[int, int, int]
"""(destination, source, bytes): addresses in this process"""

MoveBytes = Callable[[int, int, int], object]
"""Moves bytes: `memmove`, or what writes them to a file. It may raise `OSError`."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""(view, source)"""


class Copier:
    """Copies repeatedly into the same views, with `threads` threads including the caller.

    With `move`, the views are mapped from a file, and `move` writes what lies behind them.
    """

    def __init__(
        self, views: Sequence[torch.Tensor], threads: int, move: MoveBytes | None = None
    ) -> None:
        self._views, self._move_bytes = list(views), move
        self._places = [(view.data_ptr(), view.nbytes) for view in views]
        self._threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="holdfast-copy")
        self._beside: _Beside | None = None
        self._words: tuple[list[int], WordPlaces] | None = None

    def copy(self, sources: Sequence[torch.Tensor], left_out: Collection[int] = ()) -> None:
        """Copy each source into its view, except those at the indices `left_out`.

        All bytes are there on return.

        The copies follow all work queued on the sources' devices, on any stream: a program may
        update a tensor on a stream that its current one does not wait for yet. Raises `OSError` if
        a file cannot be written.
        """
        on_devices: dict[torch.device, list[_Pair]] = {}
        others: list[_Pair] = []
        moves: list[_Move] = []
        for index, source in enumerate(sources):
            view, (address, size) = self._views[index], self._places[index]
            if not size or index in left_out:
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
                if self._move_bytes is not None:
                    others = [*others, *(pair for pairs in on_devices.values() for pair in pairs)]
                    write_pairs(others, self._move_bytes)
                    on_devices, others = {}, []
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

    def find_late(self, sources: Sequence[torch.Tensor], steady: Collection[int]) -> list[int]:
        """Return the indices of the sources that `begin` may copy, by the addresses in `steady`."""
        if len(sources) != len(self._views):
            raise ValueError(f"{len(sources)} sources for {len(self._views)} views")
        late = [
            index
            for index, (source, (_, size)) in enumerate(zip(sources, self._places, strict=True))
            if size >= LATE_BYTES_MIN
            and source.data_ptr() in steady
            and is_plain(source)
            and source.nbytes == size
            and source.dtype is self._views[index].dtype
            and not source.is_inference()
        ]
        return late if sum(self._places[one][1] for one in late) >= LATE_SUM_MIN else []

    def begin(self, sources: Mapping[int, torch.Tensor]) -> LateCopy:
        """Begin to copy these sources, by index, in a thread. See `find_late`."""
        moves = [
            (self._places[index][0], source.data_ptr(), self._places[index][1])
            for index, source in sources.items()
        ]
        return LateCopy(
            list(sources.values()),
            moves,
            self._words_of(list(sources)),
            self._thread_beside(),
            deque(cut(moves)),
            self._help,
        )

    def try_out(self, sources: Mapping[int, torch.Tensor]) -> Trial:
        """Return a comparison of these sources, by index, with the views that `copy` filled."""
        # So that the first copy that continues finds its thread.
        self._thread_beside()
        return Trial([(self._views[index], source) for index, source in sources.items()])

    def close(self) -> None:
        """Release threads and views."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._beside is not None:
            self._beside.close()
        self._views.clear()

    def _thread_beside(self) -> _Beside:
        if self._beside is None or not self._beside.is_alive:
            self._beside = _Beside(self._move_bytes)
        return self._beside

    def _words_of(self, indices: list[int]) -> WordPlaces:
        """Return where the words of these tensors lie, cached: nearly all saves have the same."""
        if self._words is None or self._words[0] != indices:
            self._words = indices, WordPlaces([self._places[index][1] for index in indices])
        return self._words[1]

    def _move(self, moves: list[_Move]) -> None:
        if self._pool is None:
            _move_all(moves, MOVE_BYTES, self._move_bytes)
            return
        self._help(deque(cut(moves)))

    def _help(self, pieces: deque[list[_Move]]) -> None:
        """Move the pieces with all threads, the caller's included, until none is left."""
        others = []
        if self._pool is not None:
            others = [
                self._pool.submit(_take_and_move, pieces, MOVE_BYTES, self._move_bytes)
                for _ in range(min(self._threads, len(pieces)) - 1)
            ]
        try:
            _take_and_move(pieces, MOVE_BYTES, self._move_bytes)
        finally:
            # No thread writes on after an error: the slot is then free for another step.
            wait(others)
        for other in others:
            other.result()


@dataclass
class _Work:
    """Pieces that the thread beside training moves. `problem` is set before `done`."""

    pieces: deque[list[_Move]]
    done: threading.Event = field(default_factory=threading.Event)
    problem: OSError | None = None


class _Beside:
    """A thread that copies beside training. To begin a new one for each copy would take longer."""

    def __init__(self, move: MoveBytes | None) -> None:
        self._move_bytes = move
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="holdfast-late-copy", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `close`, and in a forked child."""
        return self._thread.is_alive()

    def begin(self, pieces: deque[list[_Move]]) -> _Work:
        """Have the thread move the pieces until none is left."""
        work = _Work(pieces)
        self._work.put(work)
        return work

    def close(self) -> None:
        """End the thread when it has moved all."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        # Training comes first, above all the rest of the boundary that wakes this thread.
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + YIELDS
            )
        while (work := self._work.get()) is not None:
            try:
                _take_and_move(work.pieces, LATE_MOVE_BYTES, self._move_bytes)
            except OSError as error:
                # `finish` raises it.
                work.problem = error
            finally:
                # `finish` then compares words of the image.
                work.done.set()


class LateCopy:
    """A copy that a thread makes while training continues.

    Only what nothing changes before the copy is complete may be copied so. `finish` says whether
    that was true. It compares the version counters of the tensors, which torch increments when it
    changes a tensor. Not every change increments one: fused optimizers and changes through `.data`
    do not. So it also compares words of the image with those that the tensors had at first.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        moves: Sequence[_Move],
        words: WordPlaces,
        beside: _Beside,
        pieces: deque[list[_Move]],
        help_with: Callable[[deque[list[_Move]]], None],
    ) -> None:
        """`moves` has one move for each source. The thread `beside` takes the pieces."""
        # The sources stay alive: the program may drop a tensor while its bytes are read.
        self._sources, self._words = sources, words
        self._versions = [source._version for source in sources]
        self._image = [to for to, _, _ in moves]
        self._first = words.read([source for _, source, _ in moves])
        self._pieces, self._help_with = pieces, help_with
        # Last, when the words that the tensors have now are known.
        self._copied = beside.begin(pieces)

    @property
    def is_done(self) -> bool:
        """True once all bytes are copied. `finish` must be called nevertheless."""
        return self._copied.done.is_set()

    def finish(self) -> bool:
        """Copy the rest with all threads. Return True if the image is that of the beginning.

        The caller's thread must be one that changes the tensors, or training must wait for it.
        Raises `OSError` if a file cannot be written.
        """
        try:
            self._help_with(self._pieces)
        finally:
            self._copied.done.wait()
        if self._copied.problem is not None:
            raise self._copied.problem
        versions = [source._version for source in self._sources]
        return versions == self._versions and np.array_equal(
            self._words.read(self._image), self._first
        )

    def cancel(self) -> None:
        """Stop copying. The image is useless."""
        self._pieces.clear()
        self._copied.done.wait()


class Trial:
    """Says later whether tensors still are as in their complete image.

    It reads all bytes of both, so it sees every kind of change.
    """

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self._pairs = pairs

    def finish(self) -> bool:
        """Return True if nothing has changed since the image was made."""
        return all(
            _libc.memcmp(view.data_ptr(), source.data_ptr(), view.nbytes) == 0
            for view, source in self._pairs
        )


class WordPlaces:
    """Where words of tensors lie: the first, and one at least in every `SAMPLE_BYTES`.

    The last word is within the last bytes, which a copy reads last.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the bytes of the tensors, each more than one word."""
        parts = [-(-size // SAMPLE_BYTES) for size in sizes]
        strides = [(size - WORD_BYTES) // count for size, count in zip(sizes, parts, strict=True)]
        self._counts = np.array(parts) + 1
        self._offsets = np.concatenate(
            [np.arange(count + 1) * stride for count, stride in zip(parts, strides, strict=True)]
        )

    def read(self, addresses: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the words of tensors of plain bytes at these addresses.

        NumPy gathers them in one call: an array for each tensor took a millisecond and a half.
        """
        places = np.repeat(np.array(addresses, dtype=np.int64), self._counts) + self._offsets
        first = int(places.min())
        memory: np.ndarray[Any, Any] = np.asarray(_Memory(first, int(places.max()) - first + 1))
        words: np.ndarray[Any, Any] = memory[places - first]
        return words


class _Memory:
    """The word at each byte of a range of addresses, as an array. Only words of tensors are read.

    Most of the range need not exist.
    """

    def __init__(self, first: int, count: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "strides": (1,),
            "typestr": "<u8",
            "data": (first, True),
        }


def is_plain(source: torch.Tensor) -> bool:
    """Return True if the tensor's bytes lie in memory in the order of its values."""
    return (
        type(source) in _PLAIN_TYPES
        and source.layout is torch.strided
        and source.is_cpu
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


def write_pairs(pairs: Sequence[_Pair], move: MoveBytes) -> None:
    """Write tensors to the file that their views are mapped from, by a small piece of memory.

    A view of another layout than its source is filled by the mapping.
    """
    for view, source in pairs:
        if type(source) not in _PLAIN_TYPES or not source.is_contiguous():
            view.copy_(source)
            continue
        values, address, size = source.view(-1), view.data_ptr(), view.element_size()
        step = max(1, PIECE_BYTES // size)
        bounce = torch.empty(min(step, len(values)), dtype=view.dtype)
        for at in range(0, len(values), step):
            piece = bounce[: min(step, len(values) - at)]
            piece.copy_(values[at : at + step])
            move(address + at * size, piece.data_ptr(), piece.nbytes)


def _take_and_move(
    pieces: deque[list[_Move]], most: int = MOVE_BYTES, move: MoveBytes | None = None
) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        _move_all(piece, most, move)


def _move_all(
    moves: Sequence[_Move], most: int = MOVE_BYTES, move: MoveBytes | None = None
) -> None:
    # A system call costs more than `memmove`.
    act, most = (ctypes.memmove, most) if move is None else (move, PIECE_BYTES)
    for to, source, size in moves:
        for at in range(0, size, most):
            act(to + at, source + at, min(most, size - at))
