"""A rank's guard over its losses: read when they have come, told to all ranks when one is bad.

A loss on a GPU is copied beside training and looked at once the copy is there, a step or a few
later: no step waits for it. A rank that finds one bad asks all others for a meeting by a word on
its node's status table; ordinary steps talk to nobody. Where ranks meet, rank 0 answers from the
policy and from what disk knows, writes it down, and all ranks do it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from holdfast.contracts import environment
from holdfast.contracts.errors import NumericsError, SpecError
from holdfast.contracts.history import excluded_checkpoints, load_events
from holdfast.contracts.journal import GROWER, Event, EventKind, JournalWriter
from holdfast.contracts.paths import MANIFEST, CheckpointName
from holdfast.contracts.rank_status import RankRecord
from holdfast.contracts.spec import Numerics
from holdfast.trainer.collective import ControlGroup
from holdfast.trainer.data.position import Position
from holdfast.trainer.numerics.answer import Answer, Known, answer, policy_for
from holdfast.trainer.numerics.detector import Anomaly, Detector
from holdfast.trainer.rank_context import RankContext
from holdfast.trainer.saver import Saver
from holdfast.trainer.state.train_state import TrainState

# Copies under way at most; a program further ahead of its GPU waits for the oldest.
COPIES_MAX: Final = 64
RESTARTED: Final = frozenset({"relaunch", "resume"})

_Copy = tuple[int, torch.Tensor, "torch.cuda.Event"]


class LossGuard:
    """One rank's losses, and what all ranks do about a bad one."""

    def __init__(
        self,
        context: RankContext,
        ranks: ControlGroup,
        record: RankRecord,
        position: Position,
        saver: Saver,
        state: TrainState,
    ) -> None:
        self._context, self._ranks, self._record = context, ranks, record
        self._position, self._saver, self._state = position, saver, state
        self._numerics = chosen_numerics()
        self._detector = Detector(self._numerics, after=position.reached)
        self._copies: deque[_Copy] = deque()
        self._found: Anomaly | None = None

    @property
    def metric(self) -> str:
        """The logged metric that is watched."""
        return self._numerics.metric

    @property
    def asked(self) -> int:
        """The step whose bad loss the ranks have not resolved yet, or 0."""
        return self._found.step if self._found is not None else 0

    def observe(self, step: int, loss: float | torch.Tensor) -> None:
        """Take the loss of `step`: a number, or a tensor with one element on any device."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
            if loss.numel() != 1:
                raise SpecError(f"a loss of shape {tuple(loss.shape)}: expected one number")
        if not isinstance(loss, torch.Tensor) or loss.device.type != "cuda":
            self._look(step, float(loss))
            return
        landing = torch.empty((), dtype=torch.float64, pin_memory=True)
        landing.copy_(loss.reshape(()), non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        self._copies.append((step, landing, arrival))
        if len(self._copies) > COPIES_MAX:
            self._copies[0][2].synchronize()

    def look(self) -> None:
        """At a boundary: look at the copies that have come."""
        while self._copies and self._copies[0][2].query():  # type: ignore[no-untyped-call]
            step, landing, _ = self._copies.popleft()
            self._look(step, float(landing))

    def finish(self) -> None:
        """At the last boundary: look at all that is under way."""
        for _, _, arrival in self._copies:
            arrival.synchronize()
        self.look()

    def resolve(self) -> None:
        """All ranks together, once one of them has `asked`: learn what is to come of it, do it.

        Raises `NumericsError` on all ranks when this launch must not train on.
        """
        said = self._ranks.gather(lambda: (self._found, self._position.reached, self._is_sane()))
        anomaly, rank = _first([found for found, _, _ in said])
        reached, is_finite = max(far for _, far, _ in said), all(sane for _, _, sane in said)
        self._found = None
        self._record.ask(0)
        if policy_for(anomaly, self._numerics) != "warn":
            # What is in flight is judged by the answer, so it must be there or never come.
            self._saver.quiesce()
        given = self._ranks.share(
            lambda: self._answer(anomaly, rank, reached=reached, is_finite=is_finite)
        )
        self._position.pass_over(given.skip)
        if given.action in {"stop", "rollback"}:
            raise NumericsError(given.reason)

    def _look(self, step: int, loss: float) -> None:
        found = self._detector.look(step, loss)
        if found is not None and (self._found is None or urgency(found) < urgency(self._found)):
            self._found = found
            self._record.ask(step)

    def _is_sane(self) -> bool:
        """True when this rank's weights are finite, which only a skip has to know."""
        if "skip" not in {self._numerics.on_nan, self._numerics.on_spike}:
            return True
        return are_finite(self._state.weights())

    def _answer(self, anomaly: Anomaly, rank: int, *, reached: int, is_finite: bool) -> Answer:
        """Rank 0's: the policy's answer, durable before anybody acts on it."""
        events = load_events(self._context.run)
        known = replace(self._known(events), reached=reached, is_finite=is_finite)
        given = answer(anomaly, self._numerics, known)
        skip = [[window.first_step, window.steps] for window in given.skip]
        identity = self._context.identity
        numbers: dict[str, Any] = {"attempt": identity.attempt, "launch": identity.launch}
        with JournalWriter(self._context.attempt.rank_journal) as journal:
            facts = {**asdict(anomaly), "loss": _sayable(anomaly.loss)}
            more: dict[str, Any] = {"rank": rank, "action": given.action, "reason": given.reason}
            if given.action == "skip":
                more["skip"] = skip
            if given.excluded or given.action == "rollback":
                journal.append(
                    EventKind.ROLLED_BACK,
                    **numbers,
                    to=str(given.to) if given.to else None,
                    excluded=[str(name) for name in given.excluded],
                    skip=skip,
                    step=anomaly.step,
                    reason=given.reason,
                )
            # Last, for the agent starts again on its word.
            journal.append(EventKind.NUMERICS, **numbers, **facts, **more)
        print(f"holdfast: {given.reason}", flush=True)
        return given

    def _known(self, events: tuple[Event, ...]) -> Known:
        run, excluded = self._context.run, excluded_checkpoints(events)
        names: dict[bool, list[CheckpointName]] = {True: [], False: []}
        for directory in run.list_checkpoints():
            name = CheckpointName.parse(directory.name)
            if name is not None and str(name) not in excluded:
                names[(directory / MANIFEST).exists()].append(name)
        return Known(
            checkpoints=names[True],
            unfinished=names[False],
            rolled_back=changes(events, "rollback"),
            skipped=changes(events, "skip"),
            has_deleted=run.tombstones.is_dir() and any(run.tombstones.iterdir()),
        )


