"""Builds the images with buildah, and starts what is in them, without Docker and its service.

The base image `python:…-slim-bookworm` is made here, of `debian_tree`. All else is real. buildah's
chroot isolation needs no runtime for containers. `network` gives a test all ports for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.demo_service import end_session
from tests.infra.debian_tree import CONSTRAINTS, call, copy_context, make_base, pip_folders

PYTHON: Final = "docker.io/library/python:3.11-slim-bookworm"
CERTIFICATES: Final = Path("/etc/ssl/certs")
END_S: Final = 20.0
_CLONE_NEWNET: Final = 0x40000000


@contextlib.contextmanager
def network() -> Iterator[None]:
    """A network of this thread, and of the programs that it starts: only a loopback device."""
    libc = ctypes.CDLL(None, use_errno=True)
    former = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        call(["ip", "link", "set", "lo", "up"])
        yield
    finally:
        assert libc.setns(former, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(former)


@dataclass
class Images:
    """Images and containers in a folder of their own."""

    folder: Path
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def buildah(self, *words: str | Path) -> list[str]:
        stores = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        return ["buildah", *stores, "--storage-driver", "overlay", *map(str, words)]

    def make_base(self) -> None:
        """Make the base image, under the name that the Dockerfiles have for it."""
        tree = make_base(self.folder / "tree")
        made = call(self.buildah("from", "scratch")).strip()
        call(self.buildah("add", "--quiet", made, tree, "/"))
        call(self.buildah("commit", "--quiet", made, PYTHON))
        call(self.buildah("rm", made))
        shutil.rmtree(tree)
        copy_context(self.folder / "context")

    def build(self, dockerfile: str, name: str) -> None:
        """Build `infra/images/<dockerfile>` in a copy of the checkout."""
        context = self.folder / "context"
        known = {"PIP_CONSTRAINT": f"/{CONSTRAINTS}", "PIP_ROOT_USER_ACTION": "ignore"}
        known |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        folders = [one for one in (CERTIFICATES, *pip_folders()) if one.is_dir()]
        call(
            self.buildah(
                *("bud", "--isolation", "chroot", "--network", "host", "--pull-never"),
                *(f"--volume={one}:{one}:ro" for one in folders),
                *(f"--env={name}={value}" for name, value in known.items()),
                *("--file", context / "infra/images" / dockerfile, "--tag", name, context),
            )
        )

    def config_of(self, name: str) -> dict[str, Any]:
        """What the image says of its start: the keys of the OCI format."""
        found: dict[str, Any] = json.loads(call(self.buildah("inspect", "--type", "image", name)))
        config: dict[str, Any] = found["OCIv1"]["config"]
        return config

    @contextlib.contextmanager
    def container(self, image: str, hosts: Sequence[str] = ()) -> Iterator[Container]:
        """A container of an image. The names `hosts` mean this machine in it."""
        name = f"c{next(self._serial)}"
        names = [f"--add-host={host}:127.0.0.1" for host in hosts]
        call(self.buildah("from", "--pull-never", "--name", name, *names, image))
        try:
            yield Container(self, name)
        finally:
            call(self.buildah("rm", name))

    def remove(self) -> None:
        """Delete all images and containers."""
        call(self.buildah("rm", "--all"))
        call(self.buildah("rmi", "--all", "--force"))
        # The store keeps its folder mounted.
        for one in (self.folder / "root/overlay", self.folder / "root/overlay-containers"):
            subprocess.run(["umount", str(one)], capture_output=True, check=False, timeout=60)
        shutil.rmtree(self.folder)


@dataclass(frozen=True)
class Container:
    """A container in which commands run as the account and in the folder of its image."""

    images: Images
    name: str

    def words(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        volumes: Sequence[str] = (),
    ) -> list[str]:
        """The command line that runs a command in it. All its processes end with the first one."""
        return [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *self.images.buildah("run", "--isolation", "chroot", "--network", "host"),
            *(f"--env={name}={value}" for name, value in (environment or {}).items()),
            *(f"--volume={one}" for one in volumes),
            *(self.name, "--", *command),
        ]

    def run(self, command: Sequence[str], **more: Any) -> str:
        """The output of a command, which must succeed."""
        return call(self.words(command, **more))

    @contextlib.contextmanager
    def background(self, log: Path, command: Sequence[str], **more: Any) -> Iterator[None]:
        """Run a command until the context ends. Its output goes to `log`."""
        with open(log, "wb") as output:
            process = subprocess.Popen(
                self.words(command, **more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield
            assert process.poll() is None, log.read_text()[-3000:]
        finally:
            end_session(process, END_S)
