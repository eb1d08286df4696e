"""The program's own command line, in the form that the agent and the CLI also use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.digests import command_digest

OPTIONS_WITH_VALUE: Final = frozenset({"--check-hash-based-pycs"})


def program_argv(original: Sequence[str] | None = None) -> list[str]:
    """Return `["train.py", …]` or `["-m", "module", …]`, without Python and Python's own flags."""
    rest = list(sys.orig_argv if original is None else original)[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag.startswith("--"):
            del rest[: 1 if flag in OPTIONS_WITH_VALUE else 0]
            continue
        # Short flags can be combined. The first flag that takes a value ends the cluster.
        at = next((i for i, letter in enumerate(flag) if i and letter in "mcWX"), None)
        if at is None:
            continue
        value = flag[at + 1 :] or (rest.pop(0) if rest else "")
        if flag[at] in "mc":
            return [f"-{flag[at]}", value, *rest]
    return rest


def program_digest() -> str:
    """Return the digest of this program's command line and working directory."""
    return command_digest(program_argv(), os.getcwd())


def program_stem() -> str:
    """Return a run name from the program's script or module, safe as a folder name."""
    argv = program_argv()
    if not argv or argv[0] == "-c":
        return "run"
    stem = argv[1].rpartition(".")[2] if argv[0] == "-m" else Path(argv[0]).stem
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem).strip("-_") or "run"
