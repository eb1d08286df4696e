"""Each folder of the package says what belongs there, and each name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PORTIONS = ("src", "trainer", "workers", "flows")
# A folder with more modules has more than one purpose.
MODULES_MAX = 24
WORDS_MIN = 20
# `AttemptView`, `Health`, `Segment`, `Session` and `Supervision` are names of the REST API, where
# another class of that name would be a change for its callers.
COLLISIONS_MAX = 5


def rooms() -> list[Path]:
    """The folders with modules below `holdfast`, by portion."""
    return sorted(
        folder
        for portion in PORTIONS
        for folder in (CHECKOUT / portion / "holdfast").rglob("*")
        if folder.is_dir() and any(folder.glob("*.py"))
    )


@pytest.mark.parametrize("room", rooms(), ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_a_room_says_what_belongs_there_and_is_not_crowded(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert len(text.split()) >= WORDS_MIN, "say in its `__init__` what belongs there"
    modules = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MODULES_MAX


def test_a_public_class_name_stands_for_one_class() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for room in rooms():
        for path in room.glob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(CHECKOUT)))
    several = {name: places for name, places in found.items() if len(places) > 1}
    assert len(several) <= COLLISIONS_MAX, several


# Started by name, by another process whose environment may have another version of Holdfast, or
# recorded in Prefect and in batch scripts. During an upgrade both versions need the same name.
STARTED = (
    "holdfast.cli.entry",
    "holdfast.cli.main",
    "holdfast.flows.consumer_flow_run",
    "holdfast.flows.detached",
    "holdfast.flows.operations",
    "holdfast.flows.train",
    "holdfast.flows.worker",
    "holdfast.trainer.export",
    "holdfast.trainer.flight_records",
    "holdfast.trainer.flusher",
    "holdfast.trainer.health_allreduce",
    "holdfast.trainer.importing",
    "holdfast.trainer.mirror",
    "holdfast.trainer.rank_start",
    "holdfast.trainer.shape",
    "holdfast.workers.agent.guard",
    "holdfast.workers.agent.loaded_start",
    "holdfast.workers.agent.main",
    "holdfast.workers.agent.program_start",
    "holdfast.workers.agent.restart",
    "holdfast.workers.agent.successor",
    "holdfast.workers.checkpoints.consumer_process",
    "holdfast.workers.executors.local_launch",
    "holdfast.workers.flight_records",
    "holdfast.workers.health",
    "holdfast.workers.health_nvrx",
)
# In the product's code: "-m" and the module, or a constant with its name.
BY_NAME = re.compile(r"(?:\"-m\", |-m |: Final = )[f\"]*(holdfast\.(?:\w+\.)*\w+)(?![\w.])")


def test_modules_that_are_started_by_name_keep_their_names() -> None:
    for name in STARTED:
        assert find_spec(name) is not None, f"an older version starts {name}"
    named = {
        found
        for portion in PORTIONS
        for path in (CHECKOUT / portion / "holdfast").rglob("*.py")
        for found in BY_NAME.findall(path.read_text())
        if find_spec(found) is not None
    }
    assert named <= {*STARTED}, "a new one: add it to STARTED"
