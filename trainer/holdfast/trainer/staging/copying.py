"""Copy a rank's tensors into its staging slot at memory speed.

Plain CPU tensors are copied by `memmove`, which releases the interpreter lock: one parallel region
for all tensors, with as many threads as torch may use for this rank. `Tensor.copy_` would open one
parallel region per tensor and wait for its slowest thread each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import compress, count
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from holdfast.trainer.planning.signature import Picker, picker
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
# Moves up to so many bytes are made together.
SMALL_BYTES_MAX: Final = 64

_libc: Final = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_Move = tuple[int, int, int]
"""(destination, source, bytes): addresses in this process"""

MoveBytes = Callable[[int, int, int], object]
"""Moves bytes: `memmove`, or what writes them to a file. It may raise `OSError`."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""(view, source)"""

_Facts = tuple[list[Any], ...]
"""What the way to copy each source depends on, a list for each fact"""

_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
# Called for hundreds of tensors at each save, in C where `map` calls them.
_address: Final = torch.Tensor.data_ptr
_is_inference: Final = torch.Tensor.is_inference
_storage: Final = torch.Tensor.untyped_storage
_version: Final = operator.attrgetter("_version")
_bytes: Final = operator.attrgetter("nbytes")
_dtype: Final = operator.attrgetter("dtype")
_device: Final = operator.attrgetter("device")


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
        # How to copy each source, by index: a move for a plain one, the device of another. Kept
        # from copy to copy, with the facts that this depends on.
        self._moves: dict[int, _Move] = {}
        self._others: dict[int, torch.device] = {}
        self._facts: _Facts | None = None
        self._late: _LatePlan | None = None

    def copy(
        self,
        sources: Sequence[torch.Tensor],
        steady: Collection[int] = (),
        *,
        is_trial: bool = False,
        are_same: bool = False,
    ) -> LateCopy | Trial | None:
        """Copy each source into its view. All bytes are there on return, unless one is returned.

        With addresses in `steady`, it begins to copy these sources in a thread, see `_find_late`.
        With `is_trial`, it returns a comparison of them with their views instead. With `are_same`,
        the caller knows that the sources have the memory and the form of those of the last copy.

        The copies follow all work queued on the sources' devices, on any stream: a program may
        update a tensor on a stream that its current one does not wait for yet. Raises `OSError` if
        a file cannot be written.
        """
        if not are_same or self._facts is None:
            self._sort(sources)
        plan = self._plan_late(sources, steady) if steady else None
        if plan is None:
            self._copy(sources, list(self._moves.values()))
            return None
        if is_trial:
            self._copy(sources, list(self._moves.values()))
            return self._try_out(sources, plan.indices)
        self._copy(sources, plan.others)
        plan.small.copy()
        # Last: the thread takes time from all that follows.
        return LateCopy(plan.pick(sources), plan, self._thread_beside(), self._help)

    def _sort(self, sources: Sequence[torch.Tensor]) -> None:
        """Find how to copy the sources that differ from those of the last copy."""
        if len(sources) != len(self._views):
            raise ValueError(f"{len(sources)} sources for {len(self._views)} views")
        facts, former = _facts_of(sources), self._facts
        changed = set(range(len(sources)))
        if facts is not None and former is not None:
            changed = {
                index
                for now, then in zip(facts, former, strict=True)
                # Most lists are equal.
                if now != then
                for index in compress(count(), map(operator.ne, now, then))
            }
        # Until all are sorted: an error must not leave some out of the next copy.
        self._facts = None
        if changed:
            self._late = None
        for index in changed:
            self._moves.pop(index, None)
            self._others.pop(index, None)
            source, view, (address, size) = sources[index], self._views[index], self._places[index]
            is_move = is_plain(source) and source.nbytes == size and source.dtype is view.dtype
            if size and is_move:
                self._moves[index] = address, source.data_ptr(), size
            elif size:
                self._others[index] = source.device
        self._facts = facts

    def _plan_late(
        self, sources: Sequence[torch.Tensor], steady: Collection[int]
    ) -> _LatePlan | None:
        """Return the copy of the sources that a thread may copy, None if there are too few.

        The plan of the last copy is kept while the same sources are steady.
        """
        plan = self._late
        is_known = plan is not None and (plan.steady is steady or plan.steady == steady)
        # The sources may be other tensors of the same memory.
        if plan is not None and is_known and not any(map(_is_inference, plan.pick(sources))):
            return plan
        late = self._find_late(sources, steady)
        self._late = (
            _LatePlan.of(self._moves, late, steady, is_on_disk=self._move_bytes is not None)
            if late
            else None
        )
        return self._late

    def _find_late(self, sources: Sequence[torch.Tensor], steady: Collection[int]) -> list[int]:
        """Return the indices of the sources that a thread may copy, by the addresses in `steady`.

        Only plain and large ones, if they are worth a thread together.
        """
        late = [
            index
            for index, (_, address, size) in self._moves.items()
            if size >= LATE_BYTES_MIN and address in steady and not sources[index].is_inference()
        ]
        return late if sum(self._places[index][1] for index in late) >= LATE_SUM_MIN else []

    def _copy(self, sources: Sequence[torch.Tensor], moves: Sequence[_Move]) -> None:
        """Make the moves, and copy the sources that have none."""
        on_devices: dict[torch.device, list[_Pair]] = {}
        others: list[_Pair] = []
        for index, device in self._others.items():
            is_streamed = devices.is_streamed(device)
            its = on_devices.setdefault(device, []) if is_streamed else others
            its.append((self._views[index], sources[index]))
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

    def _try_out(self, sources: Sequence[torch.Tensor], late: Sequence[int]) -> Trial:
        # So that the first copy that continues finds its thread.
        self._thread_beside()
        return Trial([(self._views[index], sources[index].detach()) for index in late])

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

    def _move(self, moves: Sequence[_Move]) -> None:
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
    """Pieces that the thread beside training moves. All else is set before `done`.

    `words` are those of the image, if the thread has moved the last piece.
    """

    pieces: deque[list[_Move]]
    image_words: SampledWords
    done: threading.Event = field(default_factory=threading.Event)
    problem: OSError | None = None
    words: np.ndarray[Any, Any] | None = None


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

    def begin(self, pieces: deque[list[_Move]], image_words: SampledWords) -> _Work:
        """Have the thread move the pieces until none is left, and then read the words."""
        work = _Work(pieces, image_words)
        self._work.put(work)
        return work

    def close(self) -> None:
        """End the thread when it has moved all."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        # Training comes first, above all the rest of the boundary that wakes this thread. The
        # kernel lets no thread of this class interrupt an ordinary one when it wakes.
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + YIELDS
            )
        while (work := self._work.get()) is not None:
            try:
                _take_and_move(work.pieces, LATE_MOVE_BYTES, self._move_bytes)
                work.words = work.image_words.read()
            except OSError as error:
                # `finish` raises it.
                work.problem = error
            finally:
                # `finish` then compares words of the image.
                work.done.set()


@dataclass(frozen=True)
class _LatePlan:
    """What a late copy of the sources at `indices` moves, and the words that it compares.

    `others` and `small` are the moves of the other sources, and `steady` the addresses that it was
    made for.
    """

    indices: list[int]
    pick: Picker
    steady: Collection[int]
    others: list[_Move]
    small: SmallMoves
    pieces: list[list[_Move]]
    source_words: SampledWords
    image_words: SampledWords

    @classmethod
    def of(
        cls,
        moves: Mapping[int, _Move],
        indices: list[int],
        steady: Collection[int],
        *,
        is_on_disk: bool,
    ) -> _LatePlan:
        """Plan for those of the `moves` that the thread makes."""
        late = [moves[index] for index in indices]
        left = [moves[index] for index in moves.keys() - set(indices)]
        small = [move for move in left if move[2] <= SMALL_BYTES_MAX and not is_on_disk]
        return cls(
            indices,
            picker(indices),
            steady,
            [move for move in left if move[2] > SMALL_BYTES_MAX or is_on_disk],
            SmallMoves(small),
            cut(late),
            SampledWords([(source, size) for _, source, size in late]),
            SampledWords([(to, size) for to, _, size in late]),
        )


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
        plan: _LatePlan,
        beside: _Beside,
        help_with: Callable[[deque[list[_Move]]], None],
    ) -> None:
        """`sources` are those of the plan. The thread `beside` takes the pieces."""
        self._sources, self._plan, self._help_with = sources, plan, help_with
        # The memory stays alive: the program may drop a tensor, or give it other memory, while its
        # bytes are read.
        self._held = list(map(_storage, sources))
        self._versions = list(map(_version, sources))
        self._first = plan.source_words.read()
        self._pieces = deque(plan.pieces)
        # Last, when the words that the tensors have now are known.
        self._copied = beside.begin(self._pieces, plan.image_words)

    @property
    def indices(self) -> list[int]:
        """The indices of the sources that are copied late."""
        return self._plan.indices

    @property
    def is_done(self) -> bool:
        """True once all bytes are copied. `finish` must be called nevertheless."""
        return self._copied.done.is_set()

    def finish(self) -> bool:
        """Copy the rest with all threads. Return True if the image is that of the beginning.

        The caller's thread must be one that changes the tensors, or training must wait for it.
        Raises `OSError` if a file cannot be written.
        """
        copied = self._copied
        is_done = copied.done.is_set()
        if not is_done:
            try:
                self._help_with(self._pieces)
            finally:
                copied.done.wait()
        if copied.problem is not None:
            raise copied.problem
        # If this thread has helped, its last piece may be younger than what the other has read.
        words = copied.words if is_done else None
        if words is None:
            words = self._plan.image_words.read()
        return list(map(_version, self._sources)) == self._versions and np.array_equal(
            words, self._first
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


class SmallMoves:
    """Moves of a few bytes each, such as the counters of an optimizer, made by one call of NumPy.

    Hundreds of calls of `memmove` take as long as megabytes.
    """

    def __init__(self, moves: Sequence[_Move]) -> None:
        """`moves` must not overlap."""
        self._image: np.ndarray[Any, Any] | None = None
        if not moves:
            return
        self._image, self._to = _bytes_at([(to, size) for to, _, size in moves])
        self._memory, self._from = _bytes_at([(source, size) for _, source, size in moves])

    def copy(self) -> None:
        if self._image is not None:
            self._image[self._to] = self._memory[self._from]


def _bytes_at(
    places: Sequence[tuple[int, int]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return memory as an array of bytes, and the indices of those of all places in it."""
    first = min(address for address, _ in places)
    end = max(address + size for address, size in places)
    indices = np.concatenate(
        [np.arange(address - first, address - first + size) for address, size in places]
    )
    return np.asarray(_Memory(first, end - first, "|u1", is_written=True)), indices


