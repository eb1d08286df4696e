"""End to end on the real example: preemption and resizing do not change the training result.

A GPT on real text trains 100 steps three times: undisturbed, preempted and resumed on the same
number of ranks, and preempted and resumed on half of them. The tests compare the sample ids and
losses of each step, and the weights of the final checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from examples.demo_service import PrefectService
from tests.support.flow_runs import SUPERVISION, FlowRuns, claim_of, state_of, step_of, wait_for
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.contracts.disk.paths import RunPaths

SPEC: Final = Path(__file__).parents[2] / "examples" / "gpt" / "spec.toml"
STEPS: Final = 100
PREEMPT_AT: Final = 40
LOSS_TOLERANCE: Final = 1e-4


@pytest.fixture(scope="module")
def runs(
    prefect_service: PrefectService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FlowRuns]:
    made = FlowRuns(prefect_service, tmp_path_factory.mktemp("story"))
    yield made
    made.end_all()


@pytest.fixture(scope="module")
def undisturbed(runs: FlowRuns) -> RunPaths:
    return run_example(runs, "undisturbed", sizes=())


def run_example(runs: FlowRuns, name: str, *, sizes: tuple[int, ...]) -> RunPaths:
    """Run the example to its end; if `sizes` is set, preempt it once and continue at that size."""
    sizes_after = f"elastic.on_preemption={list(sizes or (4,))}"
    watched = (f"supervision.{key}={value}" for key, value in SUPERVISION.items())
    changes = (f"name={name}", sizes_after, f"config.steps={STEPS}", *watched)
    paths = runs.deploy_run(SPEC, name, changes)
    if sizes:
        wait_for(f"step {PREEMPT_AT}", lambda: step_of(paths) >= PREEMPT_AT)
        os.kill(claim_of(paths).pid, signal.SIGTERM)
    wait_for("the end", lambda: state_of(paths) not in {"", "queued", "running", "waiting"})
    assert state_of(paths) == "completed"
    return paths


def steps_of(paths: RunPaths) -> dict[int, list[dict[str, Any]]]:
    """The records of all ranks by step, in order of rank: {step: [line, …]}."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((paths.directory / "records").glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            step = json.loads(line)
            found[step["step"]].append(step)
    return dict(found)


def order_of(paths: RunPaths) -> list[list[int]]:
    """The sample ids of each step over all ranks, in order of step and id."""
    steps = steps_of(paths)
    return [sorted(i for line in steps[s] for i in line["ids"]) for s in sorted(steps)]


def losses_of(paths: RunPaths) -> list[float]:
    """The mean loss of each step, in nats per byte."""
    steps = steps_of(paths)
    return [steps[step][0]["loss"] for step in sorted(steps)]


def weights_of(paths: RunPaths, folder: Path) -> dict[str, Any]:
    """The final checkpoint as stock DCP reads it, flat."""
    target = folder / f"{paths.name}.pt"
    dcp_to_torch_save(paths.latest.resolve(), target)
    return flatten("", torch.load(target, weights_only=True))


def flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        # The example seeds only torch, so the other generators differ in every process.
        return {} if prefix.endswith(("/python", "/numpy")) else {prefix: value}
    inner = [flatten(f"{prefix}/{key}", item) for key, item in value.items()]
    return {key: item for part in inner for key, item in part.items()}


def is_same(a: Any, b: Any) -> bool:
    """True if both are bit-identical tensors or equal values."""
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.slow
def test_weights_are_bit_identical_after_preemption_at_the_same_size(
    runs: FlowRuns, undisturbed: RunPaths, tmp_path: Path
) -> None:
    paths = run_example(runs, "same-size", sizes=(4,))
    shown = runs.holdfast("show", "same-size")
    assert [a["world_size"] for a in shown["attempts"]] == [4, 4]
    assert order_of(paths) == order_of(undisturbed)
    assert losses_of(paths) == losses_of(undisturbed)
    expected, found = weights_of(undisturbed, tmp_path), weights_of(paths, tmp_path)
    assert found.keys() == expected.keys()
    assert len(found) > 50
    assert [key for key in expected if not is_same(found[key], expected[key])] == []


@pytest.mark.slow
def test_data_and_losses_are_the_same_after_preemption_and_resize(
    runs: FlowRuns, undisturbed: RunPaths
) -> None:
    paths = run_example(runs, "resized-story", sizes=(2,))
    shown = runs.holdfast("show", "resized-story")
    first, second = shown["attempts"]
    assert (first["world_size"], second["world_size"]) == (4, 2)
    assert first["command_digest"] == second["command_digest"]
    assert second["first_step"] == first["last_step"] + 1
    steps = steps_of(paths)
    assert sorted(steps) == list(range(1, STEPS + 1))
    trained_twice = [s for s, lines in steps.items() if len(lines) not in {2, 4}]
    assert trained_twice == [], "steps were trained twice"
    assert order_of(paths) == order_of(undisturbed)
    pairs = zip(losses_of(paths), losses_of(undisturbed), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= LOSS_TOLERANCE
    losses = losses_of(paths)
    assert losses[-1] < 0.8 * losses[0], "the loss did not fall"
