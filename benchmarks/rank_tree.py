"""The cost of messages between many ranks, and the descriptors that each rank needs for them.

    python -m benchmarks.rank_tree --ranks 1024 --json
    python -m benchmarks.rank_tree --ranks 64 --torch --json

Run it by hand. All ranks are processes of this machine, `--per-node` of them play a node. Without
`--torch`, they hold no torch and find each other through files. With it, each has torch and a gloo
process group of its own, and they find each other through torch's store.

`connect_s` is the time until the last rank is connected to all ranks and to those of its node, and
`gather_all_s`, `largest_s` and `share_s` are medians of `--rounds` rounds on rank 0.
`descriptors_most` is the largest number of descriptors that these connections took on a rank. For
comparison, with `--torch`, `gloo_descriptors` is what one more gloo group took, and `gloo_s` the
time to create it. `loss_s` is the time from the end of one rank until the last of the others knows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.ranks.rank_tree import RankTree

WAIT_S: Final = 600.0
LOSS_WAIT_S: Final = 120.0


class Folder:
    """A store whose keys are files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: str) -> None:
        """Write the key's file at once."""
        new = self._directory / f"{key}.{os.getpid()}"
        new.write_text(value)
        new.rename(self._directory / key)

    def get(self, key: str) -> bytes:
        """Wait for the key's file, and return its content."""
        give_up = time.monotonic() + WAIT_S
        while time.monotonic() < give_up:
            try:
                return (self._directory / key).read_bytes()
            except FileNotFoundError:
                time.sleep(0.02)
        raise TimeoutError(f"{key}: not set within {WAIT_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torch", action="store_true", help="ranks with torch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        facts = play(Path(folder), options)
    shown = {key: round(value, 4) for key, value in facts.items()}
    print(json.dumps(shown) if options.json else "\n".join(f"{k}: {v}" for k, v in shown.items()))


def play(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run all ranks, kill the last one when they have measured, and return the figures."""
    if options.torch:
        # The ranks are forked from this process, so its libraries are in memory once.
        import torch

        torch.set_num_threads(1)
    pids = [fork(rank, directory, options) for rank in range(options.ranks)]
    try:
        store = Folder(directory)
        facts: dict[str, float] = json.loads(store.get("facts"))
        killed_at = time.monotonic()
        os.kill(pids[-1], signal.SIGKILL)
        known = [float(store.get(f"lost {rank}")) for rank in range(options.ranks - 1)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return facts | {"loss_s": max(known) - killed_at}


def fork(rank: int, directory: Path, options: argparse.Namespace) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        measure(rank, directory, options)
        status = 0
    except BaseException as error:
        # A forked rank ends here in any case.
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # The parent ends this process, so its id stays valid.
        time.sleep(LOSS_WAIT_S)
        os._exit(status)


def measure(rank: int, directory: Path, options: argparse.Namespace) -> None:
    """Connect, measure, and then wait for the rank that is killed."""
    store = Folder(directory)
    connect = connect_torch if options.torch else connect_plain
    before, began = descriptors(), time.monotonic()
    tree, more = connect(rank, directory, options.ranks)
    nodes = tree.split(rank // options.per_node)
    connect_s = time.monotonic() - began - more.get("gloo_s", 0.0) - more.get("program_s", 0.0)
    own = descriptors() - before - int(more.get("gloo_descriptors", 0) + more.get("program", 0))
    memory = psutil.Process().memory_full_info().uss
    every: list[tuple[float, int, int]] = tree.gather_all((connect_s, own, memory))
    facts: dict[str, float] = {
        "ranks": options.ranks,
        "connect_s": max(one for one, _, _ in every),
        "descriptors_most": max(one for _, one, _ in every),
        "memory_mean_bytes": sum(one for _, _, one in every) / options.ranks,
        "has_torch": float("torch" in sys.modules),
        **{key: value for key, value in more.items() if key.startswith("gloo")},
    }
    moves: dict[str, Callable[[], Any]] = {
        "gather_all_s": lambda: tree.gather_all((rank, "")),
        "largest_s": lambda: tree.largest([rank, 0, 0]),
        "share_s": lambda: tree.broadcast("x"),
        "node_s": lambda: nodes.gather_all(rank) if nodes else None,
    }
    for name, move in moves.items():
        facts[name] = statistics.median(timed(tree, move) for _ in range(options.rounds))
    if rank == 0:
        store.set("facts", json.dumps(facts))
    if rank == options.ranks - 1:
        time.sleep(LOSS_WAIT_S)
    try:
        tree.gather_all(None)
    except HoldfastError:
        store.set(f"lost {rank}", str(time.monotonic()))


def connect_plain(rank: int, directory: Path, ranks: int) -> tuple[RankTree, dict[str, float]]:
    return RankTree.over_store(Folder(directory), rank, ranks), {}


def connect_torch(rank: int, directory: Path, ranks: int) -> tuple[RankTree, dict[str, float]]:
    """Connect as a session does. Also return what the program's group and another one took."""
    import torch.distributed as dist

    from holdfast.trainer.ranks.collective import ControlGroup

    first, began = descriptors(), time.monotonic()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/torch", rank=rank, world_size=ranks
    )
    second, middle = descriptors(), time.monotonic()
    dist.new_group(backend="gloo")
    facts = {
        "program": float(second - first),
        "program_s": middle - began,
        "gloo_descriptors": float(descriptors() - second),
        "gloo_s": time.monotonic() - middle,
    }
    return ControlGroup().group, facts


def timed(tree: RankTree, move: Callable[[], Any]) -> float:
    """Return the seconds of one move that all ranks begin at about the same time."""
    tree.gather_all(None)
    began = time.monotonic()
    move()
    return time.monotonic() - began


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
