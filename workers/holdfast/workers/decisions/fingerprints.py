"""Whether the failures of several attempts are one failure, by their tracebacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from holdfast.contracts.records.history import AttemptView
from holdfast.workers.decisions.evidence import TRACEBACK, messages

MESSAGE_CHARACTERS_MAX: Final = 200
# Addresses, process ids and sizes differ between two processes that fail in the same way.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FRAME: Final = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")


def fingerprint(traceback: str) -> str:
    """Return the root exception without numbers, and the program's innermost line; '' if unknown.

    Frames in installed packages count only if the traceback has no others.
    """
    if TRACEBACK not in traceback:
        return ""
    found = messages(traceback)
    first_line = found[0].strip().partition("\n")[0] if found else ""
    if not first_line:
        return ""
    root = traceback.split(TRACEBACK)[1]
    frames = _FRAME.findall(root)
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    place = ":".join((own or frames)[-1]) if frames else ""
    return f"{_NUMBER.sub('#', first_line)[:MESSAGE_CHARACTERS_MAX]} at {place}"


def same_failure_elsewhere(
    attempts: Sequence[AttemptView], last: AttemptView
) -> AttemptView | None:
    """Return an attempt that failed as `last` did, after the same step, on another host.

    A failure before an attempt's first step does not count: storage or a network that is away
    fails every attempt there.
    """
    print_of_last = fingerprint(last.traceback or "")
    if not print_of_last or not _has_trained(last) or not failed_host(last):
        return None
    for attempt in attempts:
        if (
            attempt.number < last.number
            and _has_trained(attempt)
            and attempt.last_step == last.last_step
            and failed_host(attempt) not in {None, failed_host(last)}
            and fingerprint(attempt.traceback or "") == print_of_last
        ):
            return attempt
    return None


def failed_host(attempt: AttemptView) -> str | None:
    """Return the host of the rank that failed first, if it is known."""
    named = attempt.outcome.failed_host if attempt.outcome else None
    return named or attempt.facts.get("failed_host")


def _has_trained(attempt: AttemptView) -> bool:
    first, last = attempt.first_step, attempt.last_step
    return last is not None and last >= (first or 1)
