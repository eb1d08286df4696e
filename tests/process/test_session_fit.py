"""Programs that no longer fit their checkpoint: renamed, missing or additional parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.process.test_session import Launch, events_of, steps_of

from holdfast.contracts.disk.journal import EventKind

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"ranks": 0, "horizon": 12, "interval": "2"}


def losses(launch: Launch) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps_of(launch.run, 0)}


def train(directory: Path, steps: int, **settings: Any) -> Launch:
    with Launch(directory, **SETTINGS, steps=steps, **settings) as launch:
        assert launch.wait() == 0, launch.output
    return launch


def test_changed_program_resumes_and_the_missing_keys_are_reported(
    tmp_path: Path,
) -> None:
    truth = losses(train(tmp_path / "whole", 12))
    run = tmp_path / "run"
    train(run, 6)

    renamed = {"head": "exit", "fit": {"rename": {"model.3.*": "model.exit.*"}}}
    launch = train(run, 9, **renamed)
    assert "continues after step 6" in launch.output
    assert "model.3.weight to model.exit.weight" in launch.output
    assert losses(launch) == {step: truth[step] for step in range(1, 10)}, "bit for bit"

    # The optimizer restarts, and an additional factor has no saved value; 1.0 has no effect yet.
    fit = {"exclude": ["optimizer"], "strict": False}
    changed = {"head": "exit", "scale": True, "fit": fit}
    launch = train(run, 11, **changed)
    assert "continues after step 9" in launch.output
    assert "not in the checkpoint: model.scale.factor" in launch.output
    assert "excluded: optimizer." in launch.output
    assert losses(launch)[10] == truth[10], "the weights are the checkpoint's"
    assert losses(launch)[11] != truth[11], "the moments are not"
    told = events_of(launch.run, EventKind.RESUMED)[-1].data
    assert told["restored"] == ["model", "scheduler", "rng"]
    assert any("model.scale.factor" in note for note in told["notes"])

    # The same command again: its own checkpoints have the parts that were missing before.
    launch = train(run, 12, **changed)
    assert "continues after step 11" in launch.output
    assert "excluded" not in launch.output
    assert "not in the checkpoint" not in launch.output
    told = events_of(launch.run, EventKind.RESUMED)[-1].data
    assert told["restored"] == ["model", "optimizer", "scheduler", "rng"]
