"""Copy a rank's state into the flusher's staging slots, which outlive the rank.

`FlusherConnection` exchanges messages with the flusher. `Stage` maps the two slots and cuts them
into one view per tensor, so that a save is only a copy into the views. One thread prepares the
slots' pages while training begins, so the first save costs no more than later ones. A second thread
writes `.metadata`, which only a commit needs. The first save waits for it.
"""

from __future__ import annotations

import contextlib
import operator
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import compress, count
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from holdfast.contracts.errors import SaveError
from holdfast.contracts.node import wire
from holdfast.trainer.planning.layout import (
    LateContent,
    Layout,
    encode_number,
    files_of,
    local_parts,
)
from holdfast.trainer.planning.signature import Flat, Picker, TensorFacts, picker
from holdfast.trainer.process import devices
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.slots.modes import DIRECTORY_KEY, MEMORY, Staging
from holdfast.trainer.slots.slots import DATA_OFFSET, NO_MORE, Slot, choose_slot
from holdfast.trainer.staging.copying import Copier, LateCopy, Trial

# A thread that writes `.metadata` into the slots while training continues.


class BackgroundMetadataWriter:
    """Writes one content at one offset of every slot, beginning with the slot of the first save."""

    def __init__(self, slots: Sequence[Slot], at: int, content: LateContent) -> None:
        self._slots, self._at, self._content = slots, at, content
        self._is_closed = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-late", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True once all is written or an error ended the thread."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """The error that ended the thread, or None."""
        return self._problem

    def wait(self) -> str | None:
        """Wait until all is written. Return the error, or None.

        The wait is bounded, because the thread waits for no other process.
        """
        self._thread.join()
        return self._problem

    def close(self) -> None:
        """Stop writing. Unless it was done, the slots can no longer be used."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            # No caller waits for this thread. The first save raises the error on all ranks.
            self._problem = (
                f".metadata could not be built in the background: {type(error).__name__}: {error}. "
                "If memory was short, use more nodes or request more memory per node. The next "
                "prepare(state) tries again"
            )

    def _write(self) -> None:
        end = self._at + self._content.bytes
        first, *others = self._slots
        self._content.write_to(first.data[self._at : end], self._is_closed.is_set)
        for slot in others:
            if not self._is_closed.is_set():
                # numpy releases the interpreter lock while it copies.
                written = np.frombuffer(first.data[self._at : end], dtype=np.uint8)
                np.frombuffer(slot.data[self._at : end], dtype=np.uint8)[:] = written


CONNECT_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.02
# The longest wait for the flusher to allocate the memory of a slot.
ALLOCATION_TIMEOUT_S: Final = 300.0
ALLOCATION_POLL_S: Final = 0.01
KEYS_NAMED_MAX: Final = 3
KEY_CHARACTERS_MAX: Final = 200

_UNWRITTEN: Final = object()


class FlusherConnection:
    """This rank's connection to the node's flusher. It reconnects after a flusher restart."""

    def __init__(self, place: str, identity: Identity, staging: Staging = MEMORY) -> None:
        """`place` is the path of the file that names the flusher's socket: see `contracts.wire`.

        `staging` says how many slots this rank gets, and where they are.
        """
        self.staging = staging
        self._place, self._identity = place, identity
        self._connection: socket.socket | None = None

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect if not connected. Raises `SaveError` if no flusher answers in time."""
        if self._connection is not None:
            return
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                self._connection = wire.connect(self._place, ANSWER_TIMEOUT_S)
                break
            except OSError as error:
                # The flusher may be starting or restarting.
                if time.monotonic() > give_up:
                    raise SaveError(
                        f"no flusher answered at {self._place} within {timeout_s:.0f} s "
                        f"({error.strerror}). The flusher supervisor should have started one: "
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
        """Return descriptors of new slots of `data_bytes` each. The caller closes them.

        The flusher allocates the first `used_bytes` of each slot after it has answered. Raises
        `SaveError` if it has no space for them on a disk.
        """
        return self._request(data_bytes, used_bytes=used_bytes)

    def request_file_slots(self, data_bytes: int) -> list[Slot]:
        """Return new slots for files of the program, of `data_bytes` each, without memory yet."""
        handles = self._request(data_bytes, of_program=True)
        try:
            return [Slot(handle) for handle in handles]
        finally:
            for handle in handles:
                os.close(handle)

    def release_slots(self, *, of_program: bool = False) -> None:
        """Have the flusher free this rank's slots, and wait until it has.

        Nothing in them may still have to be written. So the next ones never need memory together
        with these. Raises `SaveError` if the flusher does not free them.
        """
        self.keep_up()
        self.connect()
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while left := int(self._ask("release", of_program=of_program)[0]["left"]):
            if time.monotonic() > give_up:
                raise SaveError(
                    f"the flusher did not free {left} staging slots of the former plan within "
                    f"{ANSWER_TIMEOUT_S:.0f} s: see its log"
                )
            time.sleep(RETRY_S)

    def _request(self, data_bytes: int, **facts: Any) -> list[int]:
        count, directory = self.staging.slots, self.staging.find_directory()
        self.connect()
        answer, handles = self._ask(
            "slots", bytes=data_bytes, count=count, directory=directory, **facts
        )
        if problem := answer.get("problem"):
            raise SaveError(
                f"{directory} cannot hold {count} images of {data_bytes} bytes: {problem}. "
                f"Free space there, or name another directory as {DIRECTORY_KEY}"
            )
        if len(handles) != count:
            for handle in handles:
                os.close(handle)
            raise SaveError(
                f"the flusher gave {len(handles)} slots, but {count} were expected. Use "
                "the same version of Holdfast for the agent and the program"
            )
        return list(handles)

    def describe(self, layout: Layout, folder: Path) -> None:
        """Report what this rank writes. Other nodes read it in `folder` if this node is lost."""
        who = self._identity
        if who.nodes == 1:
            return
        keys = layout.keys
        named = keys if len(keys) <= KEYS_NAMED_MAX else (*keys[: KEYS_NAMED_MAX - 1], keys[-1])
        self.notify(
            "writes",
            folder=str(folder.absolute()),
            node=who.node,
            nodes=who.nodes,
            local_ranks=who.local_ranks,
            files=[place.path for place in files_of(layout, 0)],
            keys=[key[:KEY_CHARACTERS_MAX] for key in named],
            keys_total=len(keys),
        )

    def notify(self, kind: str, **data: Any) -> None:
        """Send a message without waiting. A flusher that misses it reads the slots instead."""
        self.keep_up()
        with contextlib.suppress(OSError):
            if self._connection is not None:
                wire.send(self._connection, kind, **data)

    def leave(self) -> None:
        """Tell the flusher that this rank ends as planned, and wait until it has heard that.

        Otherwise it tells the other nodes which snapshots this node has.
        """
        self.keep_up()
        if self._connection is not None and self._identity.nodes > 1:
            with contextlib.suppress(SaveError):
                self._ask("leaves")

    def keep_up(self) -> None:
        """Reconnect if the flusher was restarted, so that it can detect this rank's death."""
        with contextlib.suppress(OSError, SaveError):
            if self._has_hung_up():
                self.close()
                self.connect(timeout_s=0.0)

    def close(self) -> None:
        """Close the connection. Sealed slots are written nevertheless."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, kind: str, **data: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
        assert self._connection is not None
        try:
            wire.send(self._connection, kind, **data)
            received = wire.receive(self._connection)
        except OSError as error:
            received, problem = None, str(error)
        else:
            problem = "the connection was closed"
        if received is None:
            self.close()
            raise SaveError(
                f"the flusher {self._place} did not answer `{kind}`: {problem}. Nothing is saved "
                "until the flusher supervisor has restarted it"
            )
        return received

    def _has_hung_up(self) -> bool:
        """Return True without a connection. The flusher sends only replies, so any input is EOF."""
        if self._connection is None:
            return True
        # Not select, which does not support descriptors above 1023.
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(0))


class _Keys:
    """Which values of a flattened state are the tensors and the numbers of a layout."""

    def __init__(self, layout: Layout) -> None:
        self._tensors = [place.key for place in layout.tensors]
        self._numbers = [place.key for place in layout.numbers]
        self._places: tuple[list[str], Picker, Picker] | None = None

    def pick(self, flat: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the values of the tensors and those of the numbers."""
        if not isinstance(flat, Flat):
            return [flat[key] for key in self._tensors], [flat[key] for key in self._numbers]
        # Most states have the same names, so their values have the same places.
        if self._places is None or self._places[0] is not flat.names:
            at = {name: number for number, name in enumerate(flat.names)}
            pickers = [picker([at[key] for key in keys]) for keys in (self._tensors, self._numbers)]
            self._places = flat.names, pickers[0], pickers[1]
        _, tensors, numbers = self._places
        return tensors(flat.leaves), numbers(flat.leaves)


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
            self.slot.move,
        )
        self._keys = _Keys(layout)
        # What was known of the state that was copied last.
        self._facts: TensorFacts | None = None
        self._numbers: list[Any] = [_UNWRITTEN] * len(layout.numbers)
        self._pinned = 0
        self._lock = threading.Lock()
        for at, content in layout.fixed:
            self.slot.data[at : at + len(content)] = content

    def fill(
        self,
        flat: Mapping[str, Any],
        train_state: bytes | None,
        steady: Collection[int] = frozenset(),
        *,
        is_trial: bool = False,
    ) -> LateCopy | Trial | None:
        """Copy the state into the slot. Every byte is there on return, unless a copy is returned.

        That one copies tensors whose addresses are in `steady` while training continues. With
        `is_trial`, a comparison of these tensors is returned in its place. Raises `SaveError` if a
        number or the train state no longer fits its place, or if a disk fails.
        """
        values, numbers = self._keys.pick(flat)
        self._fill_numbers(numbers)
        if train_state is not None and self._layout.train_state_at is not None:
            at = self._layout.train_state_at
            self.slot.data[at : at + len(train_state)] = train_state
        with self._lock, torch.no_grad():
            facts = flat.facts if isinstance(flat, Flat) else None
            are_same, self._facts = facts is not None and facts is self._facts, None
            try:
                late = self._copier.copy(
                    local_parts(values), steady, is_trial=is_trial, are_same=are_same
                )
            except OSError as error:
                raise SaveError(f"the state cannot be staged: {error.strerror}") from error
            self._facts = facts
            return late

    def append_storage_meta(self, content: bytes) -> None:
        """Write `content` over the last byte of a complete `.metadata` and after it."""
        end = self._layout.metadata_end
        if content and end is not None:
            self.slot.data[end - 1 : end - 1 + len(content)] = content

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory for copies from `device`. No save can copy meanwhile.

        Uses the calling thread's current device.
        """
        with self._lock:
            memory = self._memory[: self._layout.used_bytes]
            self._pinned = devices.page_lock(memory, device)

    def close(self) -> None:
        """Release the memory in this process."""
        self._copier.close()
        del self._memory
        devices.page_unlock(self._pinned)
        # The garbage collector may still hold the last view. It then frees the mapping too.
        with contextlib.suppress(BufferError):
            self.slot.close()

    def _fill_numbers(self, values: Sequence[Any]) -> None:
        """Write the numbers that changed since this slot was last filled."""
        encoded: dict[tuple[str, int], bytes] = {}
        written = self._numbers
        changed = compress(count(), map(operator.is_not, values, written))
        for place, value, i in ((self._layout.numbers[i], values[i], i) for i in changed):
            text = repr(value)
            content = encoded.get((text, place.bytes))
            if content is None:
                content = encoded[text, place.bytes] = encode_number(value, place.bytes, place.key)
            self.slot.data[place.at : place.at + place.bytes] = content
            # A list may change in place.
            written[i] = _UNWRITTEN if type(value) is list else value


class Stage:
    """A rank's slots, and which of them are in flight."""

    def __init__(
        self, connection: FlusherConnection, layout: Layout, *, device: torch.device | None
    ) -> None:
        """`device` is one of this rank's state. The slots' memory is then page-locked.

        Page-locked pages of a file would be memory too, so those of slots on disk are not.
        """
        if connection.staging.is_on_disk:
            device = None
        handles = connection.request_slots(layout.image_bytes, layout.used_bytes)
        self.slots = [StagedSlot(handle, layout) for handle in handles]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._make_ready,
            args=(layout.used_bytes, device),
            name="holdfast-map",
            daemon=True,
        )
        self._thread.start()
        self._metadata_writer: BackgroundMetadataWriter | None = None
        if layout.late is not None:
            at, content = layout.late
            self._metadata_writer = BackgroundMetadataWriter(
                [staged.slot for staged in self.slots], at, content
            )

    def free(self) -> StagedSlot | None:
        """Return the slot to fill next, or None while all are being written."""
        chosen = choose_slot([staged.slot for staged in self.slots])
        return None if chosen is None else self.slots[chosen]

    @property
    def is_late_done(self) -> bool:
        """True once the background thread has written the slots or has failed."""
        return self._metadata_writer is None or self._metadata_writer.is_done

    @property
    def problem(self) -> str | None:
        """Why the slots cannot be used, None if no error is known."""
        return None if self._metadata_writer is None else self._metadata_writer.problem

    def wait_for_metadata(self) -> str | None:
        """Wait until the background thread has written the slots. Return its error, or None."""
        return None if self._metadata_writer is None else self._metadata_writer.wait()

    def require_late(self) -> None:
        """Wait in the same way, and raise `SaveError` if the thread failed."""
        problem = self.wait_for_metadata()
        if problem is not None:
            raise SaveError(problem)

    def close(self) -> None:
        """Release all slots in this process."""
        self._is_closed.set()
        if self._metadata_writer is not None:
            self._metadata_writer.close()
        self._thread.join()
        for staged in self.slots:
            staged.close()

    def _make_ready(self, used_bytes: int, device: torch.device | None) -> None:
        """Map the pages that the flusher has allocated, the first save's slot first; then pin.

        A save may begin earlier. It then waits for the pages that it touches.
        """
        if device is not None:
            devices.enter(device)
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
            if device is not None:
                staged.pin(device)
