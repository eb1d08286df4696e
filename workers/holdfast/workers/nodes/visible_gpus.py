"""The GPUs of this machine that a local job may use, from `CUDA_VISIBLE_DEVICES`.

The launcher of a local job imports this module, so it needs no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CONTROL: Final = Path("/dev/nvidiactl")
VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
# An index, or the UUID of a GPU or of a MIG instance, which may be abbreviated.
_DEVICE: Final = re.compile(r"[0-9]+|GPU-[0-9A-Fa-f-]+|MIG-[0-9A-Za-z/-]+")


def visible_gpus(environment: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the names of the GPUs that `environment` makes visible; None if it does not say.

    CUDA reads the list up to the first name that is not a device, such as `-1`.
    """
    given = environment.get(VARIABLE)
    if not isinstance(given, str):
        return None
    names: list[str] = []
    for part in given.split(","):
        if not _DEVICE.fullmatch(part.strip()):
            break
        names.append(part.strip())
    return tuple(names)


def problem_with_gpus(environment: Mapping[str, object], count: int) -> str:
    """Return why a job cannot have `count` GPUs of this machine; empty if it can.

    Without any visible GPU the ranks run on the CPU, as on a machine that has none.
    """
    visible = visible_gpus(environment)
    if not visible or len(visible) >= count or not CONTROL.exists():
        return ""
    return (
        f"{VARIABLE}={environment[VARIABLE]} makes {len(visible)} of this machine's GPUs visible, "
        f"and the attempt needs {count}; name {count} GPUs in it, or set "
        "resources.gpus_per_node to the number that is visible"
    )
