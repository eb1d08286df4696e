"""Tests that need a GPU. Without one, they are a single skipped test with one reason.

`HOLDFAST_TEST_DEVICE=cpu` runs the tests whose logic needs no GPU on the CPU. That only checks
the tests themselves.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("HOLDFAST_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available()
# Without a GPU these files are not collected, and `test__device.py` reports the reason.
ALONE = ["test_[!_]*.py"]
collect_ignore_glob = [] if HAS_GPU or DEVICE == "cpu" else ALONE


@pytest.fixture
def device() -> torch.device:
    """The first GPU, or the CPU with `HOLDFAST_TEST_DEVICE=cpu`."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU, for tests that cannot run on a CPU."""
    if not HAS_GPU:
        pytest.skip("this test calls the CUDA driver, and there is no GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def two_gpus() -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two GPUs in one node")
    return torch.device("cuda", 0), torch.device("cuda", 1)
