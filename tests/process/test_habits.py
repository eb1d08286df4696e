"""Habits of programs: break, two loops, numbers of batches, late state, forks, own signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SpecError
from holdfast.trainer import Session
from holdfast.trainer.session import lifetime
from holdfast.workers.agent.leading import judge_completion

SAMPLES, BATCH = 24, 4


@pytest.fixture(autouse=True)
def no_session_left() -> Iterator[None]:
    """Close the session of a test that failed, so that the next one can open its own."""
    yield
    for holder in list(lifetime._live.values()):
        if isinstance(session := holder(), Session):
            session._release(wait=True)


class Training:
    """A model with its session in a folder."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.run = RunPaths(directory)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        settings = {"interval": 1000, "snapshots": "off", **more}
        self.session = Session(self.model, self.optimizer, directory=directory, **settings)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def loader(self, batch_size: int = BATCH) -> Any:
        sampler = self.session.distributed_sampler(SAMPLES, BATCH)
        data = TensorDataset(torch.arange(SAMPLES).float())
        return DataLoader(data, batch_size=batch_size, sampler=sampler)

    @property
    def weight(self) -> torch.Tensor:
        return next(self.model.parameters()).detach().clone()

    def events(self, kind: EventKind = EventKind.NOTE) -> list[Event]:
        found, _ = read_journal(self.run.attempt(0).rank_journal)
        return [event for event in found if event.kind is kind]

    def notes(self) -> str:
        return "\n".join(str(event.data.get("text")) for event in self.events())

    def manifests(self) -> list[Manifest]:
        found = [read_manifest(path) for path in self.run.list_checkpoints()]
        return [manifest for manifest in found if manifest is not None]


def progress(loop: Iterator[int]) -> Iterator[int]:
    """What a progress bar does: it keeps the loop alive after a break."""
    yield from loop


@pytest.mark.parametrize("is_kept", [False, True])
def test_break_and_close_keep_what_was_trained(tmp_path: Path, is_kept: bool) -> None:
    own = Training(tmp_path / "run")
    loop = own.session.steps(100)
    for step in progress(loop) if is_kept else own.session.steps(100):
        own.step()
        if step == 7:
            break
    own.session.close()
    again = Training(tmp_path / "run")
    assert again.session.step == 7
    assert torch.equal(again.weight, own.weight)
    again.session.close()
    (left,) = [e.data for e in own.events() if e.data.get("has_left") and e.data["launch"] == 1]
    assert (left["is_declared"], left["text"]) == (True, "left after step 7 of 100 steps")


