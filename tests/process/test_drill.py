"""`holdfast drill`: real faults on a real run, by the CLI."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from caching_mount import mounted
from served_mounts import served

from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast_bench.drills import rehearsal
from holdfast_bench.drills.campaign import Plan, drill_throw_away
from holdfast_bench.drills.rehearsal import TestbedContext
from holdfast_bench.live_drills.kinds import select_kinds
from holdfast_bench.live_drills.results import DrillResult

KINDS = ("sigterm", "kill-rank", "kill-agent", "kill-flow", "kill-flusher", "disk-full")
# A full disk needs a small file system of its own.
MOUNT_KINDS = tuple(kind for kind in KINDS if kind != "disk-full")
CACHE_S = 60.0
SLOW_FAULTS = 200
SLOW_S = 4 * 3600.0


def drill(
    folder: Path, *arguments: str, home: Path | None = None, timeout_s: float = 1500.0
) -> dict[str, Any]:
    """Run a drill and return its JSON result; it must report that every invariant held."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "PREFECT_"))}
    command = [str(Path(sys.executable).with_name("holdfast")), "drill", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(folder), *arguments],
        env={**clean, "HOLDFAST_HOME": str(home or folder / "home")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_drill_with_six_fault_kinds_breaks_no_invariant(tmp_path: Path) -> None:
    answer = drill(tmp_path, "--count", "6", "--seed", "4", "--kinds", ",".join(KINDS))
    assert answer["broken"] == []
    assert sorted(fault["kind"] for fault in answer["faults"]) == sorted(KINDS)
    assert all(fault["ok"] for fault in answer["faults"])
    by_kind = {fault["kind"]: fault for fault in answer["faults"]}
    assert by_kind["sigterm"]["steps_lost"] == 0
    assert by_kind["kill-rank"]["first_step_s"] > 0
    assert not list(tmp_path.glob("holdfast-drill-*")), "the temporary run must be deleted"
    left = [p.info for p in psutil.process_iter(["cmdline"]) if _names(p, str(tmp_path))]
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drill_ends_after_its_time_and_reports_an_earlier_one_too(tmp_path: Path) -> None:
    words = ["--count", "50", "--kinds", "kill-rank", "--within", "1"]
    first = drill(tmp_path, *words)
    assert 1 <= len(first["faults"]) < 50
    earlier, page = tmp_path / "earlier.json", tmp_path / "report.md"
    earlier.write_text(json.dumps(first))
    more = ["--report", str(page), "--after", str(earlier), "--no-calibrate"]
    second = drill(tmp_path, *words, *more)
    both = len(first["faults"]) + len(second["faults"])
    assert f"After {both} of {both} faults" in page.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drill_detects_a_lost_checkpoint_and_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committed checkpoint is deleted from outside during the drill."""
    gone: list[str] = []

    def lose_checkpoint(context: TestbedContext) -> str:
        paths = context.target.paths
        gone.append(committed_checkpoints(paths)[-1].name)
        shutil.rmtree(paths.checkpoints / gone[0])
        return f"{gone[0]} deleted"

    monkeypatch.setitem(rehearsal.FAULTS, "straggler", lose_checkpoint)
    folder, kept = tmp_path / "drill", tmp_path / "kept"
    folder.mkdir()
    result = DrillResult(seed=1)
    plan = Plan(kinds=select_kinds(["straggler"], is_live=False, missing=()), count=1, seed=1)
    drill_throw_away(plan, result, folder, print, kept=kept)
    assert gone[0] in result.broken[0].detail
    (place,) = map(Path, result.kept)
    assert place.is_relative_to(kept)
    assert (place / "drill-01" / "spec.json").is_file()
    assert (place / "flow-drill-01.log").stat().st_size > 0
    assert list((place / "records-drill-01").iterdir())
    assert not (folder / "place-1" / "runs" / "drill-01").exists()


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_nan_drill_follows_each_on_nan_policy(
    tmp_path: Path,
) -> None:
    """Three runs with different `on_nan` policies; the drill compares their steps."""
    answer = drill(tmp_path, "--count", "3", "--kinds", "nan", "--at-once", "3")
    came = {fault["recovery"]: fault["steps_lost"] for fault in answer["faults"]}
    assert set(came) == {"new attempt", "in place", "undisturbed"}
    assert came["in place"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("kind", ["glusterfs", "caching_fs"])
def test_drill_on_another_file_system_breaks_no_invariant(tmp_path: Path, kind: str) -> None:
    point = tmp_path / "mounted"
    point.mkdir()
    with contextlib.ExitStack() as stack:
        if kind == "glusterfs":
            shared = stack.enter_context(served(kind, tmp_path / "served"))
            stack.enter_context(shared.mounted(point, "login"))
        else:
            source = tmp_path / "source"
            source.mkdir()
            stack.enter_context(mounted(source, tmp_path / "fault", point, CACHE_S))
        answer = drill(
            point,
            *("--count", str(len(MOUNT_KINDS)), "--kinds", ",".join(MOUNT_KINDS)),
            home=tmp_path / "home",
        )
    assert [fault["ok"] for fault in answer["faults"]] == [True] * len(MOUNT_KINDS)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "kind", ["node-loss-spare", "node-loss-shrink", "neighbour-loss", "replica-damage"]
)
def test_drill_of_lost_nodes_continues_in_the_same_attempt(tmp_path: Path, kind: str) -> None:
    answer = drill(tmp_path, "--count", "1", "--seed", "11", "--kinds", kind)
    (fault,) = answer["faults"]
    assert (fault["kind"], fault["ok"], fault["recovery"]) == (kind, True, "in place")
    assert answer["broken"] == []
    assert answer["uncompared"] == 0
    assert not list(tmp_path.glob("holdfast-drill-*")), "the temporary run must be deleted"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(SLOW_S)
def test_drill_with_200_faults_breaks_no_invariant(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    arguments: tuple[str, ...] = ("--count", str(SLOW_FAULTS), "--seed", "7", "--at-once", "3")
    arguments += ("--report", str(page))
    answer = drill(tmp_path, *arguments, timeout_s=SLOW_S)
    assert answer["broken"] == []
    assert len(answer["faults"]) == SLOW_FAULTS
    assert f"After {SLOW_FAULTS} of {SLOW_FAULTS} faults, every invariant held." in page.read_text()


def _names(process: psutil.Process, text: str) -> bool:
    return any(text in word for word in process.info["cmdline"] or ())
