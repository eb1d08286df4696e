"""A rank's loss guard: it reads losses when they arrive and reports a bad one to all ranks.

A loss on a GPU is copied in the background and checked when the copy is complete, one or a few
steps later. No step waits for it. A rank with a bad loss requests a meeting of all ranks through
its node's status table. Normal steps need no communication. At the meeting, rank 0 decides by the
policy and the run's files and records the decision. All ranks then carry it out.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from holdfast.contracts import environment
from holdfast.contracts.disk.journal import AUTOMATIC, Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName
from holdfast.contracts.errors import NumericsError, SpecError
from holdfast.contracts.node.rank_status import RankRecord
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.history import excluded_checkpoints, load_events
from holdfast.contracts.spec.sections import Numerics
from holdfast.trainer.data.position import Position
from holdfast.trainer.metrics import number_of
from holdfast.trainer.numerics import detector
from holdfast.trainer.process import devices
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.saving.saver import Saver
from holdfast.trainer.state.run_state import ProgramState

# The maximum number of copies in flight. A program further ahead of its GPU waits for the oldest.
COPIES_MAX: Final = 64
# The numbers of one byte that are converted and checked together.
FINITE_PIECE_NUMBERS: Final = 1 << 24
RESTARTED: Final = frozenset({"relaunch", "resume"})

_Copy = tuple[int, torch.Tensor, torch.Event]
"""(step, landing, arrival)"""


class LossGuard:
    """Guards one rank's losses, and takes part in the decision about a bad one."""

    def __init__(
        self,
        context: RankContext,
        ranks: ControlGroup,
        record: RankRecord,
        position: Position,
        saver: Saver,
        state: ProgramState,
    ) -> None:
        self._context, self._ranks, self._record = context, ranks, record
        self._position, self._saver, self._state = position, saver, state
        self._numerics = chosen_numerics()
        self._detector = detector.Detector(self._numerics, after=position.reached)
        self._copies: deque[_Copy] = deque()
        self._found: detector.Anomaly | None = None
        # A further loss that is not finite, soon after one that was reported.
        self._suspect: detector.Anomaly | None = None

    @property
    def losses(self) -> list[float]:
        """The losses before the next one, for a checkpoint."""
        return self._detector.losses

    def resume(self, losses: Iterable[float]) -> None:
        """Continue after the `losses` of a checkpoint."""
        self._detector.resume(losses)

    @property
    def metric(self) -> str:
        """The name of the logged metric that is checked."""
        return self._numerics.metric

    @property
    def asked(self) -> int:
        """The step whose bad loss is not resolved yet, or 0."""
        return self._found.step if self._found is not None else 0

    def observe(self, step: int, loss: float | torch.Tensor) -> None:
        """Check the loss of `step`: a number, or a tensor with one element on any device."""
        if not isinstance(loss, torch.Tensor):
            self._look(step, number_of(loss, "observe(loss)"))
            return
        if loss.numel() != 1:
            raise SpecError(f"a loss of shape {tuple(loss.shape)}: expected one number")
        if loss.is_complex():
            raise SpecError(f"a loss of type {loss.dtype}: expected a real number")
        if loss.is_cpu or not devices.is_streamed(loss.device):
            self._look(step, float(loss.item()))
            return
        # In the loss's own type: not every device has float64.
        landing = devices.landing((), loss.dtype)
        devices.begin_copy(landing, loss.detach().reshape(()))
        self._copies.append((step, landing, devices.mark(loss.device)))
        if len(self._copies) > COPIES_MAX:
            self._copies[0][2].synchronize()

    def look(self) -> None:
        """At a boundary, check the losses whose copies are complete."""
        while self._copies and self._copies[0][2].query():
            step, landing, _ = self._copies.popleft()
            self._look(step, float(landing))
        suspect, self._suspect = self._suspect, None
        # Only now is the step complete in which the loss may have reached the weights.
        if suspect is not None and not self._is_sane():
            self._ask(suspect)

    def finish(self) -> None:
        """At the last boundary, wait for all copies and check them."""
        for _, _, arrival in self._copies:
            arrival.synchronize()
        self.look()

    def resolve(self) -> None:
        """Decide about a bad loss and carry the decision out. All ranks call this together.

        Raises `NumericsError` on all ranks if this launch must not continue to train.
        """
        gathered = self._ranks.gather(
            lambda: (self._found, self._position.reached, self._is_sane())
        )
        anomaly, rank = _first([found for found, _, _ in gathered])
        reached = max(far for _, far, _ in gathered)
        is_finite = all(sane for _, _, sane in gathered)
        self._found = None
        self._record.ask(0)
        if detector.policy_for(anomaly, self._numerics) != "warn":
            # The decision depends on saves in flight, so wait until each is committed or failed.
            self._saver.quiesce()
        given = self._ranks.share(lambda: self._answer(anomaly, rank, reached, is_finite))
        self._position.skip(given.skip)
        if given.action in {"stop", "rollback"}:
            raise NumericsError(given.reason)

    def _look(self, step: int, loss: float) -> None:
        found = self._detector.look(step, loss)
        if found is not None:
            self._ask(found)
        elif not math.isfinite(loss):
            self._suspect = self._suspect or self._detector.describe("nan", step, loss)

    def _ask(self, found: detector.Anomaly) -> None:
        """Request a meeting about a bad loss, unless a more urgent one is known."""
        if self._found is None or urgency(found) < urgency(self._found):
            self._found = found
            self._record.ask(found.step)

    def _is_sane(self) -> bool:
        """Return True if this rank's weights are finite. Only a skip needs this check."""
        if "skip" not in {self._numerics.on_nan, self._numerics.on_spike}:
            return True
        return are_finite(self._state.weights())

    def _answer(
        self, anomaly: detector.Anomaly, rank: int, reached: int, is_finite: bool
    ) -> detector.LossDecision:
        """Decide on rank 0. The decision is durable before any rank acts on it."""
        events = load_events(self._context.run)
        known = replace(self._known(events), reached=reached, is_finite=is_finite)
        given = detector.answer(anomaly, self._numerics, known)
        skip = [[window.first_step, window.steps] for window in given.skip]
        identity = self._context.identity
        numbers: dict[str, Any] = {"attempt": identity.attempt, "launch": identity.launch}
        with JournalWriter(self._context.attempt.rank_journal) as journal:
            facts = {**asdict(anomaly), "loss": _as_json(anomaly.loss)}
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
            # This line comes last, because the agent starts a new launch when it sees it.
            journal.append(EventKind.NUMERICS, **numbers, **facts, **more)
        report(f"holdfast: {given.reason}")
        return given

    def _known(self, events: tuple[Event, ...]) -> detector.Known:
        run, excluded = self._context.run, excluded_checkpoints(events)
        names: dict[bool, list[CheckpointName]] = {True: [], False: []}
        for directory in run.list_checkpoints():
            name = CheckpointName.parse(directory.name)
            if name is not None and str(name) not in excluded:
                names[(directory / MANIFEST).exists()].append(name)
        return detector.Known(
            checkpoints=names[True],
            unfinished=names[False],
            rolled_back=changes(events, "rollback"),
            skipped=changes(events, "skip"),
            has_deleted=run.tombstones.is_dir() and any(run.tombstones.iterdir()),
        )


