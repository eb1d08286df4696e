"""The agent of a real Slurm job is killed, and the page names it within ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect
from slurm_cluster import SlurmCluster
from tests.process.local_command import Local
from tests.web import testbed
from tests.web.killed import (
    LISTED_MS,
    agent_of,
    agent_of_attempt,
    begin,
    kill,
    line_of,
    row_of,
    trains,
)

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.documents import Claim, read_document

POLLED_MS: Final = 25_000.0
ON_SLURM = {"executor": "slurm", "gpus_per_node": 1, "partition": "spot"}

pytestmark = [pytest.mark.more, pytest.mark.timeout(240)]


@pytest.fixture
def local(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


@pytest.fixture
def browser() -> Iterator[Browser]:
    with testbed.chromium() as started:
        yield started


def host_of(attempt: AttemptPaths) -> str:
    claim = read_document(Claim, attempt.claim)
    assert claim is not None
    return claim.host


def test_a_killed_agent_of_a_slurm_job_is_listed(local: Local, browser: Browser) -> None:
    paths, supervisor = begin(local, **ON_SLURM)
    with (
        testbed.serving(local.folder / "home") as site,
        testbed.page_of(browser, site) as (page, errors),
    ):
        page.goto("/")
        trains(paths, 1)
        expect(row_of(page)).to_contain_text("running")
        expect(page.get_by_role("region", name="Needs attention")).to_have_count(0)

        # Without a supervisor, nobody but the server notices that the job ended.
        kill(supervisor)
        gone = line_of(page, f"process {supervisor} on ")
        expect(gone).to_contain_text("Relaunch", timeout=LISTED_MS)
        kill(agent_of(paths, 1))
        dead = line_of(page, agent_of_attempt(1, host_of(paths.attempt(1))))
        expect(dead).to_contain_text("Relaunch", timeout=LISTED_MS)
        expect(row_of(page)).to_contain_text("no heartbeats")
        expect(row_of(page)).to_contain_text("no supervisor")

        supervisor = local.json("relaunch", "killed", "--gpus", "1")["pid"]
        trains(paths, 2)
        expect(page.get_by_role("region", name="Needs attention")).to_have_count(0)
        kill(agent_of(paths, 2))
        dead = line_of(page, agent_of_attempt(2, host_of(paths.attempt(2))))
        expect(dead).to_be_visible(timeout=LISTED_MS)
        # The server sees the heartbeats end, and the supervisor asks Slurm every 15 s.
        expect(dead).to_contain_text("supervisor starts the next", timeout=POLLED_MS)
        assert not errors
