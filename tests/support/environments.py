"""Environments with exactly the packages that an extra of the wheel requires."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

LOCK: Final = Path(__file__).resolve().parents[2] / "requirements.lock"
# pip may take long on a slow connection.
INSTALL_S: Final = 400
COMMAND_S: Final = 400


def run_command(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, isolated from this checkout; returns its output."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOLDFAST_", "PREFECT_", "PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_S if "install" in command else COMMAND_S,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(folder: Path, *words: str | Path) -> str:
    """The output of our own pip for the environment in `folder`."""
    command = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    return run_command(*command, *words, cwd=folder.parent)


def install(wheel: Path, extra: str, folder: Path) -> None:
    """Create an environment in `folder` with pip, with the versions of the lock file."""
    _make_empty(folder)
    pip(folder, "install", "-qq", "-c", LOCK, f"{wheel}[{extra}]")


def link(wheel: Path, extra: str, folder: Path) -> None:
    """Create the same environment in a few seconds, with links to our own environment's packages.

    Raises AssertionError if a package that the wheel requires is missing; pip checks the result.
    """
    _make_empty(folder)
    pip(folder, "install", "-qq", "--no-deps", "--no-index", wheel)
    _link_packages(folder, _requirements(_metadata_of(wheel), frozenset({extra})))
    pip(folder, "check")


def make_with(folder: Path, *names: str) -> None:
    """Create an environment with links to distributions of our own, and all that they require."""
    _make_empty(folder)
    _link_packages(folder, [Requirement(name) for name in names])


def _link_packages(folder: Path, requirements: list[Requirement]) -> None:
    (packages,) = folder.glob("lib/python3*/site-packages")
    for distribution in wanted(requirements):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            target = packages / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))))


def _make_empty(folder: Path) -> None:
    # The interpreter that our own environment was made from, not the environment.
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    run_command(base, "-m", "venv", "--without-pip", folder, cwd=folder.parent)


def wanted(requirements: list[Requirement]) -> list[metadata.Distribution]:
    """The distributions that meet `requirements`, and all that those require."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        wanted = waiting.pop()
        key = (wanted.name.lower().replace("_", "-"), frozenset(wanted.extras))
        if key not in found:
            found[key] = metadata.distribution(wanted.name)
            version = found[key].version
            assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: {version}"
            waiting += _requirements(found[key], key[1])
    return list(found.values())


def _metadata_of(wheel: Path) -> metadata.Distribution:
    (folder,) = [p for p in zipfile.Path(wheel).iterdir() if p.name.endswith(".dist-info")]
    return metadata.PathDistribution(folder)


def _requirements(distribution: metadata.Distribution, extras: frozenset[str]) -> list[Requirement]:
    """The requirements of a distribution on this machine with these extras."""
    asked = [Requirement(text) for text in distribution.requires or ()]
    return [
        one
        for one in asked
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras or {""})
    ]
