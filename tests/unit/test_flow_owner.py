"""Supervisors and the owners of runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.errors import SpecError
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.root
def test_no_supervisor_runs_the_command_of_another_user(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "kelp", "u" * 32)
    before = sorted(folder.paths.directory.rglob("*"))
    os.chown(folder.paths.directory, 54_321, -1)
    supervisor = Supervisor(
        paths=folder.paths, index=Index(), log=logging.getLogger(__name__), submit=submit_next
    )
    with pytest.raises(SpecError, match="belongs to another user"):
        supervisor.run()
    assert sorted(folder.paths.directory.rglob("*")) == before