def chosen_numerics() -> Numerics:
    """Return the spec's policy, which the agent passes on, or the defaults."""
    given = os.environ.get(environment.NUMERICS)
    try:
        return Numerics.model_validate_json(given) if given else Numerics()
    except ValidationError as error:
        raise SpecError(
            f"{environment.NUMERICS}: {error.errors()[0]['msg']}; expected supervision.numerics of "
            "a spec as JSON"
        ) from error


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all real and complex values are finite. Sharded tensors: this rank's part."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    devices.synchronize({t.device for t in local if devices.is_streamed(t.device)})
    return all(_is_finite(t.detach()) for t in local)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.dtype.itemsize > 1:
        return bool(tensor.isfinite().all())
    if tensor.dtype is torch.float4_e2m1fn_x2:
        # This type has neither NaN nor infinity.
        return True
    # torch has no isfinite for types of one byte. A piece at a time keeps the copies small.
    flat, size = tensor.reshape(-1), FINITE_PIECE_NUMBERS
    return all(
        bool(flat[at : at + size].float().isfinite().all()) for at in range(0, flat.numel(), size)
    )


def urgency(anomaly: detector.Anomaly) -> tuple[bool, int]:
    """Return a sort key: losses that are not finite before spikes, and earlier before later."""
    return anomaly.problem != "nan", anomaly.step


def changes(events: tuple[Event, ...], action: str) -> list[int]:
    """Return the steps of losses with this decision since an operator last started the run."""
    since = max(
        (
            int(event.data.get("after_attempt", 0))
            for event in events
            if event.kind is EventKind.OPERATOR_REQUEST
            and event.data.get("action") in RESTARTED
            and event.data.get("by") not in AUTOMATIC
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


def _first(found: list[detector.Anomaly | None]) -> tuple[detector.Anomaly, int]:
    """Return the loss to resolve first, and its rank."""
    there = [(one, rank) for rank, one in enumerate(found) if one is not None]
    return min(there, key=lambda pair: (urgency(pair[0]), pair[1]))


def _as_json(loss: float) -> float | str:
    """Return a JSON value. JSON has no NaN and no infinity."""
    return loss if math.isfinite(loss) else repr(loss)
