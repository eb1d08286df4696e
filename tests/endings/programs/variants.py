"""Ways to fail for the hold-out set: `variants.py WAY`. Rank 1 fails."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

MIB = 1 << 20
PEER_WAIT_S = 120.0
WAYS: dict[str, Callable[[], object]] = {}


class UploadError(Exception):
    """The error by which a program hides the original one."""


def way(act: Callable[[], object]) -> Callable[[], object]:
    """Register a way to fail under its function name."""
    WAYS[act.__name__] = act
    return act


def fill_disk() -> None:
    with open(os.path.join(os.environ["ENDING_FULL_DIRECTORY"], "log"), "wb") as file:
        file.write(bytes(8 * MIB))


@way
def array_too_large() -> None:
    import numpy as np

    resource.setrlimit(resource.RLIMIT_AS, (4096 * MIB, 4096 * MIB))
    np.ones(8192 * MIB, dtype=np.uint8)


@way
def disk_full_renamed() -> None:
    try:
        fill_disk()
    except OSError as error:
        raise UploadError("could not keep the best model") from error


class StatusHandler(http.server.BaseHTTPRequestHandler):
    """An HTTP server that returns the status in the request's path."""

    def do_GET(self) -> None:
        self.send_error(int(self.path.strip("/")))


def ask_store(status: int) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), StatusHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{status}", timeout=5)


@way
def store_busy() -> None:
    ask_store(503)


@way
def store_has_no_space() -> None:
    ask_store(507)


@way
def helper_out_of_memory() -> None:
    def tokenise() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (512 * MIB, 512 * MIB))
        bytearray(2048 * MIB)

    helper = multiprocessing.get_context("fork").Process(target=tokenise)
    helper.start()
    helper.join()
    if helper.exitcode:
        raise RuntimeError(f"the tokeniser ended with {helper.exitcode}")


@way
def helper_disk_full() -> None:
    helper = multiprocessing.get_context("spawn").Process(target=fill_disk, name="cache")
    helper.start()
    helper.join()
    print("the cache is incomplete", file=sys.stderr)
    raise ValueError("0 of 8 shards were cached")


@way
def distribution_of_nan() -> None:
    import torch

    loc = torch.tensor([0.5, float("nan")])
    torch.distributions.Normal(loc, 1.0)


@way
def unknown_option() -> None:
    known = {"ConnectTimeout": 5.0}
    print(known["ReadTimeout"])


@way
def too_many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print([open(os.devnull) for _ in range(100)])  # noqa: SIM115


@way
def error_in_thread() -> None:
    def read() -> None:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.read(1)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    sys.exit(1)


def peer_fails_first() -> None:
    """The second rank's error closes the first one's connection, which logs more output."""
    name = f"\0ending-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}"
    with socket.socket(socket.AF_UNIX) as link:
        if os.environ["RANK"] == "1":
            link.bind(name)
            link.listen()
            link.accept()[0].close()
            raise ValueError("vocabulary of 50257 expected, got 50304")
        give_up = time.monotonic() + PEER_WAIT_S
        while link.connect_ex(name) and time.monotonic() < give_up:
            time.sleep(0.01)
        if not link.recv(1):
            raise ConnectionResetError(104, "Connection reset by peer")


def main() -> None:
    name = sys.argv[1]
    if name == peer_fails_first.__name__:
        peer_fails_first()
    elif os.environ["RANK"] == "1":
        WAYS[name]()
    else:
        time.sleep(PEER_WAIT_S)


if __name__ == "__main__":
    main()
