"""The web page's own checks, run by npm: tests and ESLint. And its list of event kinds."""

from __future__ import annotations

import re
import subprocess
from typing import Final

import pytest
from tests.web.testbed import CHECKOUT

from holdfast.contracts.disk.journal import EventKind

LIMIT_S: Final = 300


def test_events_can_be_filtered_by_every_kind() -> None:
    source = (CHECKOUT / "web" / "src" / "events.ts").read_text()
    kinds = re.search(r"KINDS = \[(.*?)\]", source, re.DOTALL)
    assert kinds
    assert re.findall(r'"(\w+)"', kinds[1]) == [str(kind) for kind in EventKind]


@pytest.mark.more
@pytest.mark.parametrize("script", ["test", "lint"])
def test_web_checks_pass(script: str) -> None:
    web = CHECKOUT / "web"
    assert (web / "node_modules").is_dir(), f"{web}: no node_modules; `make page` brings them"
    done = subprocess.run(
        ["npm", "run", "--silent", script],
        cwd=web,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
