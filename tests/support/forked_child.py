"""Child processes that only call a function, for ranks that are forked to save their imports."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def start_child(body: Callable[[], object]) -> int:
    """Fork a child that calls `body` and ends; return its process id.

    The status is 0, that of a `SystemExit`, or 1 after another exception, which the child prints.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        # The child ends here in any case.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