def test_break_before_the_optimizer_steps_repeats_the_step(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for step in own.session.steps(100):
        if step == 7:
            break
        own.step()
    own.session.close()
    assert [manifest.step for manifest in own.manifests()] == [6]


def test_nothing_is_saved_while_an_exception_passes(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")

    def train() -> None:
        try:
            for step in own.session.steps(100):
                own.step()
                if step == 3:
                    raise ValueError("a bad batch")
        finally:
            own.session.close()

    with pytest.raises(ValueError, match="a bad batch"):
        train()
    assert own.manifests() == []


def test_the_loop_continues_after_a_break(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    seen = []
    for total in (3, 5):
        for step in own.session.steps(10):
            own.step()
            seen.append(step)
            if step == total:
                break
    own.session.close()
    assert seen == [1, 2, 3, 4, 5]


def test_a_loop_inside_a_step_of_another_loop_is_refused(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for _ in own.session.steps(3):
        with pytest.raises(SpecError, match="was left in the middle of this step"):
            next(own.session.batches(own.loader()))
        break
    own.session.close()


def test_the_last_of_two_loops_decides_whether_the_program_is_complete(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for _ in own.session.steps(2):
        own.step()
    assert judge_completion(own_events(own), launch=1, step=2).state == "completed"
    for step in own.session.steps(6):
        own.step()
        if step == 4:
            break
    # The program exits with status 0 here, without close.
    ending = judge_completion(own_events(own), launch=1, step=3)
    assert ending.state == "failed"
    assert "6 steps" in ending.evidence[0]
    own.session.close()
    assert own.manifests()[-1].step == 4


def own_events(own: Training) -> list[Event]:
    """All events, once those that are queued are written."""
    text = f"flushed after step {own.session.step}"
    own.session._recorder.event(EventKind.NOTE, text=text)
    for _ in range(1500):
        found, _ = read_journal(own.run.attempt(0).rank_journal)
        if found and found[-1].data.get("text") == text:
            break
        time.sleep(0.02)
    return found


def test_steps_after_epochs_are_a_second_loop(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for _ in own.session.epochs(1):
        for _ in own.session.batches(own.loader()):
            own.step()
    assert own.session.step == SAMPLES // BATCH
    for _ in own.session.steps(8):
        own.step()
    own.session.close()
    assert own.events()[-1].data["text"] == "left after step 8"
    assert own.manifests()[-1].step == 8


# --- the number of a batch -----------------------------------------------------------------------


def numbers(directory: Path, kind: str, *, stop_after: int | None = None) -> list[int]:
    """The numbers of batches of one epoch, until it is left after `stop_after` steps."""
    own, found = Training(directory), []
    for _ in own.session.epochs(1):
        loader = own.loader()
        if kind == "session":
            batches: Any = own.session.enumerate(loader)
        elif kind == "first_batch":
            batches = enumerate(own.session.batches(loader), own.session.first_batch)
        elif kind == "own loop":
            batches = enumerate(loader, own.session.first_batch)
        elif kind == "bar":
            batches = enumerate(progress(own.session.batches(loader)))
        elif kind == "bare loop":
            batches = enumerate(loader)
        else:
            batches = enumerate(own.session.batches(loader))
        for number, _ in batches:
            found.append(number)
            own.step()
            if "loop" in kind:
                own.session.boundary()
            if len(found) == stop_after:
                break
        if stop_after:
            break
    own.session.close()
    return found


@pytest.mark.more
@pytest.mark.parametrize("kind", ["session", "first_batch", "own loop"])
def test_numbers_of_batches_continue_after_a_resume_in_an_epoch(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = numbers(tmp_path / "run", kind, stop_after=2)
    assert first + numbers(tmp_path / "run", kind) == list(range(SAMPLES // BATCH))
    assert "enumerate" not in capsys.readouterr().out


@pytest.mark.more
@pytest.mark.parametrize("kind", ["python", "bar", "bare loop"])
def test_numbers_that_begin_again_are_reported(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers(tmp_path / "run", kind, stop_after=2)
    assert "enumerate" not in capsys.readouterr().out
    assert numbers(tmp_path / "run", kind) == [0, 1, 2, 3]
    assert "enumerate() numbers the batches from 0" in capsys.readouterr().out


@pytest.mark.more
def test_batches_of_all_epochs_are_numbered_as_one(tmp_path: Path) -> None:
    found = []
    for stop in (9, 15):
        own = Training(tmp_path / "run")
        sampler = own.session.sampler(SAMPLES, BATCH, 15)
        loader: Any = DataLoader(TensorDataset(torch.zeros(SAMPLES)), batch_sampler=sampler)
        for number, _ in own.session.enumerate(loader):
            found.append(number)
            own.step()
            if number + 1 == stop:
                break
        own.session.close()
    assert found == list(range(15))


@pytest.mark.more
def test_the_epoch_after_a_resume_at_an_end_is_numbered_from_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Training(tmp_path / "run")
    for _ in own.session.epochs(1):
        for _ in own.session.batches(own.loader()):
            own.step()
        break
    own.session.close()
    again = Training(tmp_path / "run")
    seen = []
    for _ in again.session.epochs(2):
        for number, _ in enumerate(again.session.batches(again.loader())):
            seen.append(number)
            again.step()
    again.session.close()
    assert seen == list(range(SAMPLES // BATCH))
    assert "enumerate" not in capsys.readouterr().out


@pytest.mark.more
def test_small_batches_of_the_loader_are_one_step_together(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for number, _ in own.session.enumerate(own.loader(batch_size=2)):
        if (number + 1) % 2 == 0:
            own.step()
        if number == 4:
            break
    own.session.close()
    assert [manifest.step for manifest in own.manifests()] == [2]
    again = Training(tmp_path / "run")
    assert [n for n, _ in again.session.enumerate(again.loader(batch_size=2))] == [*range(4, 12)]
    again.session.close()


def test_a_batch_size_that_does_not_fit_a_step_is_refused(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    with pytest.raises(SpecError, match="batch_size=3: this rank trains on 4 samples per step"):
        next(own.session.batches(own.loader(batch_size=3)))
    own.session.close()


def test_a_checkpoint_between_optimizer_steps_is_reported(tmp_path: Path) -> None:
    own = Training(tmp_path / "run", interval=9)
    for step in own.session.steps(12):
        if step % 2 == 0:
            own.step()
    own.session.close()
    assert own.notes().count("no optimizer stepped in step 9") == 1


# --- state and metrics ---------------------------------------------------------------------------


def test_snapshots_continue_after_optimizer_state_that_comes_late(tmp_path: Path) -> None:
    """The second optimizer first steps at step 4, as that of a GAN's generator."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    first, second = (torch.optim.AdamW(one.parameters()) for one in model)
    session = Session(
        model, [first, second], directory=tmp_path / "run", interval=1000, snapshots=1
    )
    kept = []
    for step in session.steps(400):
        for optimizer, part in zip((first, second), model, strict=True):
            if optimizer is first or step >= 4:
                part(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        stage = session._saver.engine._stage
        kept.append(max((s.slot.step for s in stage.slots), default=0) if stage else 0)
        if kept[-1] > 5:
            break
        time.sleep(0.02)
    session.close()
    assert kept[-1] > 5


@pytest.mark.more
def test_many_metrics_do_not_end_training(tmp_path: Path) -> None:
    own = Training(tmp_path / "run", snapshots=2)
    many = {f"layer{n}/expert{m}/load": 0.123456789 for n in range(60) for m in range(384)}
    for _ in own.session.steps(5):
        own.step()
        own.session.log(**many, accuracy=0.5)
    own.session.close()
    (manifest,) = own.manifests()
    assert manifest.metrics["accuracy"] == 0.5
    assert 1000 < len(manifest.metrics) < len(many)
    assert "checkpoints record" in own.notes()


def test_metrics_from_before_a_resume_are_in_later_manifests(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    for _ in own.session.steps(2):
        own.step()
        own.session.log(accuracy=0.75)
    own.session.close()
    again = Training(tmp_path / "run")
    for _ in again.session.steps(3):
        again.step()
        again.session.log(loss=1.0)
    again.session.close()
    assert own.manifests()[-1].metrics == {"accuracy": 0.75, "loss": 1.0}


def test_the_best_value_is_replaced_after_nan(tmp_path: Path) -> None:
    own = Training(tmp_path / "run", best=("score", "min"))
    found = []
    for step, score in zip(own.session.steps(4), (math.nan, 3.0, math.nan, 5.0), strict=False):
        own.step()
        own.session.log(score=score)
        found.append((own.session.best["step"], step))
    assert found == [(1, 1), (2, 2), (2, 3), (2, 4)]
    own.session.close()
    for name in ("step", "time"):
        with pytest.raises(SpecError, match="no metric can have this name"):
            Training(tmp_path / "other", best=(name, "min"))


@pytest.mark.more
def test_the_best_value_of_another_metric_or_mode_does_not_count(tmp_path: Path) -> None:
    for best, before in (
        (("score", "min"), {}),
        (("score", "min"), {"metric": "score", "mode": "min", "value": 1.0, "step": 1}),
        (("score", "max"), {}),
        (("other", "max"), {}),
    ):
        own = Training(tmp_path / "run", best=best)
        assert own.session.best == before
        for step in own.session.steps(own.session.step + 1):
            own.step()
            own.session.log(score=float(step), other=1.0)
        own.session.close()


@pytest.mark.more
def test_a_raised_total_of_a_cosine_schedule_works_as_the_page_says(tmp_path: Path) -> None:
    """docs/changing-a-run.md: the rate falls from where it was until the new end."""

    def train(total: int, stop: int) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        session = Session(model, optimizer, schedule, directory=tmp_path / "run")
        schedule.T_max = total
        rates = []
        for step in session.steps(total):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if step == stop:
                break
        session.close()
        return rates

    rates = train(10, 8) + train(20, 20)
    assert len(rates) == 20
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.more
def test_a_changed_rate_with_a_schedule_works_as_the_page_says(tmp_path: Path) -> None:
    def train(rate: float, stop: int) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        session = Session(model, optimizer, schedule, directory=tmp_path / "run")
        for group in optimizer.param_groups:
            group["lr"] *= rate / group["initial_lr"]
            group["initial_lr"] = rate
        schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        rates = []
        for _ in session.steps(stop):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        session.close()
        return rates

    assert train(1.0, 2) + train(0.5, 3) + train(0.5, 4) == [1.0, 1 / 2, 0.5 / 3, 0.5 / 4]


@pytest.mark.more
def test_changed_values_of_optimizer_and_schedule_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(rate: float, total: int) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        session = Session(model, optimizer, schedule, directory=tmp_path / "run")
        for _ in session.steps(session.step + 2):
            optimizer.step()
            schedule.step()
        session.close()
        return [group["lr"] for group in optimizer.param_groups]

    train(1.0, 10)
    train(1.0, 10)
    assert "changed" not in capsys.readouterr().out
    train(2.0, 20)
    said = capsys.readouterr().out
    assert "optimizer lr 1.0 → 2.0" in said
    assert "scheduler T_max 10 → 20" in said
    train(2.0, 20)
    assert "changed" not in capsys.readouterr().out


# --- forks ---------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("how", ["exit", "error"])
def test_a_forked_child_that_ends_leaves_the_session_alone(tmp_path: Path, how: str) -> None:
    """It ends as any process, by the interpreter's exit, in a child of this test."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os, sys, time, torch
from pathlib import Path
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer import Session
model = torch.nn.Linear(2, 1); optimizer = torch.optim.AdamW(model.parameters())
run = Path({str(tmp_path / "run")!r})
def wait_for(step):
    ends_at = time.monotonic() + 30
    found = ()
    while step not in [manifest.step for manifest in found if manifest]:
        assert time.monotonic() < ends_at, f"no commit of step {{step}}"
        time.sleep(0.02)
        found = list(map(read_manifest, RunPaths(run).list_checkpoints()))
def train(session):
    for step in session.steps(20):
        model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        session.log(loss=1.0)
        if step in (9, 14, 19):
            # Otherwise a save may be skipped while slow storage writes the ones before.
            wait_for(step - 4)
        if step == 7:
            child = os.fork()
            if child == 0:
                if {how!r} == "error":
                    raise ValueError("of the child")
                sys.exit(0)
            began = time.monotonic()
            while not (found := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() - began > 30:
                    os.kill(child, 9); os.waitpid(child, 0)
                    raise SystemExit("the child hangs")
                time.sleep(0.05)
session = Session(model, optimizer, directory=run, interval=5)
if {how!r} == "error":
    with session:
        train(session)
else:
    train(session)
    session.close()
print("done", session.step)
"""
    )
    errors = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(errors), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "done 20" in done.stdout
    assert not errors.exists(), json.loads(errors.read_text())
    found = map(read_manifest, RunPaths(tmp_path / "run").list_checkpoints())
    assert {manifest.step for manifest in found if manifest} == {5, 10, 15, 20}


@pytest.mark.more
def test_a_helper_that_outlives_a_killed_rank_does_not_block_the_next_launch(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os, signal, time, torch
from holdfast.trainer import Session
model = torch.nn.Linear(2, 1); optimizer = torch.optim.AdamW(model.parameters())
session = Session(model, optimizer, directory={str(tmp_path / "run")!r}, interval=2)
print("resumed at", session.step, flush=True)
is_first = session.step == 0
for step in session.steps(session.step + 6):
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    if step == 5 and is_first:
        helper = os.fork()
        if helper == 0:
            time.sleep(200); os._exit(0)
        print(helper, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
session.close()
"""
    )

    def launch() -> list[str]:
        with open(tmp_path / "output.txt", "w+") as stream:
            subprocess.run([sys.executable, str(program)], stdout=stream, timeout=60, check=False)
            stream.seek(0)
            return [line for line in stream.read().splitlines() if not line.startswith("holdfast")]

    helper = int(launch()[1])
    try:
        (said,) = launch()
    finally:
        os.kill(helper, signal.SIGKILL)
    assert int(said.split()[-1]) >= 4


@pytest.mark.more
@pytest.mark.parametrize("in_epochs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_on_one_rank_only_is_an_error_that_names_the_ranks(
    tmp_path: Path, in_epochs: bool
) -> None:
    ended = ranks_of(tmp_path, "if session.rank == 0: session.checkpoint()", in_epochs=in_epochs)
    where = "the end of the epoch after step 3" if in_epochs else "step 3"
    assert f"SessionError: {where}: rank 0 came to save a checkpoint, and rank 1 went on" in ended


def ranks_of(folder: Path, line: str, *, in_epochs: bool) -> str:
    """What two ranks under torchrun print that run `line` in step 3, or at the end of an epoch."""
    program = folder / "program.py"
    program.write_text(
        f"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from holdfast.trainer import Session
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, interval=1000, directory={str(folder / "run")!r})
def steps(total):
    for step in session.steps(total):
        model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        if step == 3 and not {in_epochs}:
            {line}
if {in_epochs}:
    for epoch in session.epochs(2):
        steps(3 * epoch + 3)
        if epoch == 0:
            {line}
else:
    steps(6)
session.close()
"""
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(program)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        torchrun, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.more
def test_a_rank_whose_loader_fails_to_start_exits(tmp_path: Path) -> None:
    """Its workers ignore stop signals by then, and the interpreter would wait for them."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from holdfast.trainer import Session
def fail(worker):
    raise RuntimeError("this worker cannot start")
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = StatefulDataLoader(list(range(64)), num_workers=2, worker_init_fn=fail)
Session(model, optimizer, directory={str(tmp_path / "run")!r}, per_rank={{"loader": loader}})
"""
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    assert "this worker cannot start" in done.stderr
