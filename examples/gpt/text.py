"""Training text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch


class Text:
    """The library's sources as one byte array, cut into windows of `context` bytes."""

    def __init__(self, context: int, bytes_max: int) -> None:
        """Read files in order of name until there are `bytes_max` bytes."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        parts: list[bytes] = []
        size = 0
        for path in sorted(folder.glob("*.py")):
            if size >= bytes_max:
                break
            parts.append(path.read_bytes())
            size += len(parts[-1])
        self.context = context
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(b"".join(parts)[:bytes_max], np.uint8)

    def __len__(self) -> int:
        """Return the number of windows that have a next byte for each of their bytes."""
        return (len(self.bytes) - 1) // self.context

    def windows(self, ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of the windows `ids`, each (len(ids), context), int64."""
        places = ids[:, None] * self.context + np.arange(self.context + 1)
        taken = torch.from_numpy(self.bytes[places].astype(np.int64))
        return taken[:, :-1], taken[:, 1:]
