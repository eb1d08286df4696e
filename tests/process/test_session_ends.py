"""Loops that a program writes itself: work after a boundary, an early last commit, a late start."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.contracts import environment
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NumericsError, SessionError, SpecError
from holdfast.lineage.ingest.metrics import parse_line
from holdfast.trainer import Session, load_checkpoint
from holdfast.trainer.frameworks.session import FrameworkSession


class Training:
    """A model with its session in a folder."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.run = RunPaths(directory)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"interval": 100, "snapshots": "off", **more}
        self.session = FrameworkSession(self.model, self.optimizer, directory=directory, **settings)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()

    def manifests(self) -> list[Manifest]:
        found = [read_manifest(path) for path in self.run.list_checkpoints()]
        return [manifest for manifest in found if manifest is not None]


def test_a_due_save_waits_for_the_work_after_its_boundary(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", interval=2)
    session = training.session
    assert not session.begin(4)
    for step in range(1, 5):
        training.step()
        session.log(loss=float(step))
        assert not session.boundary(has_end=step == 2)
        if step == 2:
            session.log(accuracy=0.5)
            session.finish_end()
    session.close()
    first, last = training.manifests()
    assert (first.step, first.metrics) == (2, {"loss": 2.0, "accuracy": 0.5})
    assert last.step == 4
    lines = (training.run.metrics_of(0, 1)).read_text().splitlines()
    assert any('"step": 2' in line and "accuracy" in line for line in lines)


def test_what_follows_finish_is_not_saved(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    session = training.session
    session.begin(1)
    training.step()
    session.boundary()
    trained = training.model.weight.detach().clone()
    session.finish()
    assert session.committed_step == 1
    with torch.no_grad():
        training.model.weight.fill_(7.0)
    session.close()
    (saved,) = training.run.list_checkpoints()
    again = nn.Linear(1, 1)
    load_checkpoint(saved, again)
    assert torch.equal(again.weight, trained)


def test_a_start_after_another_run_counts_only_without_a_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", begins_at=5)
    assert (training.session.step, training.session.committed_step) == (5, 0)
    training.session.begin(6)
    training.step()
    training.session.boundary()
    training.session.close()
    assert [manifest.step for manifest in training.manifests()] == [6]
    again = Training(tmp_path / "run", begins_at=5)
    assert (again.session.step, again.session.committed_step) == (6, 6)
    again.session.close()


def test_a_logged_mean_does_not_count_beside_the_losses_of_its_step(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    session = training.session
    session.begin(1)
    training.step()
    session.observe(1.0)
    session.log(loss=math.nan)
    # The default policy for NaN is to stop. The step's own loss was finite.
    assert not session.boundary()
    session.close()
    assert [manifest.step for manifest in training.manifests()] == [1]


def lose(training: Training, steps: int = 12, bad: int = 6) -> Iterator[int]:
    """Train, and log NaN in step `bad`. The policy is to stop, at a later boundary."""
    for step in training.session.steps(steps):
        training.step()
        training.session.log(loss=math.nan if step == bad else 1.0)
        yield step


def in_finally(training: Training) -> None:
    try:
        list(lose(training))
    finally:
        training.session.close()


def after_the_error(training: Training) -> None:
    with contextlib.suppress(NumericsError):
        list(lose(training))
    assert sys.exc_info()[1] is None
    with pytest.raises(SessionError, match=r"ended after step .* with NumericsError"):
        next(training.session.steps(12))
    training.session.close()


def in_a_with_block(training: Training) -> None:
    with training.session, contextlib.suppress(NumericsError):
        list(lose(training))


def by_a_generator(training: Training) -> None:
    def batches() -> Iterator[int]:
        try:
            yield from lose(training)
        finally:
            training.session.close()

    list(batches())


def between_boundaries(training: Training) -> None:
    """The weights are those of step 6, which has no boundary."""
    try:
        for _ in range(5):
            training.step()
            training.session.boundary()
        training.step()
        raise NumericsError("found by the program")
    finally:
        training.session.close()


ENDINGS = (in_finally, after_the_error, in_a_with_block, by_a_generator, between_boundaries)


@pytest.mark.more
@pytest.mark.parametrize("end", ENDINGS, ids=lambda end: end.__name__)
def test_nothing_is_saved_after_an_exception_whoever_closes(
    tmp_path: Path, end: Callable[[Training], None]
) -> None:
    training = Training(tmp_path / "run", interval=4)
    with contextlib.suppress(NumericsError):
        end(training)
    training.session.close()
    assert [manifest.step for manifest in training.manifests()] == [4]
    # The process may continue with another session, from the checkpoint before the bad loss.
    again = Training(tmp_path / "run")
    assert again.session.step == 4
    again.session.close()


def test_an_exception_around_the_loop_does_not_count(tmp_path: Path) -> None:
    """A program may train inside a handler, as after a missing module."""
    try:
        raise ImportError("a faster kernel is missing")
    except ImportError:
        training = Training(tmp_path / "run")
        for step in training.session.steps(9):
            training.step()
            if step == 3:
                break
        training.session.close()
    assert [manifest.step for manifest in training.manifests()] == [3]


def test_a_session_that_has_ended_says_so(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", best=("loss", "min"))
    session = training.session
    for step in session.steps(2):
        training.step()
        session.log(loss=float(step))
    for _ in range(2):
        session.close()
    acting: dict[str, Callable[[], object]] = {
        "steps": lambda: session.steps(5),
        "epochs": lambda: session.epochs(5),
        "batches": lambda: session.batches([1]),
        "enumerate": lambda: session.enumerate([1]),
        "boundary": session.boundary,
        "finish_end": session.finish_end,
        "checkpoint": session.checkpoint,
        "phase": lambda: session.phase("eval"),
        "beat": session.beat,
        "batch": lambda: session.batch(8, 4),
        "sampler": lambda: session.sampler(8, 4, 2),
        "distributed_sampler": lambda: session.distributed_sampler(8, 4),
        "log": lambda: session.log(loss=1.0),
        "observe": lambda: session.observe(1.0),
        "__enter__": session.__enter__,
    }
    for name, act in acting.items():
        with pytest.raises(SessionError, match=f"^{name}: this Session has ended after step 2"):
            act()
    # What is only read stays.
    assert (session.step, session.should_stop, session.stop_requested) == (2, False, False)
    assert (session.best["value"], session.resumed_from, session.rank) == (1.0, None, 0)


def test_a_logged_line_is_written_whole_or_refused_by_name(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    session = training.session
    session.begin(1)
    refused: dict[str, Any] = {"a": None, "b": "0.5", "c": torch.ones(2), "d": [1], "e": 1j}
    for name, value in refused.items():
        with pytest.raises(TypeError, match=rf"log\({name}=\.\.\.\): {type(value).__name__}"):
            session.log(loss=1.0, **{name: value})
    for name in ("step", "time"):
        with pytest.raises(SpecError, match=f"log\\({name}=7\\).*such as my_{name}"):
            Session.log(session, loss=1.0, **{name: 7})
    # A framework's own names are carried. `self` is a name like others.
    odd: dict[str, Any] = {"self": torch.tensor([3]), "yes": True, "huge": 10**400}
    session.log(step=7, time=8, **odd)
    training.step()
    session.boundary()
    session.close()
    path = training.run.metrics_of(0, 1)
    line = parse_line(path.read_bytes())
    assert line is not None
    last = {name: spread[1] for name, spread in line.data.items()}
    assert (line.step, line.time > 1e9) == (1, True)
    assert last == {"logged_step": 7, "logged_time": 8, "self": 3, "yes": 1, "huge": None}


def test_a_second_bad_loss_that_reaches_the_weights_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one leaves the weights whole, and is skipped."""
    numerics = {"on_nan": "skip", "margin_steps": 1, "skip_steps": 2}
    monkeypatch.setenv(environment.NUMERICS, json.dumps(numerics))
    training = Training(tmp_path / "run", interval=4)

    def train() -> None:
        for step in training.session.steps(20):
            training.session.log(loss=math.nan if step in (5, 10) else 1.0)
            training.step()
            if step == 10:
                training.model.weight.data.fill_(math.nan)

    with pytest.raises(NumericsError, match=r"the loss of step 10 is nan; roll back to step-0+8\."):
        train()
    assert [manifest.step for manifest in training.manifests()] == [4, 8]
    training.session.close()


def test_a_resume_remembers_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = {"on_spike": "stop", "window": 16}
    monkeypatch.setenv(environment.NUMERICS, json.dumps(numerics))

    def train(losses: list[float]) -> None:
        training = Training(tmp_path / "run")
        session = training.session
        with session:
            session.begin(20)
            for loss in losses:
                session.log(loss=loss)
                training.step()
                session.boundary()

    train([1.0] * 8)
    with pytest.raises(NumericsError, match="the loss of step 9, 9, is above the limit"):
        train([9.0, 1.0, 1.0, 1.0])


def test_a_session_that_was_dropped_makes_room_for_another(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    for step in training.session.steps(9):
        training.step()
        if step == 3:
            break
    with pytest.raises(SessionError, match="Something still refers to the first"):
        Training(tmp_path / "other")
    del training
    again = Training(tmp_path / "run")
    assert again.session.step == 0
    thread = threading.Thread(target=again.session.close)
    thread.start()
    thread.join()
    # A thread may close the session too.
    last = Training(tmp_path / "other")
    last.session.close()
