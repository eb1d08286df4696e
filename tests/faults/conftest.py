"""Fixtures of the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.shim import build


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim."""
    return build(tmp_path_factory.mktemp("shim"))
