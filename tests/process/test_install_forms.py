"""Each form in which one can get and install Holdfast gives the whole program, or refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from tests.support.environments import make_with, run_command

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PORTIONS: Final = ("src", "trainer", "workers", "flows")
LINK_MODE: Final = "120000"
BUILD_S: Final = 120
WITHOUT_PAGE: Final = {"HOLDFAST_WHEEL_WITHOUT_PAGE": "1"}
AUTHOR: Final = ("-c", "user.name=test", "-c", "user.email=test@example.org")
# What is installed, and whether the parts work that begin without torch.
PROGRAM: Final = """
import json, pathlib
import holdfast, holdfast.flows, holdfast.trainer, holdfast.workers
from holdfast.contracts.version import holdfast_version
from holdfast.lineage.database.sqlite_file import MIGRATIONS
folders = [pathlib.Path(folder) for folder in holdfast.__path__]
kinds = ("*.py", "*.yaml", "py.typed")
print(json.dumps({
    "version": holdfast_version(),
    "folders": [str(folder) for folder in folders],
    "files": [str(file.relative_to(folder.parent)) for folder in folders for kind in kinds
              for file in folder.rglob(kind) if MIGRATIONS not in file.parents],
    "migrations": [str(file.relative_to(MIGRATIONS)) for kind in ("*.py", "*.mako")
                   for file in MIGRATIONS.rglob(kind)],
}))
"""

pytestmark = pytest.mark.timeout(600)


def git(*words: str | Path, cwd: Path = CHECKOUT) -> str:
    return run_command("git", *AUTHOR, *words, cwd=cwd)


def listed() -> list[str]:
    """What git has, or would have after `git add`."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted({name for name in names if name and os.path.lexists(CHECKOUT / name)})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the files of this checkout as they are now."""
    place = tmp_path_factory.mktemp("forms") / "repository"
    for name in listed():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
    git("init", "-q", cwd=place)
    git("add", "-A", cwd=place)
    git("commit", "-q", "-m", "all", cwd=place)
    return place


def zip_of(repository: Path, place: Path) -> Path:
    """The ZIP of the repository, unpacked by a program that makes no links."""
    archive = place / "holdfast.zip"
    git("archive", "--format=zip", f"--output={archive}", "HEAD", cwd=repository)
    with zipfile.ZipFile(archive) as file:
        file.extractall(place / "unpacked")
    return place / "unpacked"


def checkout_of(repository: Path, place: Path) -> Path:
    """A checkout on a file system without links."""
    git("clone", "-q", "-c", "core.symlinks=false", repository, place / "clone", cwd=place)
    return place / "clone"


def sdist_of(repository: Path, place: Path) -> Path:
    """The source archive."""
    build(checkout_of(repository, place), place, "--sdist")
    (archive,) = place.glob("*.tar.gz")
    return archive


def wheel_of(repository: Path, place: Path) -> Path:
    """The wheel that is built from the source archive."""
    build(sdist_of(repository, place), place, "--wheel")
    (wheel,) = place.glob("*.whl")
    return wheel


def build(source: Path, place: Path, form: str) -> None:
    if source.is_file():
        shutil.unpack_archive(source, place / "sdist", filter="data")
        (source,) = (place / "sdist").iterdir()
    command = (sys.executable, "-m", "build", "--no-isolation", form, "-o", place, source)
    run_command(*command, cwd=place, **WITHOUT_PAGE)


def pip_install(environment: Path, *words: str) -> list[str]:
    """The command that installs into `environment`, with the build tools that are there."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    return [*pip, "install", "-qq", "--no-deps", "--no-index", "--no-build-isolation", *words]


def expected_files() -> set[str]:
    """The files of the package in this checkout, by their places in it."""
    found = set()
    for name in listed():
        first, _, rest = name.partition("/")
        if first in PORTIONS and rest.endswith((".py", ".yaml", "py.typed")):
            found.add(rest)
    return found


FORMS: Final[dict[str, Callable[[Path, Path], Path]]] = {
    "zip": zip_of,
    "checkout": checkout_of,
    "sdist": sdist_of,
    "wheel": wheel_of,
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("zip", ()),
        ("checkout", ("-e",)),
        ("sdist", ()),
        ("wheel", ()),
        ("zip", ("-e",)),
        ("checkout", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value) or "plain",
)
def test_an_installation_has_all_parts(
    repository: Path, tmp_path: Path, form: str, options: tuple[str, ...]
) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["server"]
    environment = tmp_path / "environment"
    make_with(environment, "hatchling", *needed)
    source = FORMS[form](repository, tmp_path)
    install = pip_install(environment, *options, str(source))
    run_command(*install, cwd=tmp_path, **WITHOUT_PAGE)
    found = json.loads(run_command(environment / "bin" / "python", "-c", PROGRAM, cwd=tmp_path))
    place = source if options else environment
    assert all(Path(folder).is_relative_to(place) for folder in found["folders"])
    assert len(found["folders"]) == (len(PORTIONS) if options else 1)
    assert found["version"] == project["version"]
    assert len(found["files"]) == len(set(found["files"]))
    assert set(found["files"]) == expected_files()
    assert set(found["migrations"]) == {
        name.removeprefix("alembic/") for name in listed() if name.startswith("alembic/")
    }
    home = {"HOLDFAST_HOME": str(tmp_path / "home")}
    holdfast = environment / "bin" / "holdfast"
    assert "supervise" in run_command(holdfast, "--help", cwd=tmp_path, **home)
    # The migrations make the index.
    run_command(holdfast, "db", "upgrade", cwd=tmp_path, **home)
    assert (tmp_path / "home" / "holdfast.db").is_file()


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        pytest.param(form, missing, marks=() if number == at else pytest.mark.more)
        for number, form in enumerate(["--wheel", "--sdist", "-e"])
        for at, missing in enumerate(["trainer", "flows/holdfast/flows", "alembic/versions"])
    ],
)
def test_an_incomplete_tree_is_refused(
    repository: Path, tmp_path: Path, form: str, missing: str
) -> None:
    source = checkout_of(repository, tmp_path)
    shutil.rmtree(source / missing)
    if form == "-e":
        environment = tmp_path / "environment"
        make_with(environment, "hatchling")
        command = pip_install(environment, form, str(source))
    else:
        builder = (sys.executable, "-m", "build", "--no-isolation")
        command = [*builder, form, "-o", str(tmp_path), str(source)]
    done = subprocess.run(
        command,
        env=os.environ | WITHOUT_PAGE,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert missing in said
    assert "Build from a complete checkout" in said


def test_a_checkout_named_holdfast_in_the_working_directory_hides_nothing(tmp_path: Path) -> None:
    """It becomes a folder of the namespace, before the installed ones."""
    (tmp_path / "holdfast").symlink_to(CHECKOUT)
    parts = ("cli", "flows", "lineage", "trainer", "workers")
    names = ", ".join(f"holdfast.{part}" for part in parts)
    program = f"import {names}; print([one.__file__ for one in ({names})], holdfast.__path__)"
    printed = run_command(sys.executable, "-c", program, cwd=tmp_path)
    assert str(tmp_path / "holdfast") in printed
    assert [part for part in parts if f"/holdfast/{part}/__init__.py" not in printed] == []
    assert str(tmp_path / "holdfast/") + "/" not in printed


def test_git_has_no_links() -> None:
    """A ZIP, or a checkout on a file system without links, has files with a path instead."""
    modes = git("ls-files", "--stage").splitlines()
    assert modes
    assert [line for line in modes if line.startswith(LINK_MODE)] == []
