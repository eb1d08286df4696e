"""Another user of the machine gets no weights, socket or memory of a running training."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
import torch
from tests.process.test_session import STEPS, Launch, committed_steps

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SaveError
from holdfast.contracts.node import wire
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.trainer import Session
from holdfast.trainer.slots.slots import SLOTS_PER_RANK, Slot, SlotState

NOBODY = 65534
WAIT_S = 30.0

# Listens at every address that a run's sockets have or had or might have, connects to every one
# that it sees, and tries to read the memory of the given processes.
ATTACK = """
import os, re, select, socket, sys, time
os.setgroups([]); os.setgid(NOBODY); os.setuid(NOBODY)
guesses, until = sys.argv[1:-1], time.monotonic() + float(sys.argv[-1])
bound, callers, loot, taken = {}, [], [], set()
def take(name):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        one.bind(name.encode()); one.listen(64); bound[name] = one; taken.add(name)
    except OSError:
        one.close()
for name in guesses:
    take(chr(0) + name)
print("ready", flush=True)
seen = set()
while time.monotonic() < until and not select.select([sys.stdin], [], [], 0)[0]:
    for found in re.findall(r"@(holdfast-\\S+)", open("/proc/net/unix").read()):
        name = chr(0) + found
        seen.add(name)
        if name in bound:
            continue
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(0.2)
        try:
            one.connect(name.encode())
            one.send(b'{"kind": "hello", "rank": 0, "local_rank": 0, "launch": 1}')
            one.send(b'{"kind": "slots", "bytes": 4096}')
            if socket.recv_fds(one, 65536, 8)[0]:
                loot.append(f"{found} answered")
        except OSError:
            pass
        one.close()
    for name in seen - set(bound):
        take(name)
    for name, listener in list(bound.items()):
        while select.select([listener], [], [], 0)[0]:
            callers.append((name, listener.accept()[0]))
    for name, caller in callers:
        if select.select([caller], [], [], 0)[0]:
            content = caller.recv(65536)
            if content:
                loot.append(f"{name[1:]} was told {content!r}")
            else:
                callers.remove((name, caller))
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                continue
            for number in os.listdir(f"/proc/{process}/fd"):
                loot.append(f"/proc/{process}/fd/{number} is open to all")
        except OSError:
            pass
    time.sleep(0.02)
print(repr((sorted(name[1:] for name in taken), loot)), flush=True)
"""


def old_guess(run: Path) -> str:
    """A name that anyone can compute from the run's folder."""
    return f"holdfast-{sha256(str(run).encode()).hexdigest()[:16]}-l01-n0"


@contextmanager
def attacker(*guesses: str) -> Iterator[list[tuple[list[str], list[str]]]]:
    """Run another user's program during the body; the list then has what it obtained."""
    # Started as this user, because other users may not be able to read its Python.
    script = ATTACK.replace("NOBODY", str(NOBODY))
    command = [sys.executable, "-I", "-c", script, *guesses, str(WAIT_S * 3)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    found: list[tuple[list[str], list[str]]] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield found
        words = process.communicate("enough\n", timeout=WAIT_S)[0]
        taken, loot = eval(words, {"__builtins__": {}})
        found.append((taken, loot))
    finally:
        process.kill()
        process.wait(WAIT_S)


@pytest.mark.more
def test_run_next_to_an_attacker_saves_and_leaks_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with (
        attacker(old_guess(directory)) as found,
        Launch(directory, ranks=0, sleep_s=0.1) as launch,
    ):
        launch.wait_until(8, committed=5)
        (pid,) = launch.rank_pids().values()
        (flusher,) = (
            c for c in psutil.Process(pid).children() if "holdfast.trainer.flusher" in c.cmdline()
        )
        # The address of a dead flusher is free, so the attacker takes it.
        flusher.kill()
        assert launch.wait() == 0, launch.output
    ((taken, loot),) = found
    assert old_guess(directory) in taken
    assert any(name.startswith(wire.name_prefix(directory)) for name in taken)
    assert loot == []
    assert max(committed_steps(launch.run)) == STEPS


def test_listener_of_another_user_receives_nothing(tmp_path: Path) -> None:
    name = f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
    place = tmp_path / "address"
    place.write_text(name)
    words = f"user {NOBODY} listens on the socket named in"
    with attacker(name) as found, pytest.raises(PermissionError, match=words):
        wire.connect(place, 1.0)
    assert found == [([name], [])]


class LyingFlusher:
    """Accepts ranks' slots and reports sealed steps as written, without writing anything."""

    def __init__(self, place: Path) -> None:
        with open(place, "wb") as address:
            self._listener = wire.listen(address.fileno())
        self._is_over = threading.Event()
        self._slots: list[Slot] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over.is_set():
                for key, _ in selector.select(0.01):
                    if key.fileobj is self._listener:
                        selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    heard = wire.receive(key.fileobj)
                    if heard is None:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                    elif heard[0]["kind"] in {"hello", "slots"}:
                        self._answer(key.fileobj, heard[0])
                for slot in self._slots:
                    if slot.state is SlotState.SEALED:
                        slot.state = SlotState.DONE
            for key in list(selector.get_map().values()):
                if key.fileobj is not self._listener:
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()

    def _answer(self, connection: socket.socket, message: dict[str, int]) -> None:
        if "bytes" not in message:
            wire.send(connection, "welcome")
            return
        handles = [Slot.create(message["bytes"]) for _ in range(SLOTS_PER_RANK)]
        self._slots += [Slot(handle) for handle in handles]
        wire.send(connection, "slots", descriptors=tuple(handles), numbers=[0, 1])
        for handle in handles:
            os.close(handle)


def test_last_save_reported_without_a_manifest_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = RunPaths(tmp_path / "gpt"), tmp_path / "address"
    run.attempt(1).launch(1).mkdir(parents=True)
    flusher = LyingFlusher(place)
    status_table, handle = RankStatusTable.create(1)
    told = {"RANK_STATUS": f"/proc/{os.getpid()}/fd/{handle}", "FLUSHER": str(place)}
    told |= {"RUN_DIR": str(run.directory), "ATTEMPT": "1", "LAUNCH": "1"}
    for name, value in told.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    model = torch.nn.Linear(2, 2)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with pytest.raises(SaveError, match=r"reported step-00000002.* without a manifest"):
            list(session.steps(2))
    finally:
        session.close()
        flusher.close()
        status_table.close()
        os.close(handle)
    assert run.list_checkpoints() == []
