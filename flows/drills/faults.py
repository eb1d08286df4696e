"""The faults: each acts from outside, on processes, files and servers, and says what it did.

A fault returns when it has been done; how the run recovers is watched by `conduct`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.errors import ServiceError
from holdfast.contracts.journal import EventKind
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.paths import CheckpointName
from holdfast.flows.drills.kinds import Recovery
from holdfast.flows.drills.stand import Stand
from holdfast.flows.drills.subject import Subject
from holdfast.flows.start import start_here
from holdfast.workers.processes import descendants

FLOW_GAP_STEPS: Final = 10
FLOW_GAP_S_MAX: Final = 2.5
HOLDUPS: Final = 20
HELD_S: Final = 0.06
FREE_S: Final = 0.04
DATABASE_GAP_S: Final = 1.5
# What a full disk leaves for journals and logs: no checkpoint of a stand fits in it.
LEFT_BYTES: Final = 1 << 20
SAVE_FAILS_S: Final = 60.0
# Above what a process has: room for small things, not for what a step asks for.
MEMORY_LEFT_BYTES: Final = 8 << 20


@dataclass
class Scene:
    """What a fault may reach: the run, the chance that moves it, and the stand if there is one.

    `recovery` is set by a fault of which something else comes this time than its kind says.
    """

    subject: Subject
    chance: random.Random
    stand: Stand | None = None
    recovery: Recovery | None = None

    def need_stand(self) -> Stand:
        """The stand. Raises `ServiceError` on a live run, whose servers are not the drill's."""
        if self.stand is None:
            raise ServiceError("only a throw-away run has a disk and a database to take away")
        return self.stand

    def start_flow(self) -> None:
        """Start another flow for the run, by the means of where it lives."""
        if self.stand is not None:
            self.stand.start_flow(self.subject.paths)
        else:
            start_here(self.subject.paths)


def signal_agent(number: signal.Signals) -> Callable[[Scene], str]:
    """A fault that sends the agent one signal."""

    def act(scene: Scene) -> str:
        agent = scene.subject.agent()
        agent.send_signal(number)
        return f"{number.name} to the agent, process {agent.pid}"

    return act


def kill_rank(scene: Scene) -> str:
    rank = scene.chance.choice(scene.subject.ranks())
    rank.kill()
    return f"SIGKILL to a rank, process {rank.pid}"


def kill_torchrun(scene: Scene) -> str:
    torchrun = scene.subject.torchrun()
    torchrun.kill()
    return f"SIGKILL to torchrun, process {torchrun.pid}"


def kill_agent(scene: Scene) -> str:
    agent = scene.subject.agent()
    agent.kill()
    return f"SIGKILL to the agent, process {agent.pid}"


def kill_flusher(scene: Scene) -> str:
    flusher = scene.subject.flusher()
    flusher.kill()
    return f"SIGKILL to the flusher, process {flusher.pid}"


def lose_node(scene: Scene) -> str:
    """Stop every process first, so that none of them notices the others' end."""
    agent, controller = scene.subject.agent(), scene.subject.controller()
    above = [controller] if controller else []
    tree = {p.pid: p for p in [*above, agent, *descendants(agent)]}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    return f"SIGKILL to all {len(tree)} processes of the attempt"


def kill_flow(scene: Scene) -> str:
    """Half of the times the agent is asked to stop before, so that a relaunch is cut short."""
    subject = scene.subject
    flow = subject.flow()
    if flow is None:
        raise ServiceError(f"{subject.paths.name}: no flow that supervises it lives here")
    step = subject.newest.step if subject.newest else 0
    if scene.chance.random() < 0.5:
        scene.recovery = Recovery.NEW_ATTEMPT
        subject.agent().send_signal(signal.SIGTERM)
        attempt = subject.attempt
        subject.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        time.sleep(scene.chance.uniform(0.0, FLOW_GAP_S_MAX))
        words = f"SIGTERM to the agent, then SIGKILL to the flow, process {flow.pid}"
        _kill_flow(scene, flow)
    else:
        _kill_flow(scene, flow)
        words = f"SIGKILL to the flow, process {flow.pid}; {FLOW_GAP_STEPS} steps without one"
        subject.wait_for(
            "training without a flow",
            lambda: subject.newest and subject.newest.step >= step + FLOW_GAP_STEPS,
        )
    since = time.time()
    scene.start_flow()
    subject.wait_for("another flow", lambda: subject.events_of(EventKind.SUPERVISED, since))
    return words


