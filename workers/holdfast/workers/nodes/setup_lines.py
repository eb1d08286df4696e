"""Shell lines of a spec that run before the program: bash that ends at the first line that fails.

A line fails as it would under `set -e`: one of its commands ends with a status other than
0, outside a condition and a list of `||` and `&&`. `set -e` itself would also apply inside files
that a line reads and functions that it calls. Those of sites and environments are not written for
it. Lines after `set +e` may fail.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

MARK: Final = "holdfast: "
# What the script prints when it ends early, and what `problem_in` finds.
_FAILED: Final = re.compile(rf"^{MARK}(launch\.setup .+)$")
_IGNORES: Final = re.compile(r"^(\s*set \+e)\s*$", re.MULTILINE)
# `$?` of an exit by a signal is 0, and then nothing is printed.
_BEFORE: Final = """\
holdfast_lines=({lines})
trap 'holdfast_status=$?
if [ "$holdfast_status" -ne 0 ]; then
echo "{mark}{key} ended the shell with exit status $holdfast_status, at or after: $BASH_COMMAND" >&2
fi' EXIT
trap 'holdfast_status=$? holdfast_line=$((LINENO - holdfast_base))
if [ "${{#BASH_SOURCE[@]}}" -eq "$holdfast_depth" ]; then
trap - ERR EXIT
echo "{mark}{key} line $holdfast_line failed with exit status $holdfast_status: \
${{holdfast_lines[holdfast_line - 1]}} -- correct it, or append || true if it may fail" >&2
exit "$holdfast_status"
fi' ERR
holdfast_depth=${{#BASH_SOURCE[@]}} holdfast_base=$LINENO"""
_AFTER: Final = """\
trap - ERR EXIT
unset -v holdfast_lines holdfast_status holdfast_line holdfast_depth holdfast_base"""


def checked_lines(key: str, lines: Sequence[str]) -> list[str]:
    """Return bash lines that run `lines` and exit at the first that fails; `key` is their key."""
    if not lines:
        return []
    text = "\n".join(lines)
    quoted = " ".join(shlex.quote(line) for line in text.split("\n"))
    before = _BEFORE.format(lines=quoted, mark=MARK, key=key)
    # A line after `set +e` may fail, so the trap ends there.
    return [before, _IGNORES.sub(r"\1; trap - ERR", text), _AFTER]


def after_setup(key: str, lines: Sequence[str]) -> list[str]:
    """Return the words that run shell lines and then the command after these words."""
    script = "\n".join([*checked_lines(key, lines), 'exec "$@"'])
    return ["bash", "-c", script, "bash"] if lines else []


def problem_in(job_log: str) -> list[str]:
    """Return which line of `launch.setup` ended a job, and the line of the log before; or []."""
    before = ""
    for line in job_log.splitlines():
        if found := _FAILED.match(line):
            return [found[1], *([before] if before else [])]
        before = line.strip() or before
    return []
