"""A warm standby rank: it loads Python and the libraries and waits for the signal to start.

torchrun starts `python -u -m holdfast.trainer.standby <program …>` in the environment of the next
launch. Loading torch takes seconds, which a restart then saves. On the signal, the program runs as
under Python itself, with the same `argv`, import path, `__main__` and traceback. The standby uses
no GPU before that.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Final

from holdfast.contracts import environment

# The modules that a program with a session has loaded before its first step.
PRELOADED: Final = ("torch", "torch.distributed", "holdfast.trainer.session")
# Variables that these libraries read when they are loaded.
READ_WHEN_LOADED: Final = (
    *("ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLOO_", "GOMP_", "HIP_", "KMP_"),
    *("LD_", "MALLOC_", "MKL_", "NCCL_", "NPY_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH", "TRITON_", "VECLIB_"),
)
# Variables that the libraries set while they are loaded.
SET_WHEN_LOADED: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
UNUSED_EXIT_CODE: Final = 75


def main(command: Sequence[str]) -> None:
    """Load the libraries, wait, and run the program `command`: `script …` or `-m module …`."""
    standby_pipe = os.environ.pop(environment.STANDBY_PIPE)
    set_up_interpreter(command)
    for name in PRELOADED:
        import_module(name)
    if not wait_for_release(standby_pipe):
        sys.exit(UNUSED_EXIT_CODE)
    run_program(command)


def set_up_interpreter(command: Sequence[str]) -> None:
    """Set `sys.argv` and the import path as Python's command line would, before any import."""
    is_module = command[0] == "-m"
    sys.argv[:] = command[1:] if is_module else command
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *command]
    if not sys.flags.safe_path:
        script = os.path.realpath(command[0])
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(script)


def wait_for_release(standby_pipe: str) -> bool:
    """Return True when the agent starts this rank, or False if the agent has ended."""
    try:
        with open(standby_pipe, "rb", buffering=0) as stream:
            return bool(stream.read(1))
    except OSError:
        return False


def run_program(command: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, as `__main__` in a new module."""
    spec = _spec_of(command[1]) if command[0] == "-m" else None
    loader = spec.loader if spec else None
    if spec is not None and isinstance(loader, SourceFileLoader):
        sys.argv[0] = loader.path
    elif command[0] != "-m" and os.path.isfile(command[0]):
        loader = SourceFileLoader("__main__", os.path.abspath(command[0]))
    else:
        # An archive, a folder with a `__main__.py`, or a missing module.
        run = runpy.run_path if command[0] != "-m" else partial(runpy.run_module, alter_sys=True)
        run(command[command[0] == "-m"], run_name="__main__")
        return
    module = ModuleType("__main__")
    vars(module).update(
        __file__=loader.path,
        __cached__=spec.cached if spec else None,
        __builtins__=builtins,
        __annotations__={},
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent if spec else None,
    )
    sys.modules["__main__"] = module
    code = loader.source_to_code(loader.get_data(loader.path), loader.path)
    try:
        exec(code, vars(module))
    except Exception as error:
        # Begin the traceback at the program's own first frame.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or of a package's `__main__`. None if there is none."""
    with contextlib.suppress(ImportError):
        spec = find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return find_spec(f"{name}.__main__") if is_package else spec
    return None


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
            pairs = [entry.partition(b"=") for entry in stream.read().split(b"\0") if entry]
    except OSError:
        return dict(os.environ)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


if __name__ == "__main__":
    main(sys.argv[1:])
