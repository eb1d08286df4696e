"""The situations of all tests here, each made once per process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interleavings.situations import Situations

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def situations() -> Iterator[Situations]:
    """Situations in a folder in memory, if there is one: a schedule makes hundreds of files."""
    place = str(MEMORY) if os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-interleavings-", dir=place))
    yield Situations(folder)
    shutil.rmtree(folder, ignore_errors=True)
