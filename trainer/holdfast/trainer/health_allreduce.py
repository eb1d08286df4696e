"""The check `allreduce`: a short all-reduce by every GPU of one or two nodes.

    python -m holdfast.trainer.health_allreduce --file FILE --node 0 --nodes 2 --processes 8

Each node starts one process per GPU, or one process without GPUs. They use torch's library for
the device, such as NCCL, and gloo elsewhere. The first process of node 0 has the store, and writes
its address to FILE, which both nodes see. The exit status is 0 if every sum was right on this node.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.node.handshake import listen, own_addresses, parse_ports, read_address
from holdfast.trainer.process import devices

ROUNDS: Final = 4
# 16 MiB of float32. Below 2**24, sums of whole numbers are exact.
ELEMENTS: Final = 1 << 22
VALUES: Final = 251
DIAL_S: Final = 5.0
LOOK_S: Final = 0.1
BACKLOG: Final = 64
TEXT_MAX: Final = 200


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of the check. It gives up at the time `ends_at` of the monotonic clock."""

    file: Path
    rank: int
    local: int
    world_size: int
    ports: range | None
    ends_at: float

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(1.0, self.ends_at - time.monotonic()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.trainer.health_allreduce", description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="file for the store's address")
    parser.add_argument("--node", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--processes", type=int, default=1, help="processes per node")
    parser.add_argument("--ports", default="any", help="ports of the store, as 40000-40063")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="time for all rounds")
    given = parser.parse_args(arguments)
    ends_at = time.monotonic() + given.timeout_s
    ranks = [
        Rank(
            file=given.file,
            rank=given.node * given.processes + local,
            local=local,
            world_size=given.nodes * given.processes,
            ports=parse_ports(given.ports),
            ends_at=ends_at,
        )
        for local in range(given.processes)
    ]
    return _run_all(ranks)


def _run_all(ranks: list[Rank]) -> int:
    """Run each rank in a process; end all of them when one fails."""
    # This process loads torch once for all of them, and never uses a GPU or a thread itself.
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_run, args=(rank,)) for rank in ranks]
    for process in started:
        process.start()
    running: dict[Any, Any] = {process.sentinel: process for process in started}
    is_healthy = True
    while running and is_healthy:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            is_healthy = is_healthy and process.exitcode == 0
    for process in running.values():
        process.kill()
        process.join()
    print("the sums are right" if is_healthy else "the all-reduce failed", flush=True)
    return 0 if is_healthy else 1


def _run(rank: Rank) -> None:
    try:
        _reduce(rank)
    # Every library raises other errors here, and each of them is the result of the check.
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        print(f"rank {rank.rank}: {text[:TEXT_MAX]}", file=sys.stderr, flush=True)
        sys.exit(1)


def _reduce(rank: Rank) -> None:
    """Sum known values over all ranks. Raises `RuntimeError` if a sum is wrong."""
    device = devices.own(rank.local)
    store = _offer_store(rank) if rank.rank == 0 else _join_store(rank)
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device),
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=rank.left,
    )
    pattern = torch.arange(ELEMENTS, device=device, dtype=torch.float32) % VALUES
    expected = pattern * (rank.world_size * (rank.world_size + 1) // 2)
    for number in range(ROUNDS):
        values = pattern * (rank.rank + 1)
        distributed.all_reduce(values)
        wrong = int((values != expected).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {ELEMENTS} sums of round {number} are wrong")
    # The store ends with rank 0, so that one waits for the others.
    store.set(f"done {rank.rank}", "")
    if rank.rank == 0:
        store.wait([f"done {other}" for other in range(rank.world_size)], rank.left)


def _offer_store(rank: Rank) -> Store:
    """Start the store of all ranks, and write its address to the file."""
    listener = listen(rank.ports, BACKLOG)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=rank.left,
        master_listen_fd=listener.detach(),
    )
    token = secrets.token_bytes(32).hex()
    document = {"addresses": own_addresses(), "port": port, "token": token}
    durable.write_bytes(rank.file, durable.to_json(document), mode=0o600)
    return PrefixStore(token, store)


def _join_store(rank: Rank) -> Store:
    """Return the store at the address in the file. Raises `TimeoutError` without an answer."""
    problem = f"{rank.file} does not exist"
    while time.monotonic() < rank.ends_at:
        if not filesystems.is_there(rank.file):
            time.sleep(LOOK_S)
            continue
        addresses, port, token = read_address(rank.file)
        for address in addresses:
            try:
                store = TCPStore(
                    address, port, is_master=False, timeout=min(rank.left, timedelta(0, DIAL_S))
                )
            except RuntimeError as error:
                problem = f"{address}:{port}: {error}"
                continue
            store.set_timeout(rank.left)
            # With the token, a store of others on a reused port has none of the keys.
            return PrefixStore(token.hex(), store)
        time.sleep(LOOK_S)
    raise TimeoutError(f"the first node's store did not answer: {problem}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
