"""Every number of every document on disk has a bound, as another user could have written it."""

from __future__ import annotations

import importlib
import json
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from tests.support.runs import RunFolder

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.disk.journal import problem_with_facts
from holdfast.contracts.disk.manifest import Manifest, encode_manifest, read_manifest
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.records.documents import Submission
from holdfast.contracts.spec.part import SpecPart

PACKAGES = ("contracts", "workers")
HUGE: list[Any] = [10**40, 1e300, -1e300, float("inf"), float("nan")]


def models() -> list[type[BaseModel]]:
    """All models of documents, in the packages that read other users' files."""
    for package in PACKAGES:
        module = importlib.import_module(f"holdfast.{package}")
        for one in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            if not one.name.endswith("__main__"):
                importlib.import_module(one.name)
    return sorted(set(_below(BaseModel)), key=lambda one: f"{one.__module__}.{one.__name__}")


def _below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield from _below(one)
        if one.__module__.startswith(tuple(f"holdfast.{package}" for package in PACKAGES)):
            yield one


def _flat(metadata: Any) -> Iterator[Any]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _flat(one.metadata)
        elif isinstance(one, annotated_types.GroupedMetadata):
            yield from one
        else:
            yield one


def numbers_without_bounds(kind: Any, metadata: tuple[Any, ...] = ()) -> list[str]:
    """The number types inside `kind` that lack a lower or an upper bound."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return numbers_without_bounds(inner[0], (*metadata, *_flat(inner[1:])))
    if kind in (int, float):
        low = any(isinstance(one, annotated_types.Ge | annotated_types.Gt) for one in metadata)
        high = any(isinstance(one, annotated_types.Le | annotated_types.Lt) for one in metadata)
        return [] if low and high else [kind.__name__]
    if origin is Literal:
        return []
    passed = metadata if origin in (Union, types.UnionType) else ()
    return [found for one in inner for found in numbers_without_bounds(one, passed)]


def test_the_walk_finds_numbers_without_bounds() -> None:
    class Open(BaseModel):
        one: int
        many: dict[str, tuple[float, ...]] | None = None
        low: Annotated[float, annotated_types.Ge(0)] = 0.0

    found = {
        n: numbers_without_bounds(f.annotation, tuple(_flat(f.metadata)))
        for n, f in Open.model_fields.items()
    }
    assert found == {"one": ["int"], "many": ["float"], "low": ["float"]}


def test_every_number_of_every_document_has_bounds() -> None:
    found = models()
    assert {"Manifest", "Request", "NodeBeat", "Event", "MirrorRecord"} <= {
        one.__name__ for one in found
    }
    # The parts of a spec check all their values in one place, see the next test.
    lacking = [
        f"{one.__module__}.{one.__name__}.{name}"
        for one in found
        if not issubclass(one, SpecPart)
        for name, each in one.model_fields.items()
        if numbers_without_bounds(each.annotation, tuple(_flat(each.metadata)))
    ]
    assert lacking == []


@pytest.mark.parametrize("value", HUGE, ids=str)
def test_every_number_of_a_spec_has_bounds(value: Any) -> None:
    taken = []
    for one in models():
        if not issubclass(one, SpecPart):
            continue
        for name, each in one.model_fields.items():
            if not numbers_without_bounds(each.annotation, tuple(_flat(each.metadata))):
                continue
            for shape in (value, [value], {"done": value}, {"hang": value}):
                try:
                    one.read({name: shape})
                except ValidationError as error:
                    # A part may lack other keys, but the number itself is refused.
                    if any(
                        name in map(str, line["loc"]) or name in line["msg"]
                        for line in error.errors()
                    ):
                        continue
                    if all(line["type"] == "missing" for line in error.errors()):
                        continue
                taken.append(f"{one.__name__}.{name} = {shape}")
    assert taken == []


@pytest.fixture
def manifest(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    run = RunFolder(tmp_path, "run", "a" * 32)
    run.submit(1, 1, 1.7e9)
    directory = run.paths.checkpoint(run.commit(10, 1))
    return directory, json.loads((directory / "manifest.json").read_bytes())


@pytest.mark.parametrize("name", ["committed_at", "staged_at", "blocked_s", "flush_s"])
@pytest.mark.parametrize("value", [3e11, 1_764_000_000_000, -1, 1e300, "Infinity"], ids=str)
def test_a_manifest_with_an_impossible_time_is_damaged(
    manifest: tuple[Path, dict[str, Any]], name: str, value: Any
) -> None:
    """Milliseconds instead of seconds, as another program could write them, are one case."""
    directory, document = manifest
    document.pop("digest", None)
    (directory / "manifest.json").write_text(json.dumps({**document, name: value}))
    with pytest.raises(DamagedCheckpointError, match=f"manifest of format 1: {name}: "):
        read_manifest(directory)


def test_metrics_that_are_not_finite_are_left_out(manifest: tuple[Path, dict[str, Any]]) -> None:
    directory, document = manifest
    document["metrics"] = {"loss": float("nan"), "huge": 10**400, "low": -float("inf"), "ok": 0.5}
    made = Manifest.model_validate(document)
    assert made.metrics == {"ok": 0.5}
    (directory / "manifest.json").write_bytes(encode_manifest(made))
    assert read_manifest(directory) == made


@pytest.mark.parametrize(
    "facts",
    [
        {"step": 2**63 - 1},
        {"bytes": 2**62},
        {"attempt": 10**12},
        {"world_size": 10**9},
        {"ended_at": TIME_MAX * 10},
        {"ended_at": -1.0},
        {"delay_s": 1e300},
        {"skip": [[10**18, 1]]},
    ],
    ids=str,
)
def test_a_journal_line_with_an_impossible_number_is_damaged(facts: dict[str, Any]) -> None:
    (name,) = facts
    assert problem_with_facts("note", facts) == (
        f"{name} has an invalid value of type {type(facts[name]).__name__}"
    )
    assert problem_with_facts("note", {name: [[1, 1]] if name == "skip" else 1}) is None


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("limit_passed", {"limit": [], "passed": True, "text": "low"}),
        ("metric_missing", {"key": [], "metric": "m", "missing": True, "text": "none"}),
        ("metric_missing", {"key": "k", "metric": {}, "missing": True, "text": "none"}),
    ],
)
def test_a_journal_line_whose_subject_is_no_text_is_damaged(
    kind: str, facts: dict[str, Any]
) -> None:
    """The subjects are the keys of tables."""
    assert problem_with_facts(kind, facts)
    assert (
        problem_with_facts(kind, {**facts, **dict.fromkeys(("limit", "key", "metric"), "x")})
        is None
    )


@pytest.mark.parametrize("job", ["--user=root", "-9", "12 13", "12;x", "12\n13", "a" * 200])
def test_a_job_id_that_is_no_job_id_is_refused(job: str) -> None:
    """It would reach the command line of `scancel`."""
    with pytest.raises(ValidationError, match="job_id"):
        Submission(job_id=job, executor="slurm", submitted_at=1.0)
    for known in ("4711", "4711_3", "4711_[1-3]", "4711+1", "job-1"):
        assert Submission(job_id=known, executor="slurm", submitted_at=1.0).job_id == known
