"""Names on disk: every written name is read back, and unknown names are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts.disk.paths import (
    AttemptPaths,
    CheckpointName,
    RunPaths,
    checkpoint_id,
    default_root,
    holdfast_home,
    list_runs,
)


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 10**4))
def test_a_checkpoint_name_is_read_back(step: int, attempt: int, launch: int) -> None:
    name = CheckpointName(step, attempt, launch)
    assert CheckpointName.parse(str(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "step-1.a1.l1",
        "step-00000001",
        "step-00000001.a0001.l01.tmp",
        "step-000000001.a0001.l01",
        "step-00000001.a00001.l01",
        "step-٠٠٠٠٠٠٠١.a0001.l01",
        "step-00000001.a0001.l01\n",
        "xstep-00000001.a0001.l01",
    ],
)
def test_names_in_other_formats_are_not_checkpoints(name: str) -> None:
    assert CheckpointName.parse(name) is None


def test_listings_are_sorted_by_number_and_skip_unknown_names(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    steps = [(12, 1, 1), (9, 2, 1), (9, 1, 2), (9, 1, 1), (123_456_789, 1, 1)]
    for parts in steps:
        run.checkpoint(CheckpointName(*parts)).mkdir(parents=True)
    (run.checkpoints / "notes").mkdir()
    run.latest.symlink_to("step-00000012.a0001.l01")
    found = [CheckpointName.parse(path.name) for path in run.list_checkpoints()]
    assert found == sorted(CheckpointName(*parts) for parts in steps)
    for number in (2, 10, 1, 10_000):
        run.attempt(number).directory.mkdir(parents=True)
    (run.attempts / "old").mkdir()
    assert [attempt.number for attempt in run.list_attempts()] == [1, 2, 10, 10_000]


def test_journals_of_the_run_and_of_its_attempts_are_all_listed(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    expected = [
        run.journal_of("cli"),
        run.journal_of("flow"),
        run.attempt(1).node_journal(0),
        run.attempt(2).node_journal(0),
        run.attempt(2).node_journal(1),
    ]
    for path in expected:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (run.journal / "flow.jsonl.bak").touch()
    assert run.list_journals() == expected


def test_a_missing_folder_lists_nothing(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "none")
    assert (run.list_attempts(), run.list_checkpoints(), run.list_journals()) == ([], [], [])
    assert list_runs(tmp_path / "none") == []


def test_runs_are_the_folders_with_a_spec(tmp_path: Path) -> None:
    for name in ("b", "a"):
        run = RunPaths(tmp_path / name)
        run.directory.mkdir()
        run.spec.touch()
    (tmp_path / "c").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["a", "b"]


def test_every_path_of_a_run_is_inside_its_folder(tmp_path: Path) -> None:
    run, attempt = RunPaths(tmp_path), AttemptPaths(tmp_path / "attempts" / "0003")
    own = [getattr(run, name) for name in vars(RunPaths) if not name.startswith("_")]
    own += [getattr(attempt, name) for name in vars(AttemptPaths) if not name.startswith("_")]
    paths = [path for path in own if isinstance(path, Path)]
    assert len(paths) > 15
    assert len(set(paths)) == len(paths), "two properties return the same path"
    assert all(path.is_relative_to(tmp_path) for path in paths)
    assert attempt.number == 3
    assert attempt.rank_log(1, 2, 3).name == "rank-00003.stdout.log"


def test_home_and_root_follow_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HOLDFAST_HOME", raising=False)
    monkeypatch.delenv("HOLDFAST_ROOT", raising=False)
    assert holdfast_home() == tmp_path / ".holdfast"
    assert default_root() == tmp_path / ".holdfast" / "runs"
    monkeypatch.setenv("HOLDFAST_HOME", "~/home")
    assert default_root() == tmp_path / "home" / "runs"
    monkeypatch.setenv("HOLDFAST_ROOT", "~/root")
    assert default_root() == tmp_path / "root"
    assert checkpoint_id("run", "step") == "run:step"


@pytest.mark.parametrize(
    ("variable", "read"), [("HOLDFAST_HOME", holdfast_home), ("HOLDFAST_ROOT", default_root)]
)
def test_a_relative_folder_is_the_same_for_processes_that_start_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    read: Callable[[], Path],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "mine")
    assert read() == tmp_path / "mine"
    # A child has the environment of this process, and may have another folder.
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert read() == tmp_path / "mine"


def test_no_test_uses_the_home_of_the_account() -> None:
    assert not holdfast_home().is_relative_to(Path.home() / ".holdfast")
