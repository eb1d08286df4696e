"""When a supervisor applies the keep rules."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import deletion
from holdfast.workers.checkpoints.retention import KeepVerdict

pytestmark = pytest.mark.usefixtures("home")


def test_a_commit_during_a_prune_is_considered_by_the_next_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path, "kelp", "u" * 32, {"checkpoint": {"keep": {"last": 2}}})
    folder.submit(1, 2, 1_700_000_000.0)
    names = [folder.commit(step, 1) for step in (10, 20, 30)]
    supervisor = Supervisor(
        paths=folder.paths,
        index=Index(),
        log=logging.getLogger(__name__),
        submit=submit_next,
        is_acting=True,
    )
    real, applied = deletion.apply, []

    def apply(paths: RunPaths, **options: Any) -> list[KeepVerdict]:
        deleted = real(paths, **options)
        applied.append([one.name for one in deleted])
        if len(applied) == 1:
            # As when the last save of a run becomes durable at this moment.
            names.append(folder.commit(35, 1))
        return deleted

    monkeypatch.setattr(deletion, "apply", apply)
    for _ in range(4):
        supervisor._prune(load_history(folder.paths))
    assert [one.name for one in committed_checkpoints(folder.paths)] == names[2:]
    assert applied == [names[:1], names[1:2]], (
        "the keep rules were applied again without a new commit"
    )
