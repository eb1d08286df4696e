"""Several runs under one quota of GPUs: each starts when the ones before leave it enough.

The state is on disk: a sweep that is started again finds its runs and counts them. Each run has a
supervisor of its own, so the runs continue without the sweep. This module does not use Prefect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.visits import visit
from holdfast.contracts.errors import SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.flows.parameters import load_spec
from holdfast.flows.secrets import require
from holdfast.flows.start import start_if_alone
from holdfast.flows.supervisor.redactor import Log
from holdfast.flows.supervisor.summary import end_reason, summarize
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.runs.preflight import check

POLL_S: Final = 5.0


@dataclass(frozen=True)
class Member:
    """A run of a sweep, and the most GPUs that it can hold at a time."""

    spec: RunSpec
    gpus: int


def members_of(
    spec: Mapping[str, Any] | str, variants: Mapping[str, Sequence[str]], gpus: int
) -> list[Member]:
    """Return the runs: for each variant, `spec` with its overrides, named after both.

    Raises `SpecError` for a wrong spec, and for a run that can hold more than the quota `gpus`.
    """
    if not variants:
        raise SpecError('variants: none given; expected {"small": ["environment.LR=0.1"], …}')
    base = load_spec(spec).name
    found = []
    for key, overrides in variants.items():
        own = load_spec(spec, [f"name={base}-{key}", *overrides])
        most = max(own.gpus, *allowed_sizes(own), *own.elastic.on_preemption)
        if most > gpus:
            raise SpecError(
                f"variant {key}: the run can hold {counted(most, 'GPU')}, and the quota is "
                f"{gpus}; lower "
                "resources or elastic.max_gpus, or raise the quota. Nothing was queued"
            )
        found.append(Member(own, most))
    return found


class Sweep:
    """The runs of a sweep under `root`, of which as many run as `gpus` GPUs allow.

    `by` is who started the sweep.
    """

    def __init__(
        self, members: Sequence[Member], root: Path, gpus: int, log: Log, *, by: str
    ) -> None:
        self._members, self._root, self._gpus, self._log = members, root, gpus, log
        self._by = by
        self._runs: dict[str, RunPaths] = {}
        self._told: dict[str, RunState] = {}
        self._started: set[str] = set()

    def run(self) -> dict[str, Any]:
        """Start the runs in order until all have ended; return their summaries.

        Raises the errors of the checks before a run, before any is created.
        """
        for member in self._members:
            if self._state(member) is None:
                check(member.spec, self._root)
                require(member.spec, run_folders.own_generation(self._root, member.spec.name))
        while waiting := self._turn():
            self._log.debug("%d runs have not ended", waiting)
            time.sleep(POLL_S)
        return {"gpus": self._gpus, "runs": [self._summary(one) for one in self._runs.values()]}

    def cancel(self, by: str, reason: str) -> None:
        """Cancel the runs that were started, after a last checkpoint of each."""
        for one in visit(self._runs.values(), partial(_cancel, by=by, reason=reason)):
            if one.error is not None:
                self._log.error("%s was not cancelled: %s", one.paths.name, one.reason)
            elif one.result:
                self._log.info("%s", one.result)

    def _turn(self) -> int:
        """Start what fits, and return how many runs have not ended."""
        held = unended = 0
        for member in self._members:
            state = self._state(member)
            if state is not None and not state.is_live:
                continue
            unended += 1
            if state is None and held + member.gpus > self._gpus:
                # A smaller run behind does not overtake: a large one would wait forever.
                held = self._gpus
                continue
            # A paused run keeps its share, because an operator may resume it at any time.
            held += member.gpus
            if member.spec.name not in self._started:
                self._start(member)
        return unended

    def _state(self, member: Member) -> RunState | None:
        """Return the state of the member's run, or None if it was not started."""
        name = member.spec.name
        paths = self._runs.get(name) or run_folders.own_generation(self._root, name)
        if paths is None or not run_folders.is_same_spec(
            run_folders.read_record(paths), member.spec
        ):
            return None
        self._runs[name] = paths
        state = load_tallied(paths).state
        if self._told.get(name) is not state:
            self._told[name] = state
            self._log.info("%s: %s", paths.name, state)
        return state

    def _start(self, member: Member) -> None:
        paths, _ = run_folders.attach_or_create(member.spec, self._root, created_by=self._by)
        self._runs[member.spec.name] = paths
        started = start_if_alone(paths)
        # Once: a supervisor that Prefect has queued cannot be told from one that is missing.
        self._started.add(member.spec.name)
        self._log.info("%s has up to %d of %d GPUs", paths.name, member.gpus, self._gpus)
        if started.warning:
            self._log.warning("%s", started.warning)

    def _summary(self, paths: RunPaths) -> dict[str, Any]:
        history = load_tallied(paths)
        return summarize(history, end_reason(history))


def _cancel(paths: RunPaths, *, by: str, reason: str) -> str:
    """Cancel a run if it is live; return what happens."""
    if not load_tallied(paths).state.is_live:
        return ""
    return operator.request(paths, "cancel", by=by, reason=reason)
