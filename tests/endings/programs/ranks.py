"""A program whose second rank fails in a given way: `ranks.py WAY`. Each way is one function.

The ways here do not import torch, so that they are quick to capture; `tensor_ways.py` has the
others. `ENDING_FULL_DIRECTORY` names a small file system that the capture mounts.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import ctypes
import mmap
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable

MIB = 1 << 20
PEER_WAIT_S = 120.0
WAYS: dict[str, Callable[[], object]] = {}


def way(act: Callable[[], object]) -> Callable[[], object]:
    """Register a way to fail under its function name. Rank 1 calls it while rank 0 waits."""
    WAYS[act.__name__] = act
    return act


def is_second() -> bool:
    return os.environ["RANK"] == "1"


@way
def segmentation_fault() -> None:
    ctypes.string_at(0)


@way
def abort() -> None:
    os.abort()


@way
def bus_error() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        print(mapped[0])


@way
def terminated() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@way
def exit_code() -> None:
    sys.exit(3)


@way
def uncaught_exception() -> None:
    batch: dict[str, int] = {}
    print(batch["labels"])


@way
def import_error() -> None:
    import holdfast_needs_no_such_module  # type: ignore[import-not-found]  # noqa: F401


@way
def missing_file() -> None:
    with open("/data/train/shard-00017.bin", "rb"):
        pass


@way
def bad_argument() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.parse_args([])


@way
def assertion() -> None:
    shape = (4, 8)
    assert shape == (8, 4), f"expected (8, 4), got {shape}"


@way
def nan_raised() -> None:
    loss = float("nan")
    raise FloatingPointError(f"step 7: loss {loss}")


@way
def memory_error() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (512 * MIB, 512 * MIB))
    bytearray(2048 * MIB)


@way
def host_oom() -> None:
    held: list[bytes] = []
    while len(held) < 4096:
        held.append(b"x" * MIB)


@way
def disk_full() -> None:
    with open(os.path.join(os.environ["ENDING_FULL_DIRECTORY"], "log"), "wb") as file:
        file.write(bytes(8 * MIB))


@way
def file_size_limit() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8 * MIB))


@way
def disk_full_while_handling() -> None:
    try:
        disk_full()
    except OSError as error:
        # A careless handler raises an error itself, which is then the last one.
        print(error.no_such_attribute)  # type: ignore[attr-defined]


@way
def disk_full_in_group() -> None:
    try:
        disk_full()
    except OSError as error:
        raise ExceptionGroup("writers failed", [ValueError("no samples"), error]) from None


@way
def database_full() -> None:
    path = os.path.join(os.environ["ENDING_FULL_DIRECTORY"], "samples.db")
    with sqlite3.connect(path) as database:
        database.execute("create table samples (content blob)")
        database.execute("insert into samples values (?)", (bytes(8 * MIB),))


@way
def copy_to_full_disk() -> None:
    full = os.environ["ENDING_FULL_DIRECTORY"]
    subprocess.run(["cp", "/dev/zero", os.path.join(full, "copy")], check=True)


@way
def array_on_full_disk() -> None:
    import numpy as np

    np.ones(8 * MIB, dtype=np.uint8).tofile(
        os.path.join(os.environ["ENDING_FULL_DIRECTORY"], "samples.bin")
    )


@way
def port_in_use() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


@way
def connection_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}/dataset", timeout=5)


@way
def store_hangs_up() -> None:
    def hang_up() -> None:
        with store.accept()[0] as connection:
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as store:
        threading.Thread(target=hang_up, daemon=True).start()
        urllib.request.urlopen(f"http://127.0.0.1:{store.getsockname()[1]}/dataset", timeout=5)


@way
def pool_worker_killed() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


@way
def store_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        urllib.request.urlopen(f"http://127.0.0.1:{store.getsockname()[1]}/dataset", timeout=2)


@way
def task_lost_its_server() -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"samp")
        writer.close()

    async def fetch() -> None:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.readexactly(4096))

    asyncio.run(fetch())


@way
def name_not_resolved() -> None:
    socket.create_connection(("store.invalid", 443), timeout=5)


@way
def permission_denied() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)
    with open("/etc/shadow", "rb"):
        pass


@way
def disk_read_error() -> None:
    # The kernel returns EIO for a page of this process that is not mapped.
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.read(1)


@way
def keyboard_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(PEER_WAIT_S)


@way
def waits() -> None:
    time.sleep(PEER_WAIT_S)


def main() -> None:
    name = sys.argv[1]
    if name not in WAYS:
        from tensor_ways import TENSOR_WAYS  # type: ignore[import-not-found]

        TENSOR_WAYS[name]()
    elif is_second():
        WAYS[name]()
    else:
        time.sleep(PEER_WAIT_S)


if __name__ == "__main__":
    main()
