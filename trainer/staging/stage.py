"""Copying a rank's state into memory that outlives it: the flusher's slots.

`FlusherConnection` is the conversation, `Stage` the two slots mapped and cut into views, one for
each tensor, so that a save is a copy into them and nothing else. Their pages are made ready by a
thread while training begins, so that the first save costs what any other does and no start waits.
Another writes what only a commit needs, `.metadata`, and the first save waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.contracts import wire
from holdfast.contracts.errors import SaveError
from holdfast.contracts.slots import (
    DATA_OFFSET,
    NO_MORE,
    SLOTS_PER_RANK,
    Slot,
    choose_slot,
)
from holdfast.trainer.identity import Identity
from holdfast.trainer.planning.layout import Layout, encode_number, files_of, local_part
from holdfast.trainer.staging.copying import Copier
from holdfast.trainer.staging.metadata_writer import BackgroundMetadataWriter

CONNECT_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.02
# How long the flusher may take to put memory behind a slot before nobody waits for it any longer.
ALLOCATION_TIMEOUT_S: Final = 300.0
ALLOCATION_POLL_S: Final = 0.01
KEYS_TOLD_MAX: Final = 3
KEY_CHARACTERS_MAX: Final = 200

_UNWRITTEN: Final = object()
# cudaHostRegisterPortable: page-locked for every device, and not the current one alone.
_HOST_REGISTER_PORTABLE: Final = 1


class FlusherConnection:
    """This rank's line to the node's flusher; it calls again when the flusher was restarted."""

    def __init__(self, place: str, identity: Identity) -> None:
        """`place` is the path of the file by which the flusher is found: see `contracts.wire`."""
        # Of the slots that were last given to this rank.
        self.held_bytes = 0
        self._place, self._identity = place, identity
        self._connection: socket.socket | None = None

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Say hello, if that is not done; raises `SaveError` when nobody answers in time."""
        if self._connection is not None:
            return
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                self._connection = wire.connect(self._place, ANSWER_TIMEOUT_S)
                break
            except OSError as error:
                # It may be starting, or starting again.
                if time.monotonic() > give_up:
                    raise SaveError(
                        f"no flusher is found by {self._place} after {timeout_s:.0f} s "
                        f"({error.strerror}); its supervisor should have started one: "
                        "see the node's log"
                    ) from error
                time.sleep(RETRY_S)
        who = self._identity
        self._ask(
            "hello",
            rank=who.rank,
            local_rank=who.local_rank,
            local_ranks=who.local_ranks,
            launch=who.launch,
        )

    def request_slots(self, data_bytes: int, used_bytes: int) -> list[int]:
        """Descriptors of new slots for `data_bytes` each, ours to close.

        The flusher puts memory behind the first `used_bytes` of each, after it has answered.
        """
        self.connect()
        handles = self._ask("slots", bytes=data_bytes, used_bytes=used_bytes)
        self.held_bytes = SLOTS_PER_RANK * used_bytes
        if len(handles) != SLOTS_PER_RANK:
            raise SaveError(
                f"the flusher gave {len(handles)} slots, expected {SLOTS_PER_RANK}; "
                "agent and program must use one version of Holdfast"
            )
        return list(handles)

    def describe(self, layout: Layout, folder: Path) -> None:
        """Say what this rank writes; other nodes learn it in `folder` and can name what is lost."""
        who = self._identity
        if who.nodes == 1:
            return
        keys = layout.keys
        told = keys if len(keys) <= KEYS_TOLD_MAX else (*keys[: KEYS_TOLD_MAX - 1], keys[-1])
        self.notify(
            "writes",
            folder=str(folder.absolute()),
            node=who.node,
            local_ranks=who.local_ranks,
            files=[place.path for place in files_of(layout, 0)],
            keys=[key[:KEY_CHARACTERS_MAX] for key in told],
            keys_total=len(keys),
        )

    def notify(self, kind: str, **data: Any) -> None:
        """Tell without waiting; what a flusher misses it finds in shared memory itself."""
        self.keep_up()
        with contextlib.suppress(OSError):
            if self._connection is not None:
                wire.send(self._connection, kind, **data)

    def keep_up(self) -> None:
        """Call again if the flusher was restarted: it must learn of this rank's death."""
        with contextlib.suppress(OSError, SaveError):
            if self._has_hung_up():
                self.close()
                self.connect(timeout_s=0.0)

    def close(self) -> None:
        """Hang up; what is sealed is written all the same."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, kind: str, **data: Any) -> tuple[int, ...]:
        assert self._connection is not None
        try:
            wire.send(self._connection, kind, **data)
            heard = wire.receive(self._connection)
        except OSError as error:
            heard, problem = None, str(error)
        else:
            problem = "it hung up"
        if heard is None:
            self.close()
            raise SaveError(
                f"the flusher {self._place} gave no answer to `{kind}`: {problem}; nothing is "
                "saved until its flusher supervisor has started it again"
            )
        return heard[1]

    def _has_hung_up(self) -> bool:
        """The flusher never speaks unasked, so anything to be read is the end."""
        if self._connection is None:
            return True
        # Not select, which knows no descriptors above 1023.
        looking = select.poll()
        looking.register(self._connection, select.POLLIN)
        return bool(looking.poll(0))


class StagedSlot:
    """One slot, mapped and cut into a view for each tensor of the layout."""

    def __init__(self, handle: int, layout: Layout) -> None:
        try:
            self.slot = Slot(handle)
        finally:
            os.close(handle)
        self._layout = layout
        self._memory = torch.frombuffer(self.slot.data, dtype=torch.uint8)
        self._copier = Copier(
            [
                self._memory[place.at : place.at + place.bytes].view(place.dtype).view(place.shape)
                for place in layout.tensors
            ],
            torch.get_num_threads(),
        )
        self._numbers: list[Any] = [_UNWRITTEN] * len(layout.numbers)
        self._pinned = 0
        self._lock = threading.Lock()
        for at, content in layout.fixed:
            self.slot.data[at : at + len(content)] = content

    def fill(self, flat: Mapping[str, Any], train_state: bytes | None) -> None:
        """Copy the state in; on return every byte is in the slot.

        Raises `SaveError` when a number or the train state has outgrown its place.
        """
        with self._lock, torch.no_grad():
            sources = [local_part(flat[place.key]) for place in self._layout.tensors]
            self._copier.copy(sources)
        self._fill_numbers(flat)
        if train_state is not None and self._layout.train_state_at is not None:
            at = self._layout.train_state_at
            self.slot.data[at : at + len(train_state)] = train_state

    def pin(self) -> None:
        """Page-lock the memory for copies from GPUs; no save copies meanwhile.

        Uses the calling thread's current device.
        """
        with self._lock:
            self._pinned = _pin(self._memory[: self._layout.used_bytes])

    def close(self) -> None:
        """Let the memory go from this process."""
        self._copier.close()
        del self._memory
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
        # The last view may still wait for the garbage collector; the mapping then goes with it.
        with contextlib.suppress(BufferError):
            self.slot.close()

    def _fill_numbers(self, flat: Mapping[str, Any]) -> None:
        """Write the numbers that changed since this slot was last filled."""
        encoded: dict[tuple[str, int], bytes] = {}
        written = self._numbers
        for i, place in enumerate(self._layout.numbers):
            value = flat[place.key]
            # The very object that was written; a list may have changed and still be the same.
            if value is written[i] and type(value) is not list:
                continue
            text = repr(value)
            content = encoded.get((text, place.bytes))
            if content is None:
                content = encoded[text, place.bytes] = encode_number(value, place.bytes, place.key)
            self.slot.data[place.at : place.at + place.bytes] = content
            written[i] = value


class Stage:
    """A rank's slots, and which of them are in flight."""

    def __init__(
        self, connection: FlusherConnection, layout: Layout, *, gpu: torch.device | None
    ) -> None:
        """`gpu` is one that this rank's state is on; the slots' memory is then page-locked."""
        handles = connection.request_slots(layout.image_bytes, layout.used_bytes)
        self.slots = [StagedSlot(handle, layout) for handle in handles]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._make_ready, args=(layout.used_bytes, gpu), name="holdfast-map", daemon=True
        )
        self._thread.start()
        self._metadata_writer: BackgroundMetadataWriter | None = None
        if layout.late is not None:
            at, content = layout.late
            self._metadata_writer = BackgroundMetadataWriter(
                [staged.slot for staged in self.slots], at, content
            )

    def free(self) -> StagedSlot | None:
        """The slot to fill next, or None while all are being written."""
        chosen = choose_slot([staged.slot for staged in self.slots])
        return None if chosen is None else self.slots[chosen]

    @property
    def is_late_done(self) -> bool:
        """True once the slots have what is written beside training, or there is a problem."""
        return self._metadata_writer is None or self._metadata_writer.is_done

    @property
    def problem(self) -> str | None:
        """Why the slots cannot be used, as far as is known."""
        return None if self._metadata_writer is None else self._metadata_writer.problem

    def wait_for_metadata(self) -> str | None:
        """Wait until the slots have what is written beside training; why they never will."""
        return None if self._metadata_writer is None else self._metadata_writer.wait()

    def require_late(self) -> None:
        """Wait likewise; raises `SaveError` when it never comes."""
        problem = self.wait_for_metadata()
        if problem is not None:
            raise SaveError(problem)

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until the thread has done what it can; True when it has, in `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Let all slots go from this process."""
        self._is_closed.set()
        if self._metadata_writer is not None:
            self._metadata_writer.close()
        self._thread.join()
        for staged in self.slots:
            staged.close()

    def _make_ready(self, used_bytes: int, gpu: torch.device | None) -> None:
        """Map what the flusher has allocated, the slot of the first save first; then pin it.

        A save may come before this is through: it then waits for the pages that it touches.
        """
        if gpu is not None:
            # A new thread's device is GPU 0: page-locking would open a context on it, in every
            # rank of the node.
            torch.cuda.set_device(gpu)
        give_up = time.monotonic() + ALLOCATION_TIMEOUT_S
        for staged in self.slots:
            slot, mapped, stop = staged.slot, 0, DATA_OFFSET + used_bytes
            while mapped < stop:
                reached = min(slot.allocated_bytes, stop)
                if reached > mapped:
                    slot.map_pages(mapped, reached)
                    mapped = reached
                elif reached == NO_MORE or time.monotonic() > give_up:
                    break
                elif self._is_closed.wait(ALLOCATION_POLL_S):
                    return
            if gpu is not None:
                staged.pin()


def _pin(memory: torch.Tensor) -> int:
    """Page-lock a slot for copies from any GPU; its address, or 0 when the driver declines.

    Unpinned copies are slower and as right, so declining is no error.
    """
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, memory.numel(), _HOST_REGISTER_PORTABLE)
    return address if int(status) == 0 else 0
