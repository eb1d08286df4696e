"""A real run whose processes a test kills, and where the page names them."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Final

from playwright.sync_api import Locator, Page
from tests.process.local_command import Local
from tests.web import testbed

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Claim, read_document
from holdfast.workers.nodes.heartbeats import read_heartbeats

# The promise of docs/page.md.
LISTED_MS: Final = 10_000.0
# The usual beat and poll, which are slower than those of other tests.
SUPERVISION: Final = {"standby_after_s": "off"}


def begin(local: Local, **resources: Any) -> tuple[RunPaths, int]:
    """A run that trains, and the process of its supervisor."""
    spec = local.write_spec(
        "killed",
        {"steps": 100_000, "sleep_s": 0.1},
        resources=resources,
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


def agent_of_attempt(number: int, host: str) -> re.Pattern[str]:
    """What the list says of the dead agent of this attempt."""
    return re.compile(f"agent on {re.escape(host)} of attempt {number} .*no heartbeats since")


def line_of(page: Page, text: str | re.Pattern[str]) -> Locator:
    """The line with `text` of what needs attention."""
    return page.get_by_role("region", name="Needs attention").locator("li").filter(has_text=text)
