"""The quick start, followed command by command in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.docs.blocks import ROOT, TUTORIAL, Block, unmarked
from tests.process.local_runs import wait_until

PAGE: Final = ROOT / TUTORIAL
BLOCKS: Final = [block for block in unmarked() if block.page == TUTORIAL]
COMMAND_S_MAX: Final = 120.0
TRAINING_S_MAX: Final = 240.0


class QuickStart:
    """The tutorial's folder, and the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOLDFAST_ROOT": str(folder / "runs"),
            "HOLDFAST_HOME": str(folder / "home"),
            "COLUMNS": "200",
        }

    def run(self, command: str) -> str:
        """Run a command of the page, check that it succeeds, and return its output."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("holdfast show tour --json"))
        return shown

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints."""
        return [one["step"] for one in json.loads(self.run("holdfast checkpoints tour --json"))]

    def pids(self) -> list[str]:
        """The pids that rank 3 has had, in order."""
        return re.findall(r"process (\d+)", self.run("holdfast logs tour --rank 3"))

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        wait_until(is_so, what, TRAINING_S_MAX)


def section_of(number: int) -> list[Block]:
    """The blocks of a numbered section of the page."""
    starts = [
        line for line, text in enumerate(PAGE.read_text().splitlines(), 1) if text.startswith("## ")
    ]
    return [one for one in BLOCKS if starts[number - 1] < one.line < starts[number]]


def commands(section: list[Block]) -> list[str]:
    """The commands of a section, without comments."""
    lines = (line for block in section if block.is_shell for line in block.commands.splitlines())
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture
def tour(tmp_path: Path) -> Iterator[QuickStart]:
    one = QuickStart(tmp_path)
    yield one
    for run in ("tour", "tour-fork"):
        if (tmp_path / "runs" / run).is_dir():
            subprocess.run(
                ["holdfast", "cancel", run], env=one.environment, capture_output=True, check=False
            )
            subprocess.run(
                ["holdfast", "wait", run, "--timeout", "120"],
                env=one.environment,
                capture_output=True,
                check=False,
            )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_start_commands_work_as_documented(tour: QuickStart) -> None:
    sections = {number: commands(section_of(number)) for number in range(1, 9)}
    assert sum(len(section_of(number)) for number in sections) == len(BLOCKS)
    assert sections[1] == sections[2] == []
    write_files(tour.folder, section_of(2))

    assert sections[3] == ["holdfast submit tour.toml", "holdfast show tour"]
    assert "created run tour" in tour.run(sections[3][0])
    tour.wait("three checkpoints", lambda: 300 in tour.steps())
    assert "running" in tour.run(sections[3][1])

    kill_a_rank(tour, sections[4])
    continue_on_two_ranks(tour, sections[5])
    look_at_the_lineage(tour, sections[6])
    open_the_page(tour, sections[7])

    assert sections[8] == ["holdfast runs"]
    runs = tour.run(sections[8][0])
    assert "tour-fork" in runs
    tour.run("holdfast cancel tour")
    tour.wait("the end", lambda: tour.show()["state"] == "cancelled")


def write_files(folder: Path, section: list[Block]) -> None:
    names = {"python": "train.py", "toml": "tour.toml"}
    found = {block.language: block.text for block in section}
    assert found.keys() == names.keys()
    for language, text in found.items():
        (folder / names[language]).write_text(text)


def kill_a_rank(tour: QuickStart, wanted: list[str]) -> None:
    logs, kill, show, again, checkpoints = wanted
    assert (logs, again) == ("holdfast logs tour --rank 3",) * 2
    assert re.fullmatch(r"kill -9 \d+", kill)
    (pid,) = tour.pids()
    tour.run(f"kill -9 {pid}")
    tour.wait("another launch", lambda: len(tour.pids()) == 2)
    tour.wait("its first checkpoint", lambda: ".l02" in tour.run(checkpoints))
    assert re.search(r"launch 1 crashed at step \d+ and was restarted in place", tour.run(show))
    # The committed checkpoint is a snapshot that is a few steps old, not a save by interval.
    assert any(step % 100 for step in tour.steps())
    assert tour.show()["goodput"]["steps_lost"] < 50


def continue_on_two_ranks(tour: QuickStart, wanted: list[str]) -> None:
    relaunch, show = wanted
    assert relaunch == "holdfast relaunch tour --gpus 2"
    assert "ends after one last checkpoint" in tour.run(relaunch)
    tour.wait(
        "attempt 2",
        lambda: [one["first_step"] is not None for one in tour.show()["attempts"]][1:] == [True],
    )
    first, second = tour.show()["attempts"]
    assert (first["world_size"], second["world_size"]) == (4, 2)
    assert second["first_step"] == first["last_step"] + 1
    assert "cancelled   operator   4" in tour.run(show)


def look_at_the_lineage(tour: QuickStart, wanted: list[str]) -> None:
    lineage, fork, of_fork, cancel = wanted
    assert "attempt 2 · 2 ranks" in tour.run(lineage)
    assert "created run tour-fork" in tour.run(fork)
    assert "step-00000300.a0001.l01" in tour.run(of_fork)
    tour.run(cancel)


def open_the_page(tour: QuickStart, wanted: list[str]) -> None:
    assert wanted == ["holdfast serve"]
    server = subprocess.Popen(
        ["holdfast", "serve", "--port", "0"],
        env=tour.environment,
        cwd=tour.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = next(one for one in server.stdout if "serving http" in one)
        url = re.search(r"http://\S+", line)
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=30) as answer:
            assert answer.status == 200
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
