"""Processes of a real run are killed, and the page names them within ten seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect
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

HOST: Final = socket.gethostname()

pytestmark = [pytest.mark.more, pytest.mark.timeout(240)]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


def test_a_killed_rank_is_named_with_its_host_and_signal(local: Local, browser: Browser) -> None:
    paths, _ = begin(local, gpus_per_node=2)
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
    paths, supervisor = begin(local, gpus_per_node=1)
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
        expect(line_of(page, agent_of_attempt(1, HOST))).to_contain_text(
            "Relaunch", timeout=LISTED_MS
        )
        expect(row_of(page)).to_contain_text("no heartbeats")
        expect(row_of(page)).to_contain_text("no supervisor")
        page.goto("/runs/killed")
        alerts = page.get_by_role("alert")
        expect(alerts.filter(has_text="No supervisor is running")).to_be_visible()
        expect(alerts.filter(has_text=agent_of_attempt(1, HOST))).to_be_visible()
        page.goto("/")

        supervisor = local.json("relaunch", "killed", "--gpus", "1")["pid"]
        trains(paths, 2)
        expect(page.get_by_role("region", name="Needs attention")).to_have_count(0)
        kill(agent_of(paths, 2))
        dead = line_of(page, agent_of_attempt(2, HOST))
        expect(dead).to_contain_text("supervisor starts the next", timeout=LISTED_MS)
        expect(row_of(page)).to_contain_text("no heartbeats")
        kill(supervisor)
        gone = line_of(page, f"process {supervisor} on {HOST}, is gone")
        expect(gone).to_contain_text("Relaunch", timeout=LISTED_MS)
        assert not errors
