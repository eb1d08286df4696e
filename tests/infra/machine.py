"""A machine of its own for the deployment pages: a Debian tree with namespaces of its own.

Its network is a loopback of its own, so its services have the ports that the pages name. There is
no systemd: a unit file is read, and its command is started with the unit's account, environment
and the parts of its sandbox that need no systemd.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import other_version
import psutil
from tests.infra.debian_tree import PATH, as_words

NAME: Final = "runs.lab.example"
NAMES: Final = (NAME, "db.lab.example")
COMMAND_S: Final = 600.0
STOP_S: Final = 60.0
LOG_TAIL: Final = 4000
# What systemd gives to the services of Debian 12.
SERVICE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A page's line that changes the account. What follows must stop at an error, too.
AS_ACCOUNT: Final = re.compile(r"(?m)^(sudo -u \S+ bash)\b.*$")
# The parts of a unit's sandbox. The arguments are the folders to make read-only, up to `--`.
SANDBOX: Final = """
set -e
while [ "$1" != -- ]; do
    mount --bind "$1" "$1"
    mount -o remount,bind,ro "$1"
    shift
done
shift
exec "$@"
"""
READ_ONLY: Final = {"full": ("/usr", "/boot", "/etc"), "": ()}


@dataclass
class Service:
    """A started unit."""

    name: str
    log: Path
    entering: subprocess.Popen[bytes]
    ends_all: bool

    def main(self) -> psutil.Process:
        """The process of the unit's command."""
        (found,) = psutil.Process(self.entering.pid).children()
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the unit as systemd does: its main process, or all of its processes."""
        if self.entering.poll() is None:
            main = self.main()
            for one in [main, *(main.children(recursive=True) if self.ends_all else [])]:
                if one.is_running():
                    one.send_signal(number)
        self.entering.wait(STOP_S)

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@dataclass
class Machine:
    """A machine whose folders are `tree`. `logs` has the output of its services."""

    tree: Path
    logs: Path
    services: dict[str, Service] = field(default_factory=dict)
    _first: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make the namespaces. They end with this process, and everything in them."""
        for name in ("etc/hosts", "etc/hostname"):
            (self.tree / name).unlink(missing_ok=True)
        (self.tree / "etc/hosts").write_text(f"127.0.0.1 localhost {' '.join(NAMES)}\n")
        (self.tree / "etc/hostname").write_text(f"{NAME}\n")
        unshare, *entering = other_version.entering(self.tree, ["sleep", "infinity"])
        own = ["setpriv", "--pdeathsig", "KILL", unshare, "--net", "--uts"]
        self._first = subprocess.Popen([*own, *entering], stdin=subprocess.DEVNULL)
        wait_for("the namespaces", lambda: bool(self._inner()))
        # Shared memory must not stay behind on the host.
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("ip", "link", "set", "lo", "up")
        self.run("hostname", NAME)

    def stop(self) -> None:
        """End every process of the machine, and its mounts."""
        if self._first is not None:
            self._first.kill()
            self._first.wait(STOP_S)
        for service in self.services.values():
            service.entering.wait(STOP_S)

    def stop_service(self, name: str) -> None:
        self.services.pop(name).stop()

    def run(self, *words: str, text: str = "", timeout: float = COMMAND_S) -> str:
        """The output of a command as root, which must succeed, while all services run."""
        for service in self.services.values():
            assert service.entering.poll() is None, f"{service.name} has ended: {service.text()}"
        given = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "NO_COLOR": "1"}
        command = self._entering(["env", "-i", *as_words(given | {"COLUMNS": "200"}), *words])
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
        said = f"{done.stdout[-LOG_TAIL:]}\n{done.stderr[-LOG_TAIL:]}"
        assert done.returncode == 0, f"{words}: exit status {done.returncode}\n{text}\n{said}"
        return done.stdout

    def type_in(self, text: str, person: str = "root", timeout: float = COMMAND_S) -> str:
        """The output of a script that a person types in a shell after login."""
        strict = "set -e\n" + AS_ACCOUNT.sub(r"\1\nset -e", text)
        login = ["bash"] if person == "root" else ["su", "-", person]
        return self.run(*login, text=strict, timeout=timeout)

    def start_unit(self, path: Path, extra: str = "") -> Service:
        """Start the command of a unit file, with `extra` options."""
        unit = read_unit(path)
        (user,) = unit["User"]
        log = self.logs / f"{path.stem}.log"
        program = [*unit["ExecStart"][0].split(), *extra.split()]
        # A container may not allow as many as the unit asks for.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = [f"--nofile={min(int(one), most)}" for one in unit.get("LimitNOFILE", [])]
        words = ["env", "-i", *as_words(self._service_environment(unit, user)), *program]
        words = ["setpriv", *self._ids(user), *_privileges(unit), *words]
        words = ["prlimit", *limits, *words] if limits else words
        folders = READ_ONLY[unit.get("ProtectSystem", [""])[0]]
        words = [
            "unshare",
            "--mount",
            "--propagation=unchanged",
            "sh",
            "-c",
            SANDBOX,
            "sh",
            *folders,
            "--",
            *words,
        ]
        mask = int(unit.get("UMask", ["0022"])[0], 8)
        with log.open("ab") as stream:
            entering = subprocess.Popen(
                self._entering(["env", "--chdir=/", *words]),
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, umask=mask,
            )  # fmt: skip
        ends_all = unit.get("KillMode", ["control-group"])[0] == "control-group"
        self.services[path.stem] = Service(path.stem, log, entering, ends_all)
        return self.services[path.stem]

    def _service_environment(self, unit: Mapping[str, list[str]], user: str) -> dict[str, str]:
        account = self._account(user)
        given = {"PATH": SERVICE_PATH, "HOME": account[5], "USER": user, "LOGNAME": user}
        lines = list(unit.get("Environment", []))
        for name in unit.get("EnvironmentFile", []):
            lines += (self.tree / name.lstrip("/")).read_text().splitlines()
        pairs = [one.partition("=") for one in lines if one.strip() and not one.startswith("#")]
        return given | {name: value for name, _, value in pairs}

    def _ids(self, user: str) -> list[str]:
        return [f"--reuid={user}", f"--regid={self._account(user)[3]}", "--init-groups"]

    def _account(self, user: str) -> list[str]:
        lines = (self.tree / "etc/passwd").read_text().splitlines()
        (found,) = [one.split(":") for one in lines if one.startswith(f"{user}:")]
        return found

    def _inner(self) -> list[psutil.Process]:
        assert self._first is not None
        assert self._first.poll() is None, "the namespaces could not be made"
        found = psutil.Process(self._first.pid).children(recursive=True)
        return [one for one in found if one.name() == "sleep"]

    def _entering(self, words: list[str]) -> list[str]:
        # The shell that waits for `sleep` has the namespaces, and the host's root folder.
        target = self._inner()[0].pid
        inside = ["--mount", "--pid", "--net", "--uts", f"--target={target}"]
        return ["nsenter", *inside, "chroot", str(self.tree), *words]


def read_unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit file."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, is_one, value = line.partition("=")
        if is_one and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def _privileges(unit: Mapping[str, list[str]]) -> list[str]:
    asked = unit.get("NoNewPrivileges") == ["yes"]
    dropped = unit.get("CapabilityBoundingSet") == [""]
    return [
        *(["--no-new-privs"] if asked else []),
        *(["--bounding-set=-all", "--inh-caps=-all"] if dropped else []),
    ]


def wait_for(what: str, check: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until `check` returns something. Raises `AssertionError` after `seconds`."""
    ends_at = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends_at, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
