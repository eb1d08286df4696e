"""Stops and kills the ranks of a live agent at a moment that their staging slots show.

An agent holds its ranks' slots, so a test reads them through the agent's descriptors. A rank that
is stopped in the middle of a copy stays there until it is killed, so the tests are deterministic.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from tests.process.local_runs import LocalRun, processes_of, wait_until
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.contracts import environment
from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.trainer.slots.slots import DATA_OFFSET, Slot, SlotState

WAIT_S = 90.0
STOP_WAIT_S = 10.0
# After this many steps both slots of a rank have been used.
STEPS_SEEN = 3
SLOT_LINK = "/memfd:holdfast-slot"


@contextlib.contextmanager
def slots_of(agent: int) -> Iterator[list[Slot]]:
    """The slots that the agent of process `agent` holds now."""
    found = []
    for link in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if not os.readlink(link).startswith(SLOT_LINK):
                continue
            handle = os.open(link, os.O_RDWR | os.O_CLOEXEC)
            # A released slot is truncated.
            if os.fstat(handle).st_size > DATA_OFFSET:
                found.append(Slot(handle))
            os.close(handle)
    try:
        yield found
    finally:
        for slot in found:
            slot.close()


def steps_in(slots: Sequence[Slot], state: SlotState) -> list[int]:
    return [slot.step for slot in slots if slot.state is state]


def send_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def hold(pids: Sequence[int]) -> None:
    """Stop the processes; returns once all are stopped."""
    send_all(pids, signal.SIGSTOP)
    wait_until(
        lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids),
        "processes that stand still",
        STOP_WAIT_S,
    )


def hold_in_copy(pids: Sequence[int], slots: Sequence[Slot]) -> int:
    """Stop the processes while one of them copies into one of `slots`; the step it copies."""
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if not steps_in(slots, SlotState.COPYING):
            continue
        hold(pids)
        copying = steps_in(slots, SlotState.COPYING)
        if copying:
            return copying[0]
        send_all(pids, signal.SIGCONT)
    raise AssertionError(f"no rank was stopped in a copy within {WAIT_S:.0f} s")


def flusher_of(agent: int) -> int:
    """The pid of the flusher of the agent's node."""
    children = psutil.Process(agent).children()
    return next(p.pid for p in children if "holdfast.trainer.flusher" in p.cmdline())


def ranks_of(run: LocalRun, attempt: AttemptPaths, launch: int) -> dict[int, list[int]]:
    """The pids of live ranks by node, once the launch has used all its slots."""

    size = run.spec.resources

    def look() -> dict[int, list[int]] | None:
        # A launch that resumed shows the step of its checkpoint before it has any slot.
        resumed = run.events(EventKind.RESUMED)[launch - 1 :]
        beats = [b for b in run.beats(attempt) if b.launch == launch]
        made = [rank.step - e.data["step"] for e in resumed[:1] for b in beats for rank in b.ranks]
        trains = len(made) == size.nodes * size.gpus_per_node and min(made) > STEPS_SEEN
        return {b.node: [rank.pid for rank in b.ranks] for b in beats} if trains else None

    return wait_until(look, f"the ranks of launch {launch}")


def waiting_ranks(run: LocalRun, but: Iterable[int] = (), count: int = 0) -> set[int]:
    """The pids of the warm standbys' ranks, once all of them have started: `count`, if given.

    Ranks that were warm standbys and train now look the same; exclude them with `but`.
    """
    found = set[int]()
    for process in processes_of(run.paths):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_rank = process.cmdline()[1:4] == ["-u", "-m", "holdfast.trainer.rank_start"]
            if is_rank and environment.STANDBY_PIPE in process.environ():
                found.add(process.pid)
    found -= set(but)
    return found if len(found) == (count or run.spec.gpus) else set()


def committed(run: LocalRun) -> dict[int, Manifest]:
    """The committed checkpoints by step; checks that none is damaged."""
    found = {}
    for directory in run.paths.list_checkpoints():
        manifest = read_manifest(directory)
        if manifest is not None:
            assert find_damage(directory, manifest) == []
            found[manifest.step] = manifest
    return found


def wait_for_commit(run: LocalRun, is_wanted: Callable[[Manifest], bool]) -> Manifest:
    """Wait for a committed checkpoint that `is_wanted`, and return the newest."""

    def look() -> Manifest | None:
        return next(
            (m for _, m in sorted(committed(run).items(), reverse=True) if is_wanted(m)), None
        )

    return wait_until(look, "a commit")


def filling_of(run: LocalRun, manifest: Manifest) -> set[float]:
    """The values of `agent_program`'s padding in the checkpoint."""
    directory = run.paths.checkpoint(manifest.name)
    entry = FileSystemReader(directory).read_metadata().state_dict_metadata["model.padding"]
    assert isinstance(entry, TensorStorageMetadata)
    state = {"model.padding": torch.empty(entry.size)}
    load(state, checkpoint_id=directory, no_dist=True)
    return set(state["model.padding"].tolist())