def chosen_numerics() -> Numerics:
    """The spec's policy, as the agent hands it on; without one, the defaults."""
    given = os.environ.get(environment.NUMERICS)
    return Numerics.model_validate_json(given) if given else Numerics()


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True when all floating-point values are; of sharded tensors those of this rank."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return all(bool(t.isfinite().all()) for t in local if t.is_floating_point())


def urgency(anomaly: Anomaly) -> tuple[bool, int]:
    """Sorts what is not finite before spikes, and the earlier before the later."""
    return anomaly.problem != "nan", anomaly.step


def changes(events: tuple[Event, ...], action: str) -> list[int]:
    """The steps of the losses that were answered so since an operator set the run going."""
    since = max(
        (
            int(event.data.get("after_attempt", 0))
            for event in events
            if event.kind is EventKind.OPERATOR_REQUEST
            and event.data.get("action") in RESTARTED
            and event.data.get("by") != GROWER
        ),
        default=-1,
    )
    return [
        int(event.data["step"])
        for event in events
        if event.kind is EventKind.NUMERICS
        and event.data.get("action") == action
        and int(event.data.get("attempt", 0)) > since
    ]


def _first(found: list[Anomaly | None]) -> tuple[Anomaly, int]:
    """The loss that is resolved first, and the rank that had it."""
    there = [(one, rank) for rank, one in enumerate(found) if one is not None]
    return min(there, key=lambda pair: (urgency(pair[0]), pair[1]))


def _sayable(loss: float) -> float | str:
    """JSON has no NaN or infinity."""
    return loss if math.isfinite(loss) else repr(loss)
