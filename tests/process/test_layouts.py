"""Generated states of any layout: Holdfast and stock DCP load each other's saves byte-exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support import forked
from tests.support.flusher_supervisor import SlotHolder
from tests.support.layouts_program import MESHES

ROOT = Path(__file__).parents[2]
PROGRAM_S = 300.0
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
EXTENTS = st.sampled_from([0, 1, 1, 2, 3, 5, 8])


@st.composite
def layouts(draw: st.DrawFn, dimensions: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["plain", "turned", "spread", "parts", "parts", "parts"]))
    if kind != "parts":
        return {"kind": kind}
    dimension = st.integers(0, dimensions - 1) if dimensions else st.none()
    return {
        "kind": kind,
        "mesh": draw(st.sampled_from(sorted(MESHES))),
        "placements": draw(st.lists(st.none() | dimension, min_size=2, max_size=2)),
    }


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(st.lists(EXTENTS, max_size=3))
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(DTYPES)),
        "saved": draw(layouts(len(shape))),
        "loaded": draw(layouts(len(shape))),
    }


STATES = st.lists(tensors(), min_size=8, max_size=12).map(
    lambda drawn: {f"model.t{number}": one for number, one in enumerate(drawn)}
)


def save_and_load(cases: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Save and load the states with real ranks, by Holdfast and by stock DCP in both directions.

    The exit status is 0 if every tensor came back exactly.
    """
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "cases.json").write_text(json.dumps(cases))
            command = [
                sys.executable,
                "-m",
                "tests.support.layouts_program",
                f"{folder}/cases.json",
            ]
            return forked.run(
                [*command, folder, flusher_supervisor.name],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=PROGRAM_S,
            )
    finally:
        flusher_supervisor.close()


def part(mesh: str, *placements: int | None) -> dict[str, Any]:
    return {"kind": "parts", "mesh": mesh, "placements": list(placements)}


@pytest.mark.more
def test_sharded_empty_tensors_between_other_keys() -> None:
    """A tensor without elements, sharded along its last dimension, beside normal tensors."""
    line, plain = part("line", 2, None), {"kind": "plain"}
    empty = {"shape": [5, 0, 3], "dtype": "float32"}
    full = {"shape": [2, 3, 4], "dtype": "float32", "saved": line, "loaded": plain}
    none = part("pair", None, None)
    done = save_and_load(
        [
            {
                "model.a": full,
                "model.b": {**empty, "saved": line, "loaded": plain},
                "model.c": full,
                "model.d": {**empty, "saved": part("square", 0, 2), "loaded": line},
                "model.e": {**empty, "saved": none, "loaded": part("others", 2, None)},
                "model.f": full,
            }
        ]
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.more
@settings(
    # The first example is always the simplest possible one.
    max_examples=2,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(STATES, min_size=6, max_size=6))
def test_few_generated_layouts_save_and_load_exactly(cases: list[dict[str, Any]]) -> None:
    done = save_and_load(cases)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(STATES, min_size=25, max_size=25))
def test_many_generated_layouts_save_and_load_exactly(cases: list[dict[str, Any]]) -> None:
    done = save_and_load(cases)
    assert done.returncode == 0, done.stderr[-6000:]
