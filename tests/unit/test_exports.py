"""The public names of the package: its exports, version, errors and commands."""

from __future__ import annotations

import importlib
import inspect
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
PARTS = sorted(
    path for folder in holdfast.__path__ for path in Path(folder).iterdir() if path.is_dir()
)
TREE_LINE = re.compile(r"^([│├└─ ]*)(\w+)(?: \((\w+)\))? ", re.MULTILINE)


def modules(part: Path) -> list[str]:
    # torchtitan has an environment of its own, which only its tests use.
    has_torchtitan = find_spec("torchtitan") is not None
    names = {
        ".".join(path.relative_to(part.parents[1]).with_suffix("").parts).removesuffix(".__init__")
        for path in part.rglob("*.py")
        # It runs its program when it is imported.
        if path.stem != "__main__"
    }
    return sorted(name for name in names if has_torchtitan or "torchtitan" not in name)


def test_the_modules_of_all_parts_are_found() -> None:
    names = {part.name for part in PARTS}
    assert names == {"api", "cli", "contracts", "flows", "lineage", "trainer", "workers"}
    assert sum(len(modules(part)) for part in PARTS) > 500


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_module_imports_and_exports_what_it_names(part: Path) -> None:
    wrong = []
    for name in modules(part):
        try:
            module = importlib.import_module(name)
        except Exception as error:
            error.add_note(f"while {name} is imported")
            raise
        exports = getattr(module, "__all__", ())
        wrong += [f"{name}.{export}" for export in exports if not hasattr(module, export)]
    assert not wrong


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
