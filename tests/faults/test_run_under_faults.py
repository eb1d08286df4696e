"""A whole run, with agent, flusher and rank, on storage where some system calls fail."""

from __future__ import annotations

import errno
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.faults.shim import Action, Point, Shim
from tests.process.local_runs import LocalRun, wait_until

from holdfast.cli.main import main
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.states import AttemptState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

INTERVAL, STEPS = 20, 80
SYNC_OF_DATA = Point("fsync", "tried/checkpoints/STEP/__0_0.distcp.tmp", 1)
NAME_OF_MANIFEST = Point("link", "tried/checkpoints/STEP/manifest.json", 1)
FAULTS = {INTERVAL: (SYNC_OF_DATA, errno.EIO), 2 * INTERVAL: (NAME_OF_MANIFEST, errno.ENOSPC)}


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


def test_failed_saves_are_reported_and_the_next_save_is_committed(
    shim_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "root"
    run = LocalRun(root, gpus=1, steps=STEPS, sleep_s=0.1, checkpoint={"interval": INTERVAL})
    shim = Shim(shim_library, root, tmp_path / "shim")
    try:
        with monkeypatch.context() as patch:
            for name, value in shim.environment.items():
                patch.setenv(name, value)
            attempt = run.submit()
        for step, (point, number) in FAULTS.items():
            shim.arm(point, name_of(step), Action.FAIL_ONCE, number)
            told = [name_of(each) for each in FAULTS if each <= step]
            wait_until(partial(has_reported, run, told), f"a failed save of step {step}")
            assert shim.has_fired
        shim.disarm()
        view = run.wait_for_end()
    finally:
        run.end_all()
        shim.close()
    assert (view.state, view.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [m.step for m in committed_checkpoints(run.paths)] == [3 * INTERVAL, STEPS]
    assert "was not saved: " in attempt.rank_log(0, 1, 0).read_text()

    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["holdfast", "show", "tried", "--root", str(root), "--json"])
    with pytest.raises(SystemExit):
        main()
    first, second = json.loads(capsys.readouterr().out)["failed_saves"]
    assert (first["step"], second["step"]) == tuple(FAULTS)
    assert "Input/output error" in first["error"]
    assert "No space left on device" in second["error"]


def has_reported(run: LocalRun, names: list[str]) -> bool:
    """True when these saves, and no others, are journaled as failed."""
    return [e.data["checkpoint"] for e in run.events(EventKind.SAVE_FAILED)] == names
