"""Starts the program of a rank.

torchrun starts `python -u -m holdfast.trainer.rank_start <program …>`. The program runs as under
Python itself, with the same `argv`, import path, `__main__` and traceback, but it survives the
signals that end a job, see `child_signals`. In a warm standby, it waits for its start.

Standard library only: it is started once per rank and should cost little.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType

from holdfast.contracts import environment
from holdfast.trainer.process import child_signals, standby


def main(command: Sequence[str]) -> None:
    """Run the program `command`: `script …` or `-m module …`."""
    child_signals.survive()
    set_up_interpreter(command)
    standby_pipe = os.environ.pop(environment.STANDBY_PIPE, None)
    if standby_pipe is not None:
        standby.wait(standby_pipe)
    given_place = os.environ.pop(environment.PLACE, None)
    if given_place is not None:
        standby.take_place(given_place)
    run_program(command)


def set_up_interpreter(command: Sequence[str]) -> None:
    """Set `sys.argv` and the import path as Python's command line would, before any import."""
    is_module = command[0] == "-m"
    sys.argv[:] = command[1:] if is_module else command
    sys.orig_argv[:] = [sys.orig_argv[0], "-u", *command]
    if not sys.flags.safe_path:
        script = os.path.realpath(command[0])
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(script)


def run_program(command: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, as `__main__` in a new module."""
    if command == ["-m"]:
        sys.stderr.write("error: -m: expected the name of a module after it\n")
        sys.exit(2)
    spec = _spec_of(command[1]) if command[0] == "-m" else None
    loader = spec.loader if spec else None
    if spec is not None and isinstance(loader, SourceFileLoader):
        sys.argv[0] = loader.path
    elif command[0] != "-m" and os.path.isfile(command[0]):
        loader = SourceFileLoader("__main__", os.path.abspath(command[0]))
    elif command[0] != "-m" and not os.path.exists(command[0]):
        path = os.path.abspath(command[0])
        why = os.strerror(errno.ENOENT)
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno 2] {why}\n")
        sys.exit(2)
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
    try:
        code = loader.source_to_code(loader.get_data(loader.path), loader.path)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)
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


if __name__ == "__main__":
    main(sys.argv[1:])
