"""How often this process or one of its ancestors was forked since the import, at no cost."""

from __future__ import annotations

import os

# It differs between a process and its forked child, as process ids do, but needs no system call.
count = 0


def _begin_child() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_begin_child)
