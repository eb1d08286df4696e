"""Write the lock files: the packages that a purpose needs, each with its version.

requirements.lock has every package that Holdfast and its tools need, infra/setup/demo.lock those
that `make demo` needs. The versions are those of the environment that runs this script. Installed
packages that nothing needs are left out.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
# Packages of a torch build for one type of GPU. The package index selects them.
HARDWARE_PREFIXES = ("nvidia-", "cuda-", "triton")
# Needed to build the wheels and the editable installs without an isolated environment.
BUILD_TOOLS = ("hatchling", "setuptools")
# Extras with a lock of their own, beside this script. They need older versions of some packages.
APART = ("torchtitan",)
# The extras in each lock file, by its path. None: all, but not those in `APART`.
WHOLE = "requirements.lock"
LOCKS: dict[str, tuple[str, ...] | None] = {
    WHOLE: None,
    "infra/setup/demo.lock": ("trainer", "server"),
}
HEADER = """\
# Made by `make lock` (infra/setup/lock.py) from the environment in .venv: do not edit by hand.
# To change a version: pip install it into .venv, run `make check test`, then `make lock`.
# torch stands here without the local tag of a build, so that each index gives its own.
"""


def read_roots(pyproject: Path, extras: Iterable[str] | None = None) -> list[Requirement]:
    """Return the requirements in pyproject.toml, with `extras`, and the build tools.

    Without `extras`, all extras count but those in `APART`.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project["optional-dependencies"]
    names = [name for name in optional if name not in APART] if extras is None else extras
    lines = [*project["dependencies"], *(line for name in names for line in optional[name])]
    roots = [Requirement(line) for line in (*lines, *BUILD_TOOLS)]
    return [root for root in roots if canonicalize_name(root.name) != project["name"]]


def close_over(roots: Iterable[Requirement]) -> dict[str, str]:
    """Return the versions of `roots` and of all their dependencies here, by canonical name.

    Raises `PackageNotFoundError` if one of the roots is not installed.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, True) for root in roots]
    while waiting:
        wanted, is_root = waiting.pop()
        name = str(canonicalize_name(wanted.name))
        extras = frozenset(wanted.extras)
        if (name, extras) in seen or name.startswith(HARDWARE_PREFIXES):
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            if is_root:
                raise
            # A dependency that pip did not install here, such as one for another platform.
            continue
        versions[name] = found.version.partition("+")[0]
        needed = [Requirement(line) for line in found.requires or ()]
        waiting += [(child, False) for child in needed if applies(child, extras)]
    return versions


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Return True if `requirement` applies on this machine with one of its parent's `extras`."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras))


def contents() -> dict[str, str]:
    """Return what each lock file must contain. Raises `PackageNotFoundError`."""
    found = {}
    for path, extras in LOCKS.items():
        versions = close_over(read_roots(CHECKOUT / "pyproject.toml", extras))
        found[path] = HEADER + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))
    return found


def main() -> int:
    """Return 0 if written or unchanged, 1 if a package is missing or `--check` found changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only report what would change")
    options = parser.parse_args()
    try:
        wanted = contents()
    except PackageNotFoundError as error:
        print(f"{error}; expected all extras to be installed; run `make setup`", file=sys.stderr)
        return 1
    differs = False
    for path, content in wanted.items():
        lock = CHECKOUT / path
        if options.check:
            is_same = lock.exists() and lock.read_text() == content
            differs = differs or not is_same
            print(f"{path}: {'unchanged' if is_same else 'differs; run `make lock`'}")
        else:
            lock.write_text(content)
            print(f"{path}: {content.count('==')} packages")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
