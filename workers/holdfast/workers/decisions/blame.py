"""Decide whether a checkpoint is to blame for crashes of the launches that resumed from it.

Pure functions of journal lines. If three launches from the newest checkpoint crash in the same way,
or end alike while they load it, the run goes back to the one before it. See decision 103.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName, checkpoint_id
from holdfast.contracts.redaction import redact_text
from holdfast.contracts.states import Cause
from holdfast.workers.decisions.causes import Ending, RankFailure
from holdfast.workers.decisions.evidence import KILLED_WORKER, fingerprint, names_hardware

CRASHES_MIN: Final = 3
# An attempt and a launch.
_Place = tuple[int, int]
# All other causes come from the machine, or have their own policy.
_OF_PROGRAMS: Final = frozenset({Cause.USER_ERROR, Cause.UNKNOWN})
# These come from the surroundings of a process, such as a missing mount, not from its state.
_OF_SURROUNDINGS: Final = re.compile(
    r"(\w+\.)*(OS|IO|FileNotFound|FileExists|IsADirectory|NotADirectory|Permission|Import"
    r"|ModuleNotFound)Error\b"
)
# During a load, these come from the storage or from a program that has changed. The same command
# would not fit an older checkpoint either.
_OF_LOADS: Final = re.compile(
    r"^holdfast\.|state_dict|size mismatch|(?i:\b(missing|unexpected) keys?\b|input/output error"
    r"|stale file handle|timed? ?out|\b(storage|mount|bucket|s3|nfs|lustre)\b)"
)
HUNG_IN_LOAD: Final = "hung while it loaded the checkpoint"
# A process gets these from its own instructions. SIGBUS may mean that a file system is full.
_OF_PROCESS: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})


def crash_facts(ending: Ending, first: RankFailure | None, last_step: int | None) -> dict[str, Any]:
    """Return the cause of a launch's crash, and `crash`: in which way it crashed, if known.

    Two crashes with the same `crash` have the same root exception and line of the program. Without
    a traceback, they have the same signal and the same last step, `last_step`, which is None while
    a checkpoint is loaded.
    """
    facts: dict[str, Any] = {"cause": str(ending.cause)} if ending.cause else {}
    if first is None or ending.cause not in _OF_PROGRAMS or names_hardware(ending.evidence):
        return facts
    if first.signal:
        is_own = first.signal in _OF_PROCESS
        when = "while it loaded" if last_step is None else f"after step {last_step}"
        way = f"{signal.Signals(first.signal).name} {when}" if is_own else ""
    else:
        way = _way_of(first.text)
        if last_step is None and _OF_LOADS.search(way):
            way = ""
    return {**facts, "crash": way} if way else facts


def _way_of(text: str) -> str:
    """Return the fingerprint of an error that the loaded state may have caused, or ''."""
    way = fingerprint(text)
    # The loaded state kills no helper process.
    is_foreign = _OF_SURROUNDINGS.match(way) or KILLED_WORKER.search(text)
    return "" if is_foreign else redact_text(way)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """A checkpoint that is to blame for `crash`, and the one to resume from instead.

    `launches` are those that crashed: attempts and launches. With `in_load`, they had not resumed.
    """

    checkpoint: CheckpointName
    to: CheckpointName
    crash: str
    launches: tuple[tuple[int, int], ...]
    in_load: bool = False

    @property
    def reason(self) -> str:
        """The reason as a sentence for people."""
        which = ", ".join(f"{attempt}.{launch}" for attempt, launch in self.launches)
        how = (
            "ended in the same way while they loaded it"
            if self.in_load
            else "crashed in the same way after they had resumed from it"
        )
        return (
            f"{self.checkpoint} is blamed: launches {which} {how}, and committed nothing "
            f"({self.crash}); the next launch resumes from {self.to}"
        )


def find_blame(
    events: Iterable[Event],
    run: str,
    branch: Sequence[CheckpointName],
    *,
    attempt: int,
    launch: int,
) -> Blame | None:
    """Return which checkpoint is to blame for the crash of a launch, or None.

    `branch` are the committed checkpoints from which `run` can resume, newest first. Only the
    newest can be to blame, and only if there is another one. After that, none is blamed until a
    later step is committed, because the same crash from two checkpoints is a fault of the program.
    """
    if len(branch) < 2:
        return None
    newest, lines = branch[0], list(events)
    if any(newest.step <= name.step for name in _blamed(lines)):
        return None
    crashes, loading, resumed = dict[_Place, str](), dict[_Place, bool](), dict[_Place, bool]()
    for event in lines:
        place = _place(event.data)
        if event.kind is EventKind.LAUNCH_ENDED and event.data.get("crash"):
            crashes[place] = str(event.data["crash"])
        elif event.kind is EventKind.LOADING:
            loading[place] = _is_from(event.data, run, newest)
        elif event.kind is EventKind.RESUMED:
            resumed[place] = _is_from(event.data, run, newest)
    in_load = (attempt, launch) not in resumed
    # A load that failed has no line `resumed`.
    began = {place: own for place, own in loading.items() if place not in resumed}
    places = _alike(crashes, began if in_load else resumed, (attempt, launch))
    if len(places) < CRASHES_MIN:
        return None
    crash = crashes[places[0]]
    if in_load and any(crashes.get(place) == crash for place, own in began.items() if not own):
        # The load of another checkpoint ended like that too, so the storage is at fault.
        return None
    launches = tuple(places)
    return Blame(checkpoint=newest, to=branch[1], crash=crash, launches=launches, in_load=in_load)


def _alike(
    crashes: Mapping[_Place, str], begun: Mapping[_Place, bool], last: _Place
) -> list[_Place]:
    """Return the launches from the checkpoint that crashed as `last` did, which is one of them.

    `begun` tells of launches whether they began from the checkpoint.
    """
    if last not in crashes or not begun.get(last):
        return []
    own = [place for place, is_own in begun.items() if is_own]
    return sorted(place for place in own if crashes.get(place) == crashes[last])


def _place(facts: dict[str, Any]) -> _Place:
    """Return the attempt and the launch of a line; 0 where it names none."""
    attempt, launch = facts.get("attempt"), facts.get("launch")
    return (
        attempt if isinstance(attempt, int) else 0,
        launch if isinstance(launch, int) else 0,
    )


def _is_from(resumed: dict[str, Any], run: str, name: CheckpointName) -> bool:
    """Return True if a launch resumed from a checkpoint that Holdfast had chosen."""
    # With DCP alone, the program chooses, so going back would change nothing.
    chosen = resumed.get("counts_steps", True)
    return bool(chosen) and resumed.get("checkpoint") == checkpoint_id(run, str(name))


def _blamed(events: Iterable[Event]) -> list[CheckpointName]:
    names = [name for line in blames(events) for name in line.get("excluded") or ()]
    return [name for name in map(CheckpointName.parse, names) if name is not None]


def blames(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the facts of the lines that blame a checkpoint, oldest first."""
    return [e.data for e in events if e.kind is EventKind.ROLLED_BACK and e.data.get("crash")]


def forgiven_until(events: Iterable[Event]) -> int:
    """Return the last attempt whose crashes a blame explains; 0 without one.

    If the attempt had another launch after the blame, its end does not count as explained.
    """
    found, lines = 0, list(events)
    started = [_place(e.data) for e in lines if e.kind is EventKind.LAUNCH_STARTED]
    for attempt, launch in map(_place, blames(lines)):
        had_another = any(place[0] == attempt and place[1] > launch for place in started)
        found = max(found, attempt - had_another)
    return found
