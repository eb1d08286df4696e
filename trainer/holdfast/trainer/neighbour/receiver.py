"""What a node keeps of other nodes' snapshots, and the thread that receives it.

A copy counts once every block has matched the owner's checksum. It is checked again before it is
used, because memory may be damaged meanwhile.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import to_json, write_bytes
from holdfast.contracts.node import handshake, limits
from holdfast.trainer.neighbour.line import Line, answer
from holdfast.trainer.neighbour.node_copy import PIECE_BYTES, CopyBlock, NodeCopy

# What a copy leaves to the ranks.
RESERVE_BYTES: Final = 512 << 20
CALLERS_MAX: Final = 16
BACKLOG: Final = 16
LOOK_S: Final = 1.0
FILES_NAMED_MAX: Final = 4
STRANGE: Final = (OSError, ValueError, LookupError, TypeError, MemoryError)


class CopyReceiver:
    """The copies of other nodes' snapshots, by owner. Safe for several threads."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """`say` writes a line to the flusher's log."""
        self._say = say
        self._lock = threading.Lock()
        self._copies: dict[int, list[NodeCopy]] = {}
        self._launch = 0
        self._is_frozen = False
        self._listener: socket.socket | None = None
        self._callers = 0
        # The newest connection of each owner. What an earlier one has still to say is out of date.
        self._newest: dict[int, Line] = {}

    def listen(
        self, place: Path, launch: int, *, ports: range | None, addresses: Sequence[str]
    ) -> None:
        """Receive the copies of a launch, and forget those of earlier ones.

        Writes the address file `place`. Raises `OSError` or `AgreementError` if that fails.
        """
        self.forget()
        self._launch, self._is_frozen = launch, False
        if self._listener is not None:
            self._listener.close()
        self._listener = listener = handshake.listen(ports, BACKLOG)
        token = secrets.token_bytes(32)
        document = {
            "addresses": list(addresses) or handshake.own_addresses(),
            "port": int(listener.getsockname()[1]),
            "token": token.hex(),
        }
        write_bytes(place, to_json(document), mode=0o600)
        threading.Thread(
            target=self._accept, args=(listener, token, launch), name="neighbour", daemon=True
        ).start()

    def freeze(self) -> None:
        """Keep the copies as they are until the next `listen`: they may have to be written."""
        with self._lock:
            self._is_frozen = True

    def held(self, owner: int, launch: int) -> list[int]:
        """Return the steps of an owner whose copies match their checksums, newest first.

        Damaged ones are reported and dropped.
        """
        with self._lock:
            copies = self._copies.get(owner, [])
            whole = [one for one in copies if one.launch == launch and self._is_whole(one)]
            self._copies[owner] = whole
            return sorted((one.step for one in whole), reverse=True)

    def copy_of(self, owner: int, step: int) -> NodeCopy | None:
        """Return the copy of a step, None if there is none."""
        with self._lock:
            copies = self._copies.get(owner, ())
            return next((one for one in copies if one.step == step), None)

    def forget(self) -> None:
        """Free all copies."""
        with self._lock:
            for copies in self._copies.values():
                for each in copies:
                    each.close()
            self._copies.clear()

    def close(self) -> None:
        """Stop listening, and free all copies."""
        self._launch = -1
        if self._listener is not None:
            self._listener.close()
        self.forget()

    def _is_whole(self, copied: NodeCopy) -> bool:
        damaged = copied.damage()
        if damaged:
            self._say(
                f"the copy of node {copied.node}'s snapshot of step {copied.step} is damaged in "
                f"memory and is not used: {name_files(damaged)}"
            )
        return not damaged

    def _accept(self, listener: socket.socket, token: bytes, launch: int) -> None:
        listener.settimeout(LOOK_S)
        while self._launch == launch:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._callers >= CALLERS_MAX:
                connected.close()
                continue
            self._callers += 1
            threading.Thread(
                target=self._serve,
                args=(connected, token, launch),
                name="neighbour's copies",
                daemon=True,
            ).start()

    def _serve(self, connected: socket.socket, token: bytes, launch: int) -> None:
        """Receive the copies of one owner until it hangs up."""
        try:
            line, hello = answer(connected, token, lambda: self._launch != launch)
            owner = int(hello["node"])
            with self._lock:
                self._newest[owner] = line
            try:
                while True:
                    message = line.receive(LOOK_S)
                    if message is not None:
                        self._take(line, owner, launch, message)
            finally:
                line.close()
        except STRANGE as error:
            # A caller that is none of ours, or an owner that is gone. It may call again.
            if not isinstance(error, ConnectionError):
                self._say(f"a caller was refused: {type(error).__name__}: {error}")
        finally:
            self._callers -= 1

    def _take(self, line: Line, owner: int, launch: int, message: Mapping[str, Any]) -> None:
        if message["kind"] != "begin":
            raise ValueError(f"a message {message['kind']!r}: expected begin")
        record, keep = message["record"], message["keep"]
        if int(record["launch"]) != launch:
            raise ValueError(f"a copy of launch {record['launch']}, expected {launch}")
        try:
            former = self._keep_only(owner, keep, line)
            copied = self._make_room(owner, record)
        except (MemoryError, BlockingIOError) as error:
            line.send("refused", reason=str(error))
            return
        try:
            damaged = self._receive(line, copied, former)
            is_held = not damaged and self._add(owner, copied, line)
        except BaseException:
            copied.close()
            raise
        if not is_held:
            copied.close()
            line.send("damaged", files=damaged)
            return
        line.send("held", step=copied.step)

    def _make_room(self, owner: int, record: Mapping[str, Any]) -> NodeCopy:
        """Return an empty copy for a record. Raises `MemoryError` if it would not fit."""
        copied = NodeCopy.of_record(record)
        free = limits.free_memory()
        if copied.node != owner:
            copied.close()
            raise ValueError(f"a copy of node {copied.node}, expected {owner}")
        if free is not None and free - copied.bytes < RESERVE_BYTES:
            copied.close()
            raise MemoryError(
                f"{free >> 20} MiB of memory are free, but a copy takes {copied.bytes >> 20} MiB "
                f"and {RESERVE_BYTES >> 20} MiB must stay free"
            )
        return copied

    def _keep_only(self, owner: int, keep: int, line: Line) -> NodeCopy | None:
        """Free the owner's other steps; return the one that is kept, if it is there."""
        with self._lock:
            self._require_newest(owner, line)
            if self._is_frozen:
                raise BlockingIOError("its node reads the copies after a crash")
            copies = self._copies.get(owner, [])
            kept = [one for one in copies if one.step == keep]
            for each in copies:
                if each not in kept:
                    each.close()
            self._copies[owner] = kept
            return kept[0] if kept else None

    def _require_newest(self, owner: int, line: Line) -> None:
        if self._newest.get(owner) is not line:
            raise ConnectionAbortedError(f"node {owner} has called again since")

    def _add(self, owner: int, copied: NodeCopy, line: Line) -> bool:
        with self._lock:
            self._require_newest(owner, line)
            if self._is_frozen:
                return False
            self._copies.setdefault(owner, []).append(copied)
            return True

    def _receive(self, line: Line, copied: NodeCopy, former: NodeCopy | None) -> list[str]:
        """Take all blocks from `former` or the owner; return the files with a wrong block."""
        blocks = list(copied.blocks())
        lacks = [number for number, block in enumerate(blocks) if not _reuse(copied, former, block)]
        line.send("ready", lacks=lacks)
        damaged = []
        for number in lacks:
            message = line.expect("block")
            block = blocks[number]
            if message["number"] != number or line.waiting_bytes != block.bytes:
                raise ValueError(f"block {message['number']} of {line.waiting_bytes} bytes came")
            line.take(copied.content(block.rank, block.at, block.bytes))
            if not copied.has(block):
                damaged.append(block.path)
        line.expect("end")
        return list(dict.fromkeys(damaged))