def _kill_flow(scene: Scene, flow: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        flow.kill()
    if scene.stand is not None:
        scene.stand.kill_flow()


def hold_up(scene: Scene) -> str:
    """Stop and continue one rank again and again: it is slow, and not hung."""
    rank = scene.chance.choice(scene.subject.ranks())
    try:
        for _ in range(HOLDUPS):
            rank.suspend()
            time.sleep(HELD_S)
            rank.resume()
            time.sleep(FREE_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()
    return f"process {rank.pid} held up {HOLDUPS} times"


def fill_disk(scene: Scene) -> str:
    """Fill the root until a save has failed, then give the room back."""
    root, subject = scene.need_stand().root, scene.subject
    filler, since = root / ".filler", time.time()
    try:
        with open(filler, "ab") as stream, contextlib.suppress(OSError):
            stream.write(bytes(max(0, _free_bytes(root) - LEFT_BYTES)))
        failed = subject.wait_for(
            "a save that fails",
            lambda: subject.events_of(EventKind.SAVE_FAILED, since),
            SAVE_FAILS_S,
        )
    finally:
        filler.unlink(missing_ok=True)
    return f"a full disk: {str(failed[0].data.get('error'))[:120]}"


def take_database(scene: Scene) -> str:
    """Overwrite the index with what is no database, and later remove it: disk has it all."""
    home = scene.need_stand().home
    names = [path for path in sorted(home.glob("holdfast.db*")) if path.is_file()]
    for path in names:
        path.write_bytes(b"not a database " * 1000)
    time.sleep(DATABASE_GAP_S)
    for path in names:
        path.unlink(missing_ok=True)
    return f"{len(names)} files of the index overwritten, and removed {DATABASE_GAP_S} s later"


def corrupt_checkpoint(scene: Scene) -> str:
    """Flip a byte of the newest checkpoint while nothing runs; put it back after the resume."""
    subject = scene.subject
    flow, attempt = subject.flow(), subject.attempt
    if flow is None:
        raise ServiceError(f"{subject.paths.name}: no flow that supervises it lives here")
    with _suspended(flow):
        subject.agent().send_signal(signal.SIGTERM)
        subject.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        name, path = _newest_file(subject)
        at = scene.chance.randrange(path.stat().st_size)
        _flip(path, at)
    try:
        since = time.time()
        resumed = subject.wait_for("a resume", lambda: subject.events_of(EventKind.RESUMED, since))
    finally:
        _flip(path, at)
    if not any(str(line).startswith(name) for line in resumed[0].data.get("skipped", ())):
        raise ServiceError(f"{name} was damaged and believed: {resumed[0].data}")
    return f"byte {at} of {name}/{path.name} flipped; the resume passed it over"


@contextlib.contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def _newest_file(subject: Subject) -> tuple[str, Path]:
    """The newest committed checkpoint's name, and its largest file."""
    for directory in reversed(subject.paths.list_checkpoints()):
        manifest = read_manifest(directory)
        if manifest is not None and CheckpointName.parse(directory.name):
            largest = max(manifest.files, key=lambda entry: entry.bytes)
            return directory.name, directory / largest.path
    raise ServiceError(f"{subject.paths.name} has no committed checkpoint")


def _flip(path: Path, at: int) -> None:
    """Turn every bit of one byte; twice is none."""
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 0xFF]))
        stream.flush()
        os.fsync(stream.fileno())


def refuse_memory(scene: Scene) -> str:
    """Lower one rank's limit of address space to what it has, and a little more."""
    rank = scene.chance.choice(scene.subject.ranks())
    limit = rank.memory_info().vms + MEMORY_LEFT_BYTES
    rank.rlimit(psutil.RLIMIT_AS, (limit, limit))
    return f"process {rank.pid} may have {limit >> 20} MiB of address space"


def _free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


FAULTS: Final[Mapping[str, Callable[[Scene], str]]] = {
    "sigterm": signal_agent(signal.SIGTERM),
    "sigusr2": signal_agent(signal.SIGUSR2),
    "kill-rank": kill_rank,
    "kill-torchrun": kill_torchrun,
    "kill-agent": kill_agent,
    "kill-flow": kill_flow,
    "kill-flusher": kill_flusher,
    "straggler": hold_up,
    "node-loss": lose_node,
    "disk-full": fill_disk,
    "database-down": take_database,
    "corrupt-checkpoint": corrupt_checkpoint,
    "oom": refuse_memory,
}
