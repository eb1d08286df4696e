"""Whether this folder's tests can run here."""

from __future__ import annotations

import pytest
import torch


def test_gpu_is_available() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"no GPU that torch {torch.__version__} can use: nothing of tests/gpu was run")
    assert torch.cuda.get_device_name(0)
