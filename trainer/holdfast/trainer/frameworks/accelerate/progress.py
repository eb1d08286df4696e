"""What a checkpoint keeps of Accelerate's own state, beside the place in the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.trainer.frameworks.program_loop.progress import Progress


class AccelerateProgress(Progress):
    """It is the object `accelerate` of the session's extras."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.device, prepare="accelerator.prepare")
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        return {
            "accumulation": int(self._accelerator.step),
            "saves": int(self._accelerator.project_configuration.iteration),
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters, and the places of the loaders."""
        self._accelerator.step = state["accumulation"]
        self._accelerator.project_configuration.iteration = state["saves"]
        super().load_state_dict(state)
