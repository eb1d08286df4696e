"""Bad losses: what counts as one, and what is to come of it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from holdfast.contracts.paths import CheckpointName
from holdfast.contracts.spec_supervision import Numerics
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.numerics.answer import Answer, Known, answer
from holdfast.trainer.numerics.detector import Anomaly, Detector, spike_limit

NAN = Anomaly(problem="nan", step=100, loss=math.nan, good_step=99)
SPIKE = Anomaly(problem="spike", step=100, loss=9.0, good_step=99, median=1.0, limit=2.0)
LATER = Numerics(on_nan="skip", on_spike="skip", skip_steps=6)
BACK = Numerics(on_nan="rollback", on_spike="rollback", margin_steps=10, skip_steps=6)


def names(*steps: int) -> list[CheckpointName]:
    return [CheckpointName(step, 1, 1) for step in steps]


def falling(step: int) -> float:
    """A loss as it mostly is: falling, with noise of a tenth of it."""
    return (1.0 + 3.0 * math.exp(-step / 80)) * random.Random(step).gauss(1.0, 0.1)


def test_what_was_resumed_from_is_not_proven_by_itself() -> None:
    first = Detector(Numerics(), after=40).look(41, math.nan)
    assert first is not None
    given = answer(first, Numerics(on_nan="stop"), Known(checkpoints=names(30, 40)))
    assert summary(given) == ("stop", 30, [40], [])


def found(losses: list[float], **numerics: Any) -> list[tuple[str, int]]:
    """(problem, step) of all that is noticed; the first loss is that of step 1."""
    detector = Detector(Numerics(**numerics))
    seen = [detector.look(step, loss) for step, loss in enumerate(losses, start=1)]
    return [(one.problem, one.step) for one in seen if one is not None]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_noticed_from_the_first_step(loss: float) -> None:
    assert found([loss]) == [("nan", 1)]
    assert found([1.0] * 40 + [loss]) == [("nan", 41)]


def test_a_falling_noisy_loss_has_no_spikes() -> None:
    assert found([falling(step) for step in range(2000)]) == []


def test_a_loss_far_above_its_window_is_a_spike_and_one_below_is_none() -> None:
    losses = [falling(step) for step in range(300)]
    assert found([*losses, 20.0]) == [("spike", 301)]
    assert found([*losses, 0.0]) == []
    # Deviations of nothing: half above the median is the least that counts.
    assert found([1.0] * 100 + [1.4]) == []
    assert found([1.0] * 100 + [1.6]) == [("spike", 101)]


def test_too_few_losses_make_no_spike() -> None:
    assert found([1.0] * 20 + [1e9], window=100) == []


def test_one_problem_is_told_once_in_a_window() -> None:
    losses = [1.0] * 100 + [math.nan] * 30 + [50.0, 60.0]
    assert found(losses, window=100) == [("nan", 101), ("spike", 131)]
    assert found([math.nan] * 25, window=8) == [("nan", 1), ("nan", 9), ("nan", 17), ("nan", 25)]


def test_outliers_do_not_move_the_limit() -> None:
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
            id="after a stop nobody goes on from what no good loss has proven",
        ),
        pytest.param(
            SPIKE,
            Numerics(on_nan="stop", on_spike="warn"),
            Known(checkpoints=names(50)),
            ("warn", None, [], []),
            id="a spike has a policy of its own",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(50, 80, 89, 90, 99)),
            ("rollback", 89, [90, 99], [(97, 6)]),
            id="back by the margin, and the data around the loss is passed over",
        ),
        pytest.param(
            Anomaly(problem="nan", step=100, loss=math.nan, good_step=80),
            Numerics(on_nan="stop"),
            Known(checkpoints=names(70, 79, 80, 90)),
            ("stop", 79, [80, 90], []),
            id="with a loss every few steps only what came before a good one is proven",
        ),
        pytest.param(
            Anomaly(problem="nan", step=100, loss=math.nan, good_step=80),
            BACK,
            Known(checkpoints=names(70, 79, 80, 89)),
            ("rollback", 79, [80, 89], [(97, 6)]),
            id="so it is for a rollback",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(80), unfinished=names(70, 95)),
            ("rollback", 80, [95], [(97, 6)]),
            id="what may yet be committed counts as newer, never as a target",
        ),
        pytest.param(
            Anomaly(problem="nan", step=4, loss=math.nan, good_step=3),
            BACK,
            Known(checkpoints=[]),
            ("rollback", None, [], [(1, 6)]),
            id="without a checkpoint from the beginning",
        ),
        pytest.param(
            NAN,
            BACK,
            Known(checkpoints=names(95), has_deleted=True),
            ("stop", 95, [], []),
            id="never to the beginning because the older ones were deleted",
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
            id="a skip begins where no rank has drawn data yet",
        ),
        pytest.param(
            NAN,
            LATER,
            Known(checkpoints=names(80), reached=104, is_finite=False),
            ("rollback", 80, [], [(97, 6)]),
            id="weights that are not finite take a rollback",
        ),
        pytest.param(
            SPIKE,
            LATER,
            Known(checkpoints=names(80), skipped=[100], reached=102),
            ("warn", None, [], []),
            id="a step that is trained again has its window already",
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
def test_what_comes_of_a_bad_loss(
    anomaly: Anomaly, numerics: Numerics, known: Known, expected: tuple[Any, ...]
) -> None:
    given = answer(anomaly, numerics, known)
    assert summary(given) == expected
    assert "step 100" in given.reason or "step 4" in given.reason


def summary(given: Answer) -> tuple[Any, ...]:
    return (
        given.action,
        given.to.step if given.to else None,
        [name.step for name in given.excluded],
        [(window.first_step, window.steps) for window in given.skip],
    )


def test_the_window_begins_after_the_checkpoint_that_is_gone_back_to() -> None:
    wide = BACK.model_copy(update={"skip_steps": 60})
    assert answer(NAN, wide, Known(checkpoints=names(85))).skip == (SkipWindow(86, 60),)
