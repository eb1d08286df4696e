"""A warm standby rank: it loads Python and the libraries and waits for the signal to start.

torchrun starts it in the environment of the next launch. Loading torch takes seconds, which a
restart then saves. The standby uses no GPU before that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Final

# The place of a rank whose torchrun runs on one node of several, without the others. Such a
# torchrun can be started before it is known which place its node will have. Its ranks read where
# they meet when the launch begins.

# torchrun sets it for ranks whose store it has itself. Rank 0 has that of such a launch.
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


def take_place(path: str) -> None:
    """Set the variables of this rank from the file at `path`, which the agent has written."""
    with open(path, "rb") as stream:
        given: dict[str, str] = json.load(stream)
    first = int(given.pop("first_rank"))
    rank = str(first + int(os.environ["LOCAL_RANK"]))
    os.environ.update({**given, "RANK": rank, "ROLE_RANK": rank, AGENT_STORE: "False"})


# The modules that a program with a session has loaded before its first step.
PRELOADED: Final = ("torch", "torch.distributed", "holdfast.trainer.session.session")
# Variables that these libraries read when they are loaded.
READ_WHEN_LOADED: Final = (
    *("ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLOO_", "GOMP_", "HIP_", "KMP_"),
    *("LD_", "MALLOC_", "MKL_", "NCCL_", "NPY_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH", "TRITON_", "VECLIB_"),
)
# Variables that the libraries set while they are loaded, or that the agent gives after that.
SET_WHEN_LOADED: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR", AGENT_STORE})
UNUSED_EXIT_CODE: Final = 75


def wait(standby_pipe: str) -> None:
    """Load the libraries and wait. End this process if the agent does not need it."""
    # All imports come before the byte. They are the seconds that a restart saves, see decision 19.
    for name in PRELOADED:
        import_module(name)
    # One byte for each rank. When the agent ends, the pipe closes and the read returns nothing, so
    # no standby outlives its agent.
    if not wait_for_release(standby_pipe):
        sys.exit(UNUSED_EXIT_CODE)


def wait_for_release(standby_pipe: str) -> bool:
    """Return True when the agent starts this rank, or False if the agent has ended."""
    try:
        with open(standby_pipe, "rb", buffering=0) as stream:
            return bool(stream.read(1))
    except OSError:
        return False


def changed_variables(
    now: Mapping[str, str] | None = None, initial: Mapping[str, str] | None = None
) -> list[str]:
    """Return the changed environment variables that libraries read when they are loaded.

    If there are any, libraries cannot be loaded ahead. The default arguments mean this process.
    """
    now = os.environ if now is None else now
    initial = initial_environment() if initial is None else initial
    names = {*now, *initial} - SET_WHEN_LOADED
    changed = {name for name in names if now.get(name) != initial.get(name)}
    return sorted(name for name in changed if name.startswith(READ_WHEN_LOADED))


def initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with."""
    try:
        with open("/proc/self/environ", "rb") as stream:
            # `os.environ` has what Python code set meanwhile. The kernel's copy does not change.
            pairs = [entry.partition(b"=") for entry in stream.read().split(b"\0") if entry]
    except OSError:
        return dict(os.environ)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
