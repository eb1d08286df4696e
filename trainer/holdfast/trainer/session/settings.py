"""The values that the run spec, the environment and the program can each give, and which counts.

What is written in the spec counts before the environment, then the program's own argument, and then
the default. Under an agent, the variables have only what somebody wrote. Rank 0 logs the values
with their sources, and warns if one that the program gives loses.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from holdfast.contracts import environment
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.errors import SpecError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.spec import written
from holdfast.contracts.spec.checkpoint import doubling_steps
from holdfast.trainer.pacing.cadence import Interval
from holdfast.trainer.slots.modes import DIRECTORY_KEY, IN_MEMORY, MEMORY, Staging
from holdfast.trainer.staging.snapshots import SnapshotRhythm

T = TypeVar("T")

AUTO: Final = "auto"
OFF: Final = "off"
DIGITS_MAX: Final = 20


@dataclass(frozen=True)
class Argument:
    """A value from a framework's own configuration, whose name is the `source`.

    With `is_default`, it is the framework's default, which nobody wrote.
    """

    value: int | str
    source: str
    is_default: bool = False


Given = int | str | Argument | None


@dataclass(frozen=True)
class Setting:
    """A value that counts, where it comes from, and a written one that does not count."""

    key: str
    value: int | str
    source: str
    lost: Argument | None = None

    @property
    def warning(self) -> str | None:
        """A sentence about the value that lost; None if there is none, or if both are the same."""
        if self.lost is None or str(self.lost.value) == str(self.value):
            return None
        return (
            f"{self.key} = {self.value} ({self.source}) counts, and not {self.lost.value} "
            f"({self.lost.source}); give it in one place only"
        )

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.source})"


def choose(key: str, argument: Given, default: int | str = AUTO) -> Setting:
    """Return the value of the spec's `key` that counts; `argument` is the program's, or None."""
    own = argument
    if not isinstance(own, Argument):
        own = None if own is None else Argument(own, written.PROGRAM)
    if own is not None:
        own = replace(own, value=_plain(own.value))
    if text := os.environ.get(written.OF_PROGRAM[key]):
        # Longer digits are not a number of steps, and `int` refuses very long ones.
        is_count = text.isascii() and text.isdecimal() and len(text) < DIGITS_MAX
        value = int(text) if is_count else text
        return Setting(key, value, _source_of(key), None if own and own.is_default else own)
    if own is not None:
        return Setting(key, own.value, own.source)
    return Setting(key, default, written.DEFAULT)


def _plain(given: Any) -> Any:
    """Return a number of another library, such as NumPy's, as one that JSON can have."""
    try:
        return given if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return given


def _source_of(key: str) -> str:
    """Return where a variable's value comes from: the environment itself without an agent."""
    try:
        return str(json.loads(os.environ.get(environment.SOURCES) or "{}")[key])
    except (ValueError, KeyError, TypeError):
        return written.SPEC if os.environ.get(environment.RUN_DIRECTORY) else written.ENVIRONMENT


def _parsed(setting: Setting, parse: Callable[[int | str], T]) -> T:
    """Return a parsed setting. An error names the environment variable that it comes from."""
    try:
        return parse(setting.value)
    except ValueError as error:
        if setting.source != written.ENVIRONMENT:
            raise
        raise SpecError(f"{written.OF_PROGRAM[setting.key]}: {error}") from error


def _interval_of(setting: Setting) -> Interval:
    """Return when to save. Only the spec and the environment can ask for doublings."""
    return replace(_parsed(setting, Interval.parse), doubling=doubling_steps())


_TRUTHS: Final = {"true": True, "false": False}


def _shown(given: Any) -> str:
    """Return a boolean as a spec has it. Anything else stays to be refused."""
    return str(given).lower() if isinstance(given, bool) else repr(given)


def _truth_of(given: int | str) -> bool:
    """Parse "true" or "false". Raises `SpecError` for anything else."""
    found = _TRUTHS.get(str(given).lower())
    if found is None:
        raise SpecError(f"checkpoint overlap {given!r}: expected true or false")
    return found


