"""Loads torchrun and waits for its arguments.

`python -m holdfast.workers.agent.loaded_start torch.distributed.run <pipe> <file>` imports the
module and waits for a byte from the pipe. Then the file has the arguments and the environment, as
JSON, and the module's `main` runs. If the pipe closes without a byte, nothing runs.

Standard library only, apart from the module.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module

UNUSED_EXIT_CODE = 75


def main(name: str, pipe: str, file: str) -> None:
    """Run `main` of the module `name`. Ends with `UNUSED_EXIT_CODE` if it is not needed."""
    # The imports make many objects and no garbage.
    gc.disable()
    try:
        module = import_module(name)
    finally:
        gc.enable()
    try:
        with open(pipe, "rb", buffering=0) as stream:
            is_wanted = bool(stream.read(1))
    except OSError:
        is_wanted = False
    if not is_wanted:
        sys.exit(UNUSED_EXIT_CODE)
    with open(file, "rb") as content:
        given = json.load(content)
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.argv[:] = [str(module.__file__), *given["arguments"]]
    module.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
