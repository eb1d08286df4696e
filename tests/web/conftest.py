"""One server over one root full of runs, and one browser, for all tests of a file."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from tests.web import stand
from tests.web.scene import lay_out, supervised


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stand.Site]:
    """A server with the runs of `scene`, the newest of them live."""
    home = tmp_path_factory.mktemp("page")
    lay_out(home / "runs", time.time())
    with supervised(home / "runs"), stand.serving(home) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with stand.chromium() as started:
        yield started
