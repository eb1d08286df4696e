"""Why a run failed, from real torchrun: one rank is killed, and the others raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from tests.api.conftest import serving, wait_for
from tests.process.local_runs import LocalRun

from holdfast.contracts.states import AttemptState

PROGRAM: Final = """\
import os, signal, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 2:
    # After a death without a word, the agent ends the peers before they can report it.
    print("Error: no GPU", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.more
def test_the_killed_rank_is_the_first_cause_and_its_peers_errors_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path / "runs"))
    program = tmp_path / "killed.py"
    program.write_text(PROGRAM)
    supervision = {"restarts_in_place": 0}
    run = LocalRun(tmp_path / "runs", gpus=4, program=program, supervision=supervision)
    try:
        run.submit()
        assert run.wait_for_end().state is AttemptState.FAILED
    finally:
        run.end_all()
    with serving(tmp_path, {}) as served, served.client() as client:

        def find() -> dict[str, Any]:
            answer = client.get("/api/v1/runs/tried/errors")
            return dict(answer.json()) if answer.status_code == 200 else {}

        wait_for(lambda: find().get("first"))
        found = find()
    first, peers = found["entries"][:2]
    assert first["is_first"]
    assert first["text"].endswith("killed by signal 9 (SIGKILL)")
    assert (first["ranks"], first["signal"], first["launch"]) == ("2", "signal 9 (SIGKILL)", 1)
    assert first["hosts"], "the journal names the host"
    assert peers["is_secondary"]
    assert peers["text"].endswith(", after rank 2 was killed")
    # A peer that waits for a peer may be ended before it notices.
    raised = [one for one in found["entries"] if one["is_secondary"]]
    assert 0 < sum(one["ranks_count"] for one in raised) <= 3
    assert "RuntimeError: " in peers["traceback"].rstrip().splitlines()[-1]
    assert [one["kind"] for one in found["entries"][-2:]] == ["launch_ended", "attempt_ended"]
    assert found["unread"] == 0
    assert found["difference"]["worked"] is None
