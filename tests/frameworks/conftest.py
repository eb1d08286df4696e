"""Fixtures of the tests of `holdfast.trainer.dcp`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from holdfast.trainer.dcp import channel


@pytest.fixture(scope="module")
def end_flusher() -> Iterator[None]:
    yield
    channel._close_all()


@pytest.fixture
def ignore_stock_hints() -> Iterator[None]:
    """Stock DCP warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
