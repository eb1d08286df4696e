"""Fixtures that tests of several folders share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Agents of tests ask no cloud that this machine may be in, unless a test serves one.
os.environ.setdefault("HOLDFAST_NOTICES_URL", "http://127.0.0.1:9")
# At the end, so that no folder of ours can hide an installed package.
sys.path.append(str(Path(__file__).parents[1]))

from tests.postgres import PostgresServer, postgres_server

# The longest files are in the first of these folders, and seconds are all that the last one's take.
ORDER = {"slurm": 0, "process": 1, "unit": 3}

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests last: else a long file would begin when all others are through."""
    items.sort(key=lambda item: ORDER.get(item.path.parent.name, 2))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test session; take a database of your own from it."""
    with postgres_server() as server:
        yield server
