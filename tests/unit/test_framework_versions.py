"""The supported versions of frameworks: one table, the extras of pyproject.toml, the errors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from holdfast.contracts.errors import PreflightError
from holdfast.trainer import versions
from holdfast.trainer.versions import COMPANIONS, FRAMEWORKS, Supported, require

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.mark.parametrize("extra", sorted(FRAMEWORKS))
def test_extras_have_the_ranges_of_the_table(extra: str) -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found = {r.name: r.specifier for r in map(Requirement, extras[extra])}
    for wanted in (FRAMEWORKS[extra], *COMPANIONS.get(extra, ())):
        assert found[wanted.package] == Requirement(f"{wanted.package}{wanted.range}").specifier


def test_a_missing_package_is_named_with_its_extra_and_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Supported(package="no-such-package", oldest="1.2", below="2")
    monkeypatch.setitem(versions.FRAMEWORKS, "absent", absent)
    with pytest.raises(PreflightError) as raised:
        require("absent")
    assert str(raised.value) == (
        "no-such-package is not installed. Install Holdfast with the extra `absent` in the "
        "job's environment: it needs no-such-package>=1.2,<2"
    )


def test_an_unsupported_version_is_named_with_the_supported_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Supported(package="pytest", oldest="1.0", below="2")
    monkeypatch.setitem(versions.FRAMEWORKS, "old", old)
    with pytest.raises(PreflightError, match=r"^pytest [0-9.]+ is installed.*supports >=1\.0,<2"):
        require("old")


def test_a_companion_is_checked_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Supported(package="pytest", oldest="1.0", below="100")
    old = Supported(package="packaging", oldest="1.0", below="2")
    monkeypatch.setitem(versions.FRAMEWORKS, "here", here)
    assert require("here")
    monkeypatch.setitem(versions.COMPANIONS, "here", (old,))
    with pytest.raises(PreflightError, match=r"^packaging .* extra `here`.*packaging>=1\.0,<2$"):
        require("here")


def test_the_page_names_the_lowest_and_newest_versions_that_were_run() -> None:
    """The lowest ones are the bounds of pyproject.toml, and the newest ones are within them."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    every = [*project["dependencies"], *(one for extra in extras for one in extra)]
    bounds: dict[str, list[SpecifierSet]] = {}
    for one in map(Requirement, every):
        bounds.setdefault(one.name, []).append(one.specifier)
    page = (PYPROJECT.parent / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 10
    for name, lowest, newest in rows:
        least = [one.version for both in bounds[name] for one in both if one.operator == ">="]
        assert Version(lowest) == max(map(Version, least)), name
        assert all(newest in both for both in bounds[name]), name
