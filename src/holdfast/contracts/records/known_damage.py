"""What the journals record about damaged checkpoints, from `holdfast verify` and from resumes.

A later verification that finds no damage, or a resume that loads the checkpoint, clears it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.contracts.disk.damage import word_for
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName, RunPaths, checkpoint_id, has_spec
from holdfast.contracts.errors import DamagedCheckpointError, HoldfastError
from holdfast.contracts.records.history_cache import load_tallied

# The kinds of the lines that record damage or its absence.
# The newest line about a checkpoint counts: it may have been damaged or restored since, see
# decision 91.
DAMAGE_EVENTS: Final = (EventKind.RESUMED, EventKind.VERIFIED)
DAMAGED: Final = "damaged"
# What resumes write about checkpoints that they passed over for another reason than damage.
_NOT_DAMAGE: Final = (
    ": excluded by a rollback",
    ": never committed",
    ": unreadable: ",
    ": its manifest cannot be read",
    ": written by the program itself",
)
_NAME_INSIDE: Final = re.compile(r"step-\d{8,}\.a\d{4,}\.l\d{2,}")


def damaged_checkpoints(events: Iterable[Event]) -> dict[str, str]:
    """Return the damage of each checkpoint that was last found damaged, by directory name.

    A checkpoint that storage could not read is not in it: that says nothing about its bytes.
    """
    found: dict[str, str] = {}
    for event in events:
        name = str(event.data.get("checkpoint") or "").rpartition(":")[2]
        if event.kind is EventKind.RESUMED:
            found.update(passed_over(event))
            found.pop(name, None)
        elif event.kind is EventKind.VERIFIED and event.data.get("ok") is True:
            found.pop(name, None)
        elif event.kind is EventKind.VERIFIED and event.data.get("ok") is False:
            lines = [str(line) for line in event.data.get("damaged") or ()]
            # Storage that could not be read says nothing about the bytes, see decision 91.
            if word_for(lines) == DAMAGED:
                found[name] = f"verify found damage: {lines[0]}" if lines else "verify found damage"
    return found


def passed_over(resumed: Event) -> Iterator[tuple[str, str]]:
    """Yield the directory name of each checkpoint that a resume found damaged, with its line."""
    for line in map(str, resumed.data.get("skipped") or ()):
        match = _NAME_INSIDE.search(line)
        if match and not any(other in line for other in _NOT_DAMAGE):
            yield match[0], line


def refuse_damaged(paths: RunPaths, name: str, purpose: str) -> None:
    """Raise `DamagedCheckpointError` for a checkpoint of a run that is known to be damaged.

    `purpose` completes "to …", such as `export it`. A directory outside a run is not known.
    """
    if CheckpointName.parse(name) is None or not has_spec(paths.directory):
        return
    damage = None
    # The damage of a run whose records cannot be read is not known. Whatever reads it, verifies.
    with contextlib.suppress(HoldfastError, OSError):
        damage = damaged_checkpoints(load_tallied(paths).events).get(name)
    if damage is not None:
        identity = checkpoint_id(paths.name, name)
        raise DamagedCheckpointError(
            f"{identity}: {damage}; to {purpose}, choose another checkpoint, or restore its files "
            f"and run `holdfast verify {identity}`",
            damaged=[damage],
        )
