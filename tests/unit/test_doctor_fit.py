"""`holdfast doctor fit` counts the images of a rank by where the spec stages them."""

from __future__ import annotations

import pytest

from holdfast.cli.doctor import PARTS, bytes_by_staging, render
from holdfast.contracts.spec.run_spec import RunSpec

KB = 1 << 10


@pytest.mark.parametrize(
    ("mode", "in_memory", "on_disk"),
    [("memory", 8 * KB, 0), ("single", 4 * KB, 0), ("disk", 0, 8 * KB)],
)
def test_staging_is_counted_by_the_spec(
    mode: str, in_memory: int, on_disk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RunSpec.model_validate(
        {"name": "r", "command": ["train.py"], "checkpoint": {"staging": mode}}
    )
    # What `python -m holdfast.trainer.shape` answers: two images.
    counted = bytes_by_staging(spec, {**dict.fromkeys(PARTS, KB), "staging": 8 * KB})
    assert (counted["staging"], counted["staging_on_disk"]) == (in_memory, on_disk)
    assert counted["device"] == KB
    facts = {"checkpoint": "r:step-1", "ok": True, "gpus": 1, "secrets": (), "warnings": ()}
    render({**facts, "problem": None, "bytes_per_rank": counted})
    assert ("staging on the node's disk" in capsys.readouterr().out) == (mode == "disk")