def _reuse(copied: NodeCopy, former: NodeCopy | None, block: CopyBlock) -> bool:
    """Copy a block that has not changed from the step before; return False if it has."""
    if former is None or block.rank >= len(former.data):
        return False
    if block.at + block.bytes > len(former.data[block.rank]):
        return False
    # The checksum of the bytes themselves, because the former copy may be damaged.
    if not _may_be_equal(former, block):
        return False
    source = former.content(block.rank, block.at, block.bytes)
    target = copied.content(block.rank, block.at, block.bytes)
    for at in range(0, block.bytes, PIECE_BYTES):
        target[at : at + PIECE_BYTES] = source[at : at + PIECE_BYTES]
    return copied.has(block)


def _may_be_equal(former: NodeCopy, block: CopyBlock) -> bool:
    """Return True if the former step has a block of this checksum at the same place."""
    for file, entry in zip(
        former.tables[block.rank].files, former.entries[block.rank], strict=True
    ):
        if file.path == block.path:
            start = block.at - file.offset
            return any(span == (start, block.bytes, block.digest) for span in entry.spans())
    return False


def name_files(paths: Sequence[str]) -> str:
    """Name the first of some files for a message."""
    more = f" and {len(paths) - FILES_NAMED_MAX} more" if len(paths) > FILES_NAMED_MAX else ""
    return ", ".join(paths[:FILES_NAMED_MAX]) + more
