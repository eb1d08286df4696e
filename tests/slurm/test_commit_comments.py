"""The newest commit in the comment of a run's job."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until
from tests.slurm.test_lost_nodes import supervised

from holdfast.workers.runs import tending
from holdfast.workers.schedulers import slurm_client

OWN = "for paper=7 and more"
COMMENT = {"commit_comment": True, "extra": {"comment": OWN}}
RESOURCES = {"executor": "slurm", "gpus_per_node": 1, "partition": "spot", **COMMENT}


@pytest.mark.more
def test_a_job_s_comment_has_its_newest_commit_and_keeps_its_own_words(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tending, "CHANGE_S", 1.0)
    run = LocalRun(
        tmp_path / "root",
        resources=RESOURCES,
        supervision={"poll_s": 0.5},
        checkpoint={"interval": 20},
        steps=100_000,
        sleep_s=0.1,
    )
    seen: list[int] = []

    def look() -> bool:
        """Record the step in the comment of the running job; return True after the second one."""
        last = run.history().last_attempt
        words = slurm_client.comment_of(last.job_id)[1:] if last and last.job_id else []
        comment = " ".join(words)
        assert comment.startswith(OWN if words else ""), comment
        if found := re.fullmatch(rf"{OWN} holdfast:step-(\d+)@(\d+)", comment):
            assert abs(int(found[2]) - time.time()) < 600
            seen.append(int(found[1]))
        return len(set(seen)) > 1

    with supervised(run):
        wait_until(look, "two commits in the comment", 120)
    assert seen == sorted(seen)
    assert set(seen) <= {name.step for name in run.paths.list_checkpoint_names()}
