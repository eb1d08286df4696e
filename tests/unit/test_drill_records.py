"""What a drill reads of its target run: journals and step records."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.runs import build_sample_runs

from holdfast_bench.drills.steps import RecordedRun, Records, Step
from holdfast_bench.live_drills.process_list import LaunchPlace


def test_records_are_read_incrementally_and_torn_lines_are_not_steps(tmp_path: Path) -> None:
    path = tmp_path / "a0002.l03.rank1.jsonl"
    line = {"time": 1.0, "step": 1, "loss": 0.5, "ids": "a", "weights": "b"}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "step": 2})[:20])
    records = Records(tmp_path)
    (one,) = records.read_new()
    assert (one.place, one.rank, one.step) == (LaunchPlace(2, 3), 1, 1)
    with open(path, "a") as stream:
        stream.write(json.dumps({**line, "step": 2})[20:] + "\n")
    assert [step.step for step in records.read_new()] == [2]
    assert records.read_new() == []


def test_the_resumed_step_is_known_together_with_the_step(
    tmp_path: Path,
) -> None:
    scripted_run = next(
        run for run in list(build_sample_runs(tmp_path / "runs")) if run.name == "gpt"
    )
    line = {"time": 1.0, "step": 151, "loss": 0.5, "ids": "a", "weights": "b"}

    class Late(Records):
        """A launch and its first step appear after the journals were read and before the steps."""

        def read_new(self) -> list[Step]:
            if not list(tmp_path.glob("*.jsonl")):
                scripted_run.launch(3, 2, 150, "gpt:step-00000150.a0003.l01")
                (tmp_path / "a0003.l02.rank0.jsonl").write_text(json.dumps(line) + "\n")
            return super().read_new()

    target = RecordedRun(paths=scripted_run.paths, records=Late(tmp_path))
    target.look()
    assert target.newest is not None
    assert target.newest.place == LaunchPlace(3, 2)
    assert target.resumed_step(target.newest.place) == 150