def _staging_of(given: object) -> tuple[Setting, Staging]:
    """Return where steps are staged, with the program's own value, or None. Raises `SpecError`."""
    if given is not None and not isinstance(given, str):
        given = repr(given)
    where = choose(written.STAGING, given, default=IN_MEMORY)
    directory = os.environ.get(environment.STAGING_DIRECTORY, "")
    found = _parsed(where, lambda value: Staging.parse(value, directory))
    # Only the program can still bring them together: a spec with both is refused.
    neighbour = os.environ.get(environment.CHECKPOINT_NEIGHBOUR)
    if neighbour and found.mode != IN_MEMORY:
        raise SpecError(
            f"{where.key} is {found.mode!r} ({where.source}), and checkpoint.neighbour of the spec "
            f"is {neighbour.lower()}: expected 'memory', because the copies of a neighbour need up "
            "to four times the memory of a node's checkpoint files; leave one of them out"
        )
    return where, found


@dataclass(frozen=True)
class Settings:
    """The settings of one session."""

    interval: Interval
    rhythm: SnapshotRhythm
    chosen: tuple[Setting, ...]
    overlaps: bool = False
    staging: Staging = MEMORY

    @classmethod
    def of(
        cls,
        interval: Given,
        snapshots: Given,
        overlap: bool | None = None,
        staging: str | None = None,
    ) -> Settings:
        """Return the settings with a program's own values, or None. Raises `SpecError`."""
        every, kept = choose(written.INTERVAL, interval), choose(written.SNAPSHOTS, snapshots)
        interval_of, rhythm_of = _interval_of(every), _parsed(kept, SnapshotRhythm)
        given = None if overlap is None else Argument(_shown(overlap), written.PROGRAM)
        late = choose(written.OVERLAP, given, default=_shown(False))
        where, found = _staging_of(staging)
        more = [one for one in (late, where) if one.source != written.DEFAULT]
        return cls(interval_of, rhythm_of, (every, kept, *more), _parsed(late, _truth_of), found)

    @classmethod
    def without_snapshots(cls, interval: Given, because: str) -> Settings:
        """Return the settings of a session of a framework's files. Raises `SpecError`.

        It takes no snapshots, and its copies do not continue during a step.
        """
        every, asked = (
            choose(written.INTERVAL, interval),
            choose(written.SNAPSHOTS, None, default=OFF),
        )
        lost = None if asked.source == written.DEFAULT else Argument(asked.value, asked.source)
        none = Setting(written.SNAPSHOTS, OFF, because, lost)
        chosen: tuple[Setting, ...] = (every, none)
        late = choose(written.OVERLAP, None, default=_shown(False))
        if _parsed(late, _truth_of):
            lost = Argument(late.value, late.source)
            chosen = (*chosen, Setting(written.OVERLAP, _shown(False), because, lost))
        where, found = _staging_of(None)
        chosen = (*chosen, where) if where.source != written.DEFAULT else chosen
        return cls(_interval_of(every), SnapshotRhythm(OFF), chosen, staging=found)

    def announce(self, event: Callable[..., Any], rank: int) -> None:
        """On rank 0, log the settings and the warnings, and record them in the journal."""
        if rank != 0:
            return
        tiers = Tiers.from_environment(os.environ)
        more = {"checkpoint.mirror": tiers.mirror, "checkpoint.local": tiers.local}
        more[DIRECTORY_KEY] = self.staging.directory
        more["checkpoint.doubling_steps"] = str(self.interval.doubling or "")
        given = (Setting(key, value, _source_of(key)) for key, value in more.items() if value)
        lines = [*self.chosen, *given]
        text = ", ".join(map(str, lines))
        report(f"holdfast: {text}")
        event(
            EventKind.NOTE,
            text=text,
            settings={one.key: {"value": one.value, "source": one.source} for one in lines},
        )
        unused = ""
        if self.staging.directory and not self.staging.is_on_disk:
            unused = (
                f"{DIRECTORY_KEY} ({_source_of(DIRECTORY_KEY)}) is not used, because "
                f"{written.STAGING} is {self.staging.mode!r}: set it to 'disk' for images there"
            )
        for warning in filter(None, (*(one.warning for one in self.chosen), unused)):
            report(f"holdfast: warning: {warning}")
            event(EventKind.NOTE, text=warning)
