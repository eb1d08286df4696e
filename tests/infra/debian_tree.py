"""A clean Debian tree with this Python, and commands in it by namespaces and chroot.

It stands for the image `python:…-slim-bookworm` and for a new machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
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
