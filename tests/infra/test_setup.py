"""The set-up: the lock files of its purposes, and setup.sh with real uv and pip."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import lock
import pytest
import uv_install
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.environments import wanted

CHECKOUT: Final = Path(__file__).resolve().parents[2]
DEMO_LOCK: Final = "infra/setup/demo.lock"
UV: Final = Path(sys.executable).with_name("uv")
SETUP_S: Final = 200
# The build backend of the small checkout, whose wheels are made already.
BACKEND: Final = """\
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    (wheel,) = Path("built").iterdir()
    (Path(folder) / wheel.name).write_bytes(wheel.read_bytes())
    return wheel.name

def get_requires_for_build_editable(config_settings=None):
    return []
"""
PROJECT: Final = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "{name}"
version = "1"
"""


def pins_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def test_the_demo_has_a_part_of_the_whole_lock() -> None:
    demo, whole = pins_of(CHECKOUT / DEMO_LOCK), pins_of(CHECKOUT / lock.WHOLE)
    assert demo.items() < whole.items()


def test_the_demos_lock_has_what_its_extras_require_and_nothing_else() -> None:
    roots = [f"holdfast[{','.join(lock.LOCKS[DEMO_LOCK] or ())}]", *lock.BUILD_TOOLS]
    required = {
        str(canonicalize_name(one.name)): one.version.partition("+")[0]
        for one in wanted([Requirement(root) for root in roots])
    }
    del required["holdfast"]
    of_gpus = {name for name in required if name.startswith(lock.HARDWARE_PREFIXES)}
    assert pins_of(CHECKOUT / DEMO_LOCK).keys() == required.keys() - of_gpus


def test_pips_settings_become_uvs(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example/simple\ncert = /a/file.pem\ntimeout = 5\n"
        "extra-index-url =\n    https://two.example/simple\n    https://three.example/simple\n"
        "[install]\nconstraint = /a/constraints.txt\nno-index = false\n"
        "[list]\nindex-url = https://other.example/simple\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    given = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/a /b"}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={**kept, **given, "PIP_INDEX_URL": "https://four.example/simple"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    settings = uv_install.read_settings(listed.stdout)
    assert " ".join(uv_install.options_of(settings)) == (
        "--default-index https://four.example/simple"
        " --index https://two.example/simple --index https://three.example/simple"
        " --find-links /a --find-links /b --constraints /a/constraints.txt"
        " --index-strategy unsafe-best-match"
    )
    environment = uv_install.environment_of(settings, {"UV_HTTP_TIMEOUT": "9"})
    assert environment == {"UV_HTTP_TIMEOUT": "9", "SSL_CERT_FILE": "/a/file.pem"}


def make_wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    """Write a wheel of version 1 with these files."""
    info = f"{name}-1.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},{digest_of(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,\n"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def digest_of(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def make_project(folder: Path, name: str, files: dict[str, str]) -> None:
    """Write a project that can be installed in its folder, with these files in its wheel."""
    make_wheel(folder / "built", name, files)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with setup.sh as it is, two small packages, and an environment without uv."""
    place = tmp_path / "checkout"
    for name in ("setup.sh", "uv_install.py"):
        (place / "infra/setup").mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / "infra/setup" / name, place / "infra/setup")
    make_wheel(place / "wheels", "needed", {"needed.py": ""})
    make_wheel(place / "wheels", "tool", {"tool.py": ""})
    (place / DEMO_LOCK).write_text("needed==1\n")
    (place / lock.WHOLE).write_text("needed==1\ntool==1\n")
    # What setup.sh imports and runs.
    parts = ("holdfast/trainer.py", "torch/distributed/fsdp.py", "torch/distributed/run.py")
    program = {"holdfast-1.data/scripts/holdfast": "#!python\n"}
    make_project(place, "holdfast", dict.fromkeys(parts, "") | program)
    make_project(place / "benchmarks", "holdfast_bench", {"holdfast_bench.py": ""})
    (place / "web").mkdir()
    (place / "web/empty").touch()
    subprocess.run([sys.executable, "-m", "venv", place / ".venv"], timeout=SETUP_S, check=True)
    return place


def set_up(place: Path, *options: str) -> str:
    """What setup.sh reports, with no packages but those of the checkout's own folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "HOLDFAST_", "PREFECT_", "VIRTUAL_ENV"))
    }
    pip = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place / "wheels"),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    done = subprocess.run(
        [place / "infra/setup/setup.sh", *options],
        env={**kept, **pip, "UV_CACHE_DIR": str(place / "cache")},
        capture_output=True,
        text=True,
        timeout=SETUP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def installer_of(place: Path, name: str) -> str | None:
    """The program that installed a package, or None if the package is not installed."""
    found = list(place.glob(f".venv/lib/python3*/site-packages/{name}-1.dist-info/INSTALLER"))
    return found[0].read_text().strip() if found else None


@pytest.mark.more
def test_the_whole_set_up_adds_to_the_demos_and_serves_the_demo_too(checkout: Path) -> None:
    assert UV.is_file(), "make setup installs it"
    shutil.copy(UV, checkout / ".venv/bin")
    assert "uv" not in set_up(checkout, "--demo")
    assert installer_of(checkout, "needed") == "uv"
    assert installer_of(checkout, "holdfast") == "uv"
    assert installer_of(checkout, "tool") is None
    assert set_up(checkout, "--demo") == ""
    (installed,) = checkout.glob(".venv/lib/python3*/site-packages/holdfast-1.dist-info")
    inode = installed.stat().st_ino
    assert "installing requirements.lock" in set_up(checkout)
    # A demo that runs meanwhile keeps its package.
    assert installed.stat().st_ino == inode
    assert installer_of(checkout, "tool") == installer_of(checkout, "holdfast_bench") == "uv"
    assert set_up(checkout, "--demo") == ""
    (checkout / lock.WHOLE).write_text("needed==1\n")
    assert "installing infra/setup/demo.lock" in set_up(checkout, "--demo")


@pytest.mark.more
@pytest.mark.parametrize(
    ("uv", "reported"),
    [
        (None, "could not be installed (see .setup/uv.log): pip installs the packages"),
        ('[ "$1" = --version ] && echo "uv $VERSION"', "uv failed: pip installs the packages"),
    ],
    ids=["missing", "broken"],
)
def test_pip_installs_what_uv_cannot(checkout: Path, uv: str | None, reported: str) -> None:
    if uv:
        text = (checkout / "infra/setup/setup.sh").read_text()
        version = text.partition("UV_VERSION=")[2].partition("\n")[0]
        (checkout / ".venv/bin/uv").write_text(f"#!/bin/sh\nVERSION={version}\n{uv}\n")
        (checkout / ".venv/bin/uv").chmod(0o755)
    assert reported in set_up(checkout, "--demo")
    assert installer_of(checkout, "needed") == "pip"
    assert installer_of(checkout, "holdfast") == "pip"
