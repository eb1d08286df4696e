"""Processes of a real run are killed, and the page names them within ten seconds."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.process.local_command import Local
from tests.web import testbed

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.attempt import Claim, read_document
from holdfast.workers.nodes.heartbeats import read_heartbeats

# The promise of docs/page.md.
LISTED_MS: Final = 10_000.0
# The usual beat and poll, which are slower than those of other tests.
SUPERVISION: Final = {"standby_after_s": "off"}
HOST: Final = socket.gethostname()

pytestmark = [pytest.mark.more, pytest.mark.timeout(240)]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


def begin(local: Local, gpus: int) -> tuple[RunPaths, int]:
    """A run that trains, and the process of its supervisor."""
    spec = local.write_spec(
        "killed",
        {"steps": 100_000, "sleep_s": 0.1},
        resources={"gpus_per_node": gpus},
        supervision=SUPERVISION,
    )
    told = local.json("submit", str(spec))
    return RunPaths(local.root / "killed"), told["pid"]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def trains(paths: RunPaths, attempt: int) -> list[int]:
    """Wait until the attempt trains; returns the processes of its ranks."""
    ends_at = time.monotonic() + testbed.WAIT_S
    while True:
        ranks = [rank for beat in read_heartbeats(paths.attempt(attempt)) for rank in beat.ranks]
        if ranks and all(rank.step > 0 for rank in ranks):
            return [rank.pid for rank in ranks]
        assert time.monotonic() < ends_at, f"attempt {attempt} does not train"
        time.sleep(testbed.POLL_S)


def agent_of(paths: RunPaths, attempt: int) -> int:
    claim = read_document(Claim, paths.attempt(attempt).claim)
    assert claim is not None
    return claim.pid


def row_of(page: Page) -> Locator:
    return page.get_by_role("region", name="Runs").get_by_role("row").filter(has_text="killed")


def agent_of_attempt(number: int) -> re.Pattern[str]:
    """What the list says of the dead agent of this attempt."""
    return re.compile(f"agent on {re.escape(HOST)} of attempt {number} .*no heartbeats since")


def line_of(page: Page, text: str | re.Pattern[str]) -> Locator:
    """The line with `text` of what needs attention."""
    return page.get_by_role("region", name="Needs attention").locator("li").filter(has_text=text)


def test_a_killed_rank_is_named_with_its_host_and_signal(local: Local, browser: Browser) -> None:
    paths, _ = begin(local, gpus=2)
    with (
        testbed.serving(local.folder / "home") as site,
        testbed.page_of(browser, site) as (page, errors),
    ):
        page.goto("/runs/killed")
        kill(trains(paths, 1)[1])
        attempts = page.get_by_role("region", name="Attempts")
        expect(attempts).to_contain_text(f"rank 1 on {HOST}: killed by signal 9 (SIGKILL)")
        expect(attempts).to_contain_text("restarted in place")
        assert not errors


def test_a_killed_supervisor_and_a_killed_agent_are_listed(local: Local, browser: Browser) -> None:
    paths, supervisor = begin(local, gpus=1)
    with (
        testbed.serving(local.folder / "home") as site,
        testbed.page_of(browser, site) as (page, errors),
    ):
        page.goto("/")
        trains(paths, 1)
        expect(row_of(page)).to_contain_text("running")
        # Nothing is wrong yet.
        expect(page.get_by_role("region", name="Needs attention")).to_have_count(0)

        kill(supervisor)
        gone = line_of(page, f"process {supervisor} on {HOST}, is gone")
        expect(gone).to_contain_text("Relaunch", timeout=LISTED_MS)
        kill(agent_of(paths, 1))
        expect(line_of(page, agent_of_attempt(1))).to_contain_text("Relaunch", timeout=LISTED_MS)
        expect(row_of(page)).to_contain_text("no heartbeats")
        expect(row_of(page)).to_contain_text("no supervisor")
        page.goto("/runs/killed")
        alerts = page.get_by_role("alert")
        expect(alerts.filter(has_text="No supervisor is running")).to_be_visible()
        expect(alerts.filter(has_text=agent_of_attempt(1))).to_be_visible()
        page.goto("/")

        supervisor = local.json("relaunch", "killed", "--gpus", "1")["pid"]
        trains(paths, 2)
        expect(page.get_by_role("region", name="Needs attention")).to_have_count(0)
        kill(agent_of(paths, 2))
        dead = line_of(page, agent_of_attempt(2))
        expect(dead).to_contain_text("supervisor starts the next", timeout=LISTED_MS)
        expect(row_of(page)).to_contain_text("no heartbeats")
        kill(supervisor)
        gone = line_of(page, f"process {supervisor} on {HOST}, is gone")
        expect(gone).to_contain_text("Relaunch", timeout=LISTED_MS)
        assert not errors
