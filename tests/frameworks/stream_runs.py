"""Runs of `stream_program`: launched, stopped, killed and resized, with what each step got."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.process.stream_program import SIZES, write_data
from tests.support.rank_programs import run_program
from tests.support.stream_lines import lines_in, samples_in

LAUNCHES_S: Final = 900.0
IDS: Final = [100 * shard + number for shard, size in enumerate(SIZES) for number in range(size)]


@dataclass
class StreamRun:
    """One run in a folder with its data. `launches` are the ranks and environments to launch."""

    folder: Path
    settings: dict[str, Any]
    launches: list[tuple[int, dict[str, str]]] = field(default_factory=list)

    def add(self, ranks: int, how: str = "", step: int = 0) -> None:
        """Add a launch of the identical command. It is stopped or killed in a step."""
        environment = {"STREAM_LAUNCH": str(len(self.launches))}
        environment |= {"HOLDFAST_CHECKPOINT_INTERVAL": "3", "HF_HUB_OFFLINE": "1"}
        if how:
            environment[f"STREAM_{how}_AT"] = str(step)
        self.launches.append((ranks, environment))

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all ranks, by step and rank. Only the last launch of a step counts."""
        return lines_in(self.folder / "run")

    def samples(self) -> list[dict[str, Any]]:
        """The lines without what tells launches apart."""
        return samples_in(self.folder / "run")

    def counts(self, epoch: int | None = None) -> Counter[int]:
        """How often each sample was given, in one epoch or in all."""
        lines = [line for line in self.lines() if epoch in {None, line["epoch"]}]
        return Counter(one for line in lines for one in line["ids"])


class StreamRuns:
    """Three runs with the same settings: a whole one, an interrupted one and a resized one."""

    def __init__(
        self, folder: Path, framework: str, source: str, workers: int, **more: Any
    ) -> None:
        settings = {"framework": framework, "source": source, "workers": workers, **more}
        data = folder / "data"
        self.write_data(data)

        def made(name: str) -> StreamRun:
            own = folder / name
            named = {"directory": str(own / "run"), "data": str(data)}
            return StreamRun(own, {**settings, **named})

        self.whole, self.cut, self.resized = made("whole"), made("cut"), made("resized")
        self.whole.add(2)
        for how, step in (("KILL", 5), ("STOP", 10), ("KILL", 14), ("STOP", 16)):
            self.cut.add(2, how, step)
        self.cut.add(2)
        self.resized.add(2, "STOP", 4)
        self.resized.add(1, "KILL", 8)
        self.resized.add(3)
        # All that the launches printed, and the exit statuses of the ranks of each.
        self.said, self.statuses = "", [[0]]

    def launch(self) -> None:
        """Run all launches with forked ranks."""
        launches = [
            [ranks, run.settings, environment]
            for run in (self.whole, self.cut, self.resized)
            for ranks, environment in run.launches
        ]
        self.said = self.run("frameworks.stream_cases", json.dumps(launches))
        lines = [line for line in self.said.splitlines() if line.startswith("STATUSES ")]
        self.statuses = [json.loads(line.partition(" ")[2]) for line in lines]

    def write_data(self, data: Path) -> None:
        """Write the shards."""
        write_data(data)

    def run(self, name: str, launches: str) -> str:
        """Run a program of `tests`. Return its output."""
        return run_program(name, launches, timeout_s=LAUNCHES_S)
