"""What only a GPU can show. Without one, all of it is one skipped test with one reason.

`HOLDFAST_TEST_DEVICE=cpu` runs the tests whose logic needs no GPU on the processor, which shows
that they are written right and nothing more.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("HOLDFAST_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available()
# Collected alone where there is no GPU: its one test says so.
ALONE = ["test_[!_]*.py"]
collect_ignore_glob = [] if HAS_GPU or DEVICE == "cpu" else ALONE


@pytest.fixture
def device() -> torch.device:
    """The first GPU; the processor where the tests are only tried out."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU, for what no processor can stand in for."""
    if not HAS_GPU:
        pytest.skip("this test calls the CUDA driver, and there is no GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def two_gpus() -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two GPUs in one node")
    return torch.device("cuda", 0), torch.device("cuda", 1)
