"""Bad losses: how they are detected, and the response to them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.spec.sections import Numerics
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.numerics.detector import (
    Anomaly,
    Detector,
    Known,
    LossDecision,
    answer,
    spike_limit,
)
from holdfast.trainer.numerics.guard import are_finite

NAN = Anomaly(problem="nan", step=100, loss=math.nan, good_step=99)
SPIKE = Anomaly(problem="spike", step=100, loss=9.0, good_step=99, median=1.0, limit=2.0)
LATER = Numerics(on_nan="skip", on_spike="skip", skip_steps=6)
BACK = Numerics(on_nan="rollback", on_spike="rollback", margin_steps=10, skip_steps=6)


def names(*steps: int) -> list[CheckpointName]:
    return [CheckpointName(step, 1, 1) for step in steps]


def falling(step: int) -> float:
    """A typical loss: falling, with noise of 10 %."""
    return (1.0 + 3.0 * math.exp(-step / 80)) * random.Random(step).gauss(1.0, 0.1)


def test_a_bad_loss_at_the_first_step_excludes_the_resumed_checkpoint() -> None:
    first = Detector(Numerics(), after=40).look(41, math.nan)
    assert first is not None
    given = answer(first, Numerics(on_nan="stop"), Known(checkpoints=names(30, 40)))
    assert summary(given) == ("stop", 30, [40], [])


def found(losses: list[float], **numerics: Any) -> list[tuple[str, int]]:
    """(problem, step) of each detected anomaly; the first loss is that of step 1."""
    detector = Detector(Numerics(**numerics))
    seen = [detector.look(step, loss) for step, loss in enumerate(losses, start=1)]
    return [(one.problem, one.step) for one in seen if one is not None]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_detected_from_the_first_step(loss: float) -> None:
    assert found([loss]) == [("nan", 1)]
    assert found([1.0] * 40 + [loss]) == [("nan", 41)]


def test_a_falling_noisy_loss_has_no_spikes() -> None:
    assert found([falling(step) for step in range(2000)]) == []


def test_a_loss_far_above_its_window_is_a_spike_and_one_below_is_not() -> None:
    losses = [falling(step) for step in range(300)]
    assert found([*losses, 20.0]) == [("spike", 301)]
    assert found([*losses, 0.0]) == []
    # Without any deviation, a loss must exceed the median by half to count.
    assert found([1.0] * 100 + [1.4]) == []
    assert found([1.0] * 100 + [1.6]) == [("spike", 101)]


def test_no_spike_is_reported_before_there_are_enough_losses() -> None:
    assert found([1.0] * 20 + [1e9], window=100) == []


def test_one_problem_is_reported_once_per_window() -> None:
    losses = [1.0] * 100 + [math.nan] * 30 + [50.0, 60.0]
    assert found(losses, window=100) == [("nan", 101), ("spike", 131)]
    assert found([math.nan] * 25, window=8) == [("nan", 1), ("nan", 9), ("nan", 17), ("nan", 25)]


def test_outliers_do_not_change_the_spike_limit() -> None:
    calm = [1.0 + 0.01 * (index % 7) for index in range(60)]
    middle, limit = spike_limit([*calm, *[1000.0] * 20], 20.0)
    assert middle == pytest.approx(1.04, abs=0.02)
    assert limit < 2.0


@pytest.mark.parametrize(
    ("anomaly", "numerics", "known", "expected"),
    [
        pytest.param(
            NAN,
            Numerics(on_nan="warn"),
            Known(checkpoints=names(50, 99)),
            ("warn", None, [], []),
            id="a warning changes nothing",
        ),
        pytest.param(
            NAN,
            Numerics(on_nan="stop"),
            Known(checkpoints=names(50, 98, 99, 100)),
            ("stop", 98, [99, 100], []),
            id="a stop excludes checkpoints that no later good loss confirms",
        ),
        pytest.param(
            SPIKE,
            Numerics(on_nan="stop", on_spike="warn"),
            Known(checkpoints=names(50)),
            ("warn", None, [], []),
            id="a spike has its own policy",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(50, 80, 89, 90, 99)),
            ("rollback", 89, [90, 99], [(97, 6)]),
            id="a rollback by the margin skips the data around the loss",
        ),
        pytest.param(
            Anomaly(problem="nan", step=100, loss=math.nan, good_step=80),
            Numerics(on_nan="stop"),
            Known(checkpoints=names(70, 79, 80, 90)),
            ("stop", 79, [80, 90], []),
            id="with sparse losses a stop keeps only checkpoints before a good loss",
        ),
        pytest.param(
            Anomaly(problem="nan", step=100, loss=math.nan, good_step=80),
            BACK,
            Known(checkpoints=names(70, 79, 80, 89)),
            ("rollback", 79, [80, 89], [(97, 6)]),
            id="with sparse losses a rollback goes before a good loss",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(80), unfinished=names(70, 95)),
            ("rollback", 80, [95], [(97, 6)]),
            id="an unfinished checkpoint is excluded and never a target",
        ),
        pytest.param(
            Anomaly(problem="nan", step=4, loss=math.nan, good_step=3),
            BACK,
            Known(checkpoints=[]),
            ("rollback", None, [], [(1, 6)]),
            id="without a checkpoint a rollback goes to the beginning",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(95), has_deleted=True),
            ("stop", 95, [], []),
            id="no rollback to the beginning when older checkpoints were deleted",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(80), rolled_back=[93]),
            ("stop", 80, [], []),
            id="a second bad loss at the same place",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(80), rolled_back=[40, 89]),
            ("rollback", 80, [], [(97, 6)]),
            id="a bad loss at another place",
        ),
        pytest.param(
            NAN,
            BACK.model_copy(update={"changes_max": 2}),
            Known(checkpoints=names(80), rolled_back=[10, 40]),
            ("stop", 80, [], []),
            id="too many rollbacks",
        ),
        pytest.param(
            NAN,
            LATER,
            Known(checkpoints=names(80), reached=104),
            ("skip", None, [], [(105, 6)]),
            id="a skip starts where no rank has read data yet",
        ),
        pytest.param(
            NAN,
            LATER,
            Known(checkpoints=names(80), reached=104, is_finite=False),
            ("rollback", 80, [], [(97, 6)]),
            id="weights that are not finite need a rollback",
        ),
        pytest.param(
            SPIKE,
            LATER,
            Known(checkpoints=names(80), skipped=[100], reached=102),
            ("warn", None, [], []),
            id="a repeated step already has its skip window",
        ),
        pytest.param(
            SPIKE,
            LATER,
            Known(checkpoints=names(80), skipped=[1, 2, 3], rolled_back=[7, 9], reached=102),
            ("stop", 80, [], []),
            id="too many skips",
        ),
    ],
)
def test_the_response_to_a_bad_loss(
    anomaly: Anomaly, numerics: Numerics, known: Known, expected: tuple[Any, ...]
) -> None:
    given = answer(anomaly, numerics, known)
    assert summary(given) == expected
    assert "step 100" in given.reason or "step 4" in given.reason


def summary(given: LossDecision) -> tuple[Any, ...]:
    return (
        given.action,
        given.to.step if given.to else None,
        [name.step for name in given.excluded],
        [(window.first_step, window.steps) for window in given.skip],
    )


def test_the_skip_window_starts_after_the_rollback_checkpoint() -> None:
    wide = BACK.model_copy(update={"skip_steps": 60})
    assert answer(NAN, wide, Known(checkpoints=names(85))).skip == (SkipWindow(86, 60),)


FLOATS = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", [each for each in FLOATS if each.is_floating_point], ids=str)
def test_weights_of_every_floating_type_are_checked(dtype: torch.dtype) -> None:
    """torch has no `isfinite` for the types of one byte."""
    bits = torch.arange(256, dtype=torch.uint8)
    zeros = torch.zeros(64 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert are_finite([zeros, zeros.view(8, 8).t()])
    if dtype is torch.float4_e2m1fn_x2:
        assert are_finite([bits.view(dtype)])
        return
    # Half a number is a number too, or none: each type is asked for its own values.
    values = bits.view(dtype) if dtype.itemsize == 1 else torch.tensor([torch.nan]).to(dtype)
    assert bool(values.float().isfinite().all()) == are_finite([values])
    assert not are_finite([zeros, values])


def test_complex_weights_are_checked() -> None:
    assert are_finite([torch.zeros(2, dtype=torch.complex64)])
    assert not are_finite([torch.tensor([1.0, complex(0.0, math.inf)])])


def test_large_weights_are_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.trainer.numerics.guard.FINITE_PIECE_NUMBERS", 8)
    weights = torch.zeros(3, 7).to(torch.float8_e4m3fn)
    assert are_finite([weights])
    weights[2, 6] = torch.nan
    assert not are_finite([weights])
