"""Programs that must fail, each in a forked process, so that each has a process of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def error_of(program: Callable[[], None]) -> str:
    """Run a program in a fork, and return the type and text of its error."""
    reader, writer = os.pipe()
    if not os.fork():
        text = "no error"
        try:
            program()
        # Whatever ends the program is the answer, also SystemExit.
        except BaseException as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    os.wait()
    return text
