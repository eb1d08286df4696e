"""Opening an entry that `torch.save` made, when a stranger may have made it: no code, no bombs."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from holdfast.contracts.errors import DamagedCheckpointError


def load_plain(content: bytes) -> Any:
    """The value in `content`: a tensor, number or plain collection, on the CPU.

    Raises `DamagedCheckpointError` when it is no zip of `torch.save`, when it would take more
    memory than its own bytes, as no such zip does, and when it holds anything with code.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as found:
            inflated = sum(record.file_size for record in found.infolist())
        if inflated > len(content):
            raise ValueError(f"{len(content)} bytes that inflate to {inflated}")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # Hostile bytes can raise anything at all; whatever it was, it is no value of ours.
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedCheckpointError(
            f"an entry cannot be opened as a plain value: {words}; load another checkpoint",
            damaged=[f"an entry: {words}"],
        ) from error
