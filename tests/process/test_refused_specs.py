"""A run whose recorded spec would be refused today, and what follows when its spec is edited."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.local_command import PROGRAM, Local
from tests.support.flow_runs import SUPERVISION

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs import run_folders


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


@pytest.mark.slow
def test_an_old_run_continues_and_an_edited_spec_names_its_checkpoints(local: Local) -> None:
    settings = {"steps": 30, "sleep_s": 0.05, "fail_at": 18}
    # Today each of these keys is refused: none of them acts on the local executor.
    old = RunSpec.read(
        {
            "name": "kelp",
            "command": [PROGRAM.name, json.dumps(settings)],
            "launch": {"working_directory": str(PROGRAM.parent), "export": "none"},
            "environment": {"OMP_NUM_THREADS": "1"},
            "resources": {"partition": "gpu", "fallbacks": [{"gpu_type": "a100"}]},
            "checkpoint": {"interval": 10, "keep": {"last": 2}},
            "supervision": {**SUPERVISION, "pending_timeout_min": 5, "restarts_in_place": 0},
        }
    )
    assert "acts only on Slurm" in local.call("submit", str(_written(local, old))).stderr
    run_folders.create_run(old, local.root, created_by="tests")
    assert local.json("show", "kelp")["state"] == "queued"
    local.json("relaunch", "kelp")
    assert local.call("wait", "kelp", "--timeout", "200").returncode == 1
    shown = local.json("show", "kelp")
    assert (shown["state"], shown["attempts"][0]["cause"]) == ("failed", "user_error")
    assert shown["attempts"][0]["last_step"] == 17

    spec = local.write_spec("kelp", {"steps": 30, "sleep_s": 0.05})
    told = local.json("submit", str(spec))
    assert (told["run"], told["created"]) == ("kelp.r2", True)
    (warning,) = [one for one in told["warnings"] if "starts at step 0" in one]
    kept = re.search(r"run kelp, which has failed and has a checkpoint of step (\d+)", warning)
    assert kept is not None, warning
    cancel, fork = re.findall(r"`holdfast ([^`]*)`", warning)
    assert local.call(*cancel.split()).returncode == 0
    words = fork.replace("NAME", "kelp-2").split()
    forked = local.json(*words, "--wait")
    assert (forked["run"], forked["state"], forked["step"]) == ("kelp-2", "completed", 30)
    attempt = local.json("show", "kelp-2")["attempts"][0]
    assert attempt["first_step"] == int(kept[1]) + 1


def _written(local: Local, spec: RunSpec) -> Path:
    path = local.folder / "old.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_unset=True)))
    return path
