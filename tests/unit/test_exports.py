"""The public names of the package: its exports, version, errors and commands."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tomllib
from importlib.metadata import entry_points, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import holdfast
from holdfast.contracts import errors
from holdfast.contracts.version import holdfast_version

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
TREE_LINE = re.compile(r"^([│├└─ ]*)(\w+)(?: \((\w+)\))? ", re.MULTILINE)


def modules() -> list[str]:
    found = pkgutil.walk_packages(holdfast.__path__, "holdfast.")
    # `__main__` modules run their program when they are imported.
    names = (module.name for module in found if not module.name.endswith("__main__"))
    # torchtitan has an environment of its own, which only its tests use.
    has_torchtitan = find_spec("torchtitan") is not None
    return sorted(name for name in names if has_torchtitan or "torchtitan" not in name)


def test_the_modules_of_all_parts_are_found() -> None:
    parts = {name.split(".")[1] for name in modules()}
    assert parts == {"api", "cli", "contracts", "flows", "lineage", "trainer", "workers"}


@pytest.mark.parametrize("name", modules())
def test_every_module_imports_and_exports_what_it_names(name: str) -> None:
    module = importlib.import_module(name)
    missing = [export for export in getattr(module, "__all__", ()) if not hasattr(module, export)]
    assert not missing


def test_the_public_trainer_names_are_importable() -> None:
    from holdfast.trainer import ElasticSampler, Session, load_checkpoint

    assert inspect.isclass(Session)
    assert inspect.isclass(ElasticSampler)
    assert inspect.isfunction(load_checkpoint)
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(importlib.import_module("holdfast.trainer"), "Sesion")  # noqa: B009


def test_the_package_version_matches_pyproject() -> None:
    assert holdfast_version() == PROJECT["version"] == metadata("holdfast")["Version"]


def test_the_command_is_installed() -> None:
    (script,) = [e for e in entry_points(group="console_scripts") if e.name == "holdfast"]
    assert callable(script.load())


def test_the_error_classes_match_the_drawn_tree() -> None:
    """The drawing at the top of errors.py names every class, its parent and its builtin."""
    drawn: dict[str, tuple[str, str | None]] = {}
    path = ["HoldfastError"]
    for indent, name, builtin in TREE_LINE.findall(f"{errors.__doc__} "):
        depth = len(indent) // 4
        if name.endswith("Error") and depth:
            path[depth:] = [name]
            drawn[name] = (path[depth - 1], builtin or None)
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    assert set(drawn) | {"HoldfastError"} == {n for n in classes if n.endswith("Error")}
    for name, (parent, builtin) in drawn.items():
        bases = [base.__name__ for base in classes[name].__bases__]
        assert bases[0] == parent, f"{name} is drawn under {parent}"
        assert builtin is None or bases[1] == builtin
