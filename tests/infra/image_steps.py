"""Runs the steps of a Dockerfile without Docker: in a Debian tree, with namespaces and chroot.

The image `python:…-slim-bookworm` is played by a tree of bookworm with a copy of this Python in
/usr/local. Everything else is real: the packages of Debian and PyPI, the wheel, the commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import other_version

CHECKOUT: Final = Path(__file__).resolve().parents[2]
STEP_S: Final = 900
RELEASE: Final = "bookworm"
# What Python is linked against.
LIBRARIES: Final = ("libssl3", "libffi8", "libsqlite3-0", "libbz2-1.0", "liblzma5", "zlib1g")
PATH: Final = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
# The versions that the tests know, so that the steps install the same today and in a year.
CONSTRAINTS: Final = "requirements.lock"


def read_steps(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile: each one's name and its text on one line."""
    lines = [one for one in dockerfile.read_text().splitlines() if not one.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [one.partition(" ") for one in joined.splitlines() if one.strip()]
    return [(name, text.strip()) for name, _, text in found]


def make_base(tree: Path) -> Path:
    """Install Debian and this Python into `tree`, which stands for the image of Python."""
    packages = ",".join(("ca-certificates", *LIBRARIES))
    call(["debootstrap", "--variant=minbase", f"--include={packages}", RELEASE, str(tree)])
    for name in ("resolv.conf", "hosts", "pip.conf"):
        if (Path("/etc") / name).exists():
            shutil.copy(Path("/etc") / name, tree / "etc" / name)
    ignored = shutil.ignore_patterns("site-packages", "__pycache__", "test")
    local, prefix = tree / "usr/local", Path(sys.base_prefix)
    shutil.copytree(prefix, local, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    for name in ("python", "python3"):
        (local / "bin" / name).unlink(missing_ok=True)
        (local / "bin" / name).symlink_to(f"python3.{sys.version_info.minor}")
    shutil.copy(CHECKOUT / CONSTRAINTS, tree)
    run_in(tree, ["ldconfig"])
    run_in(tree, ["python", "-m", "ensurepip", "--upgrade"])
    (local / "bin/pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (local / "bin/pip").chmod(0o755)
    return tree


@dataclass
class Image:
    """The stages of one Dockerfile, each a tree in `folder`."""

    folder: Path
    base: Path
    stages: dict[str, Path] = field(default_factory=dict)
    tree: Path = Path("/")
    user: str = "root"
    directory: str = "/"
    start: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)

    def build(self, dockerfile: Path) -> None:
        """Carry out all instructions. Raises `AssertionError` for one that fails or is unknown."""
        steps = {
            "FROM": self._from, "ARG": self._arg, "COPY": self._copy, "RUN": self._run,
            "ENV": self._arg,
            "USER": self._set_user, "WORKDIR": self._set_directory,
            "ENTRYPOINT": self._extend_start, "CMD": self._extend_start,
        }  # fmt: skip
        for name, text in read_steps(dockerfile):
            assert name in steps, f"{name} {text}: this instruction is not played"
            steps[name](text)

    def run_start(self) -> str:
        """The output of the image's own start command, as the image's own user."""
        return self._as_user([*self.start])

    def run_python(self, program: str, *arguments: str) -> str:
        """The output of a program in the image, as the image's own user in its own folder."""
        given = [f"{name}={value}" for name, value in self.arguments.items()]
        home = f"HOME={self.directory}"
        return self._as_user(["env", *given, home, "python", "-c", program, *arguments])

    def _from(self, text: str) -> None:
        name = text.partition(" AS ")[2] or "last"
        self.tree = self.stages[name] = self.folder / name
        call(["cp", "--archive", str(self.base), str(self.tree)])
        self.user, self.directory, self.start = "root", "/", ()

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.arguments[name] = value

    def _copy(self, text: str) -> None:
        source, target = text.split()[-2:]
        place = self.tree / target.lstrip("/")
        if text.startswith("--from="):
            origin = self.stages[text.split()[0].removeprefix("--from=")] / source.lstrip("/")
            shutil.copytree(origin, place, dirs_exist_ok=True)
            return
        assert source == ".", "the build context is the checkout"
        copy_context(place)

    def _run(self, text: str) -> None:
        given = [f"{name}={value}" for name, value in self.arguments.items()]
        self._as_user(["env", *given, "sh", "-c", text])

    def _set_user(self, text: str) -> None:
        self.user = self.arguments.get(text.lstrip("$"), text)

    def _set_directory(self, text: str) -> None:
        self.directory = text

    def _extend_start(self, text: str) -> None:
        self.start += tuple(json.loads(text))

    def _as_user(self, command: Sequence[str]) -> str:
        words = ["env", f"--chdir={self.directory}", *command]
        if self.user != "root":
            ids = (f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
            words = ["setpriv", *ids, *words]
        return run_in(self.tree, words)


def copy_context(place: Path) -> None:
    """Copy what git has, and the built page, which .dockerignore leaves in the context."""
    names = call(["git", "-C", str(CHECKOUT), "ls-files", "-z"]).split("\0")
    page = CHECKOUT / "src/holdfast/api/static"
    for source in [*(CHECKOUT / name for name in names if name), *page.rglob("*")]:
        target = place / source.relative_to(CHECKOUT)
        if source.is_dir() and not source.is_symlink():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def run_in(tree: Path, command: Sequence[str]) -> str:
    """The output of a command in the tree, with this machine's settings of pip."""
    folders = [folder for folder in (other_version.CERTIFICATES, *pip_folders()) if folder.is_dir()]
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    given |= {"PATH": PATH, "PIP_CONSTRAINT": f"/{CONSTRAINTS}", "HOME": "/root"}
    given |= {"DEBIAN_FRONTEND": "noninteractive", "PIP_ROOT_USER_ACTION": "ignore"}
    entered = other_version.entering(tree, ["env", "-i", *as_words(given), *command], folders)
    return call(entered)


def as_words(environment: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def pip_folders() -> list[Path]:
    """Folders with pip's settings and packages on this machine, for a package index of its own."""
    listed = call([sys.executable, "-m", "pip", "config", "list"])
    paths = [Path(one) for one in re.findall(r"(?:file://|')(/[^' ]+)", listed)]
    roots = {Path("/", *one.parts[1:2]) for one in paths} - {Path("/etc"), Path("/usr")}
    return [Path("/etc/xdg/pip"), Path("/root/.config/pip"), *sorted(roots)]


def call(argv: Sequence[str]) -> str:
    """Run a command, which must succeed; its output."""
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=STEP_S, check=False, stdin=subprocess.DEVNULL
    )
    tail = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{' '.join(argv[-6:])}: exit status {done.returncode}\n{tail}"
    return done.stdout
