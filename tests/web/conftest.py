"""Fixtures: one server with sample runs and one browser, shared by all tests of a file."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from tests.web import testbed
from tests.web.sample_runs import supervised, write_sample_runs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[testbed.Site]:
    """A server with the runs of `sample_runs`, the newest of them live."""
    home = tmp_path_factory.mktemp("page")
    write_sample_runs(home / "runs", time.time())
    with supervised(home / "runs"), testbed.serving(home) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with testbed.chromium() as started:
        yield started