class SampledWords:
    """Words of tensors of plain bytes: the first, and one at least in every `SAMPLE_BYTES`.

    The last word is within the last bytes, which a copy reads last.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """`places` are the addresses and bytes of the tensors, each more than one word."""
        addresses, sizes = np.array(places, dtype=np.int64).T
        parts = -(-sizes // SAMPLE_BYTES)
        counts, strides = parts + 1, (sizes - WORD_BYTES) // parts
        # The number of each word within its tensor.
        numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        words = np.repeat(addresses, counts) + numbers * np.repeat(strides, counts)
        first = int(words.min())
        self._memory: np.ndarray[Any, Any] = np.asarray(
            _Memory(first, int(words.max()) - first + 1, "<u8")
        )
        self._words = words - first

    def read(self) -> np.ndarray[Any, Any]:
        """Return the words as they are now.

        NumPy gathers them in one call: an array for each tensor took a millisecond and a half.
        """
        found: np.ndarray[Any, Any] = self._memory[self._words]
        return found


class _Memory:
    """An item of `kind` at each byte of a range of addresses, as an array.

    Only items of tensors may be used. Most of the range need not exist.
    """

    def __init__(self, first: int, count: int, kind: str, *, is_written: bool = False) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "strides": (1,),
            "typestr": kind,
            "data": (first, not is_written),
        }


def _facts_of(sources: Sequence[torch.Tensor]) -> _Facts | None:
    """Return the facts of plain tensors, or None if any source has another type or layout.

    The program may change each of them between two copies. Lists that are made and compared in C
    take a quarter of the time of a loop.
    """
    if not _PLAIN_TYPES.issuperset(map(type, sources)):
        return None
    if any(source.layout is not torch.strided for source in sources):
        return None
    return (
        list(map(_address, sources)),
        list(map(_bytes, sources)),
        list(map(_dtype, sources)),
        list(map(_device, sources)),
        list(map(torch.Tensor.is_contiguous, sources)),
        list(map(torch.Tensor.is_conj, sources)),
        list(map(torch.Tensor.is_neg, sources)),
    )


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
