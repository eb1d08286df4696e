"""Lightning under Holdfast: interrupted programs equal uninterrupted ones, and wrong settings.

The real Lightning runs on two ranks over gloo. `lightning_cases` forks them. One test starts its
program as a user would, as a job of the local executor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tests.frameworks import lightning_program
from tests.frameworks.lightning_cases import count_equal, everywhere
from tests.frameworks.lightning_program import BATCH, SAMPLES
from tests.process.local_runs import LocalRun, processes_of, send, wait_until
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import SumMetric

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.records.documents import RunRecord, write_document
from holdfast.contracts.states import AttemptState
from holdfast.trainer import Session
from holdfast.trainer.frameworks.lightning import Holdfast
from holdfast.trainer.frameworks.lightning.callback import check
from holdfast.trainer.frameworks.lightning.fit import FORMAT, SharedState, TrainerFit
from holdfast.workers.runs.feasibility import Feasibility

PROGRAM: Final = Path(lightning_program.__file__)
EXAMPLE: Final = PROGRAM.parents[2] / "examples" / "lightning"
SEED: Final = 7
RANKS: Final = 2
# Kind → cases: a signal, a place, its number there, the steps between checkpoints. The last batch
# of "plain" is number 7: the run then stops before its last evaluation.
QUICK: Final = {
    "plain": [["term", "batch", 7, 100], ["kill", "batch", 6, 2]],
    "often": [["kill", "evaluation", 7, 2]],
    # The second epoch begins with batch 8.
    "stateful_alone": [["kill", "batch", 8, 8]],
    # The shorter loader begins again with batch 5.
    "several_alone": [["kill", "batch", 7, 2]],
    # Three batches are one step of the second epoch.
    "accumulating": [["term", "batch", 12, 100]],
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "plain" else pytest.param(kind, marks=pytest.mark.more) for kind in QUICK],
)
def test_interrupted_programs_equal_uninterrupted_ones(kind: str, tmp_path: Path) -> None:
    """Samples, losses, rates, evaluations, epoch metrics, random numbers and the best file."""
    cases = QUICK[kind]
    assert count_equal("lightning_program", {kind: cases}, tmp_path, timeout_s=300) == len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(lightning_program.KINDS))
def test_every_kind_is_interrupted_everywhere(kind: str, tmp_path: Path) -> None:
    places = range(3, 11) if kind in lightning_program.AT_ONE_RANK else range(8)
    cases = everywhere(places)
    assert count_equal("lightning_program", {kind: cases}, tmp_path, timeout_s=590) == len(cases)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    one = LocalRun(
        tmp_path / "root",
        program=PROGRAM,
        checkpoint={"interval": 2},
        folder=str(tmp_path),
        kind="plain",
        trainer={"strategy": "auto"},
        sleep_s=0.8,
        hurry=str(tmp_path / "hurry"),
    )
    yield one
    one.end_all()


@pytest.mark.more
def test_run_is_killed_stopped_and_finished_on_one_rank(run: LocalRun, tmp_path: Path) -> None:
    """A rank is killed, the run is stopped, and one rank finishes with the same global batches."""
    first = run.submit()
    run.wait_for_step(first, 2)
    ranks = [one for one in processes_of(run.paths) if one.environ().get("RANK") == "1"]
    ranks[-1].kill()
    wait_until(lambda: len(run.events(EventKind.RESUMED)) > 1, "the second launch")
    run.wait_for_step(first, 4)
    send(run.claim(first).pid, signal.SIGTERM)
    assert run.wait_for_end().state is AttemptState.PREEMPTED
    problem = Feasibility.of(run.history()).problem(4)
    assert "4 ranks cannot share its global batch evenly, which has 6 parts" in str(problem)
    (tmp_path / "hurry").touch()
    run.submit(gpus=1)
    last = run.wait_for_end()
    assert (last.state, last.evidence) == (AttemptState.COMPLETED, ()), last
    assert trained_ids(tmp_path) == ids_in_order()
    metrics = (run.paths.metrics_of(2, 1)).read_text()
    assert "train_loss_step" in metrics
    assert "val_loss" in metrics


def trained_ids(folder: Path) -> list[list[int]]:
    """The sorted samples of each step on all ranks together, as each rank last trained on them."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for path in folder.glob("notes-*.jsonl"):
        last = dict(json.loads(line) for line in path.read_text().splitlines())
        for key, facts in last.items():
            if key.startswith("batch "):
                found[int(key.removeprefix("batch "))] += facts["ids"]
    return [sorted(found[number]) for number in sorted(found)]


def ids_in_order() -> list[list[int]]:
    """The sorted samples of each step of two epochs, in the order of `DistributedSampler`."""
    found = []
    for epoch in range(2):
        draw = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(SAMPLES, generator=draw).view(-1, BATCH * RANKS)
        found += [sorted(part) for part in order.tolist()]
    return found


@pytest.mark.slow
def test_example_is_trained_and_tested(tmp_path: Path) -> None:
    """On one rank, which torchrun starts. Its last checkpoint has the metrics of its evaluation."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    ended = subprocess.run(
        [*torchrun, str(EXAMPLE / "train.py")],
        cwd=tmp_path,
        env={**os.environ, "HOLDFAST_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "test_loss" in ended.stdout
    last = read_manifest(RunPaths(tmp_path / "train").list_checkpoints()[-1])
    assert last is not None
    assert last.step == 4 * 2048 // 16
    assert "val_loss" in last.metrics


# --- one rank in this process -------------------------------------------------------------------


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def of_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `fit` has run, and torchrun did not start this process."""
    monkeypatch.setattr(Holdfast, "_has_fitted", False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def trainer_with(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    return L.Trainer(
        **{"max_steps": 4, "enable_checkpointing": False, **options},
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def holdfast(folder: Path) -> Holdfast:
    return Holdfast(directory=folder / "run", interval=1000, snapshots="off")


def loader() -> DataLoader[Any]:
    return DataLoader(cast(Dataset[Any], torch.ones(8, 2)), 2)


def fit(trainer: Any, **options: Any) -> Tiny:
    model = Tiny()
    trainer.fit(model, loader(), **options)
    return model


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Holdfast twice"):
        fit(trainer_with(tmp_path, holdfast(tmp_path), holdfast(tmp_path)))


def test_a_subclass_gets_the_events_of_steps_that_the_callback_leaves_out(tmp_path: Path) -> None:
    batches: list[int] = []

    class Counting(Holdfast):
        def on_train_batch_end(self, *given: Any) -> None:
            super().on_train_batch_end(*given)
            batches.append(given[-1])

    one = Counting(directory=tmp_path / "run", interval=1000, snapshots="off")
    fit(trainer_with(tmp_path, one))
    assert batches == [0, 1, 2, 3]
    assert (one.on_before_backward, holdfast(tmp_path).on_train_batch_end) == (None, None)


def test_second_fit_of_a_process_is_refused(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, holdfast(tmp_path))
    fit(trainer)
    with pytest.raises(SpecError, match=r"calls trainer\.fit a second time"):
        fit(trainer_with(tmp_path, holdfast(tmp_path)))


OTHERS: Final[dict[str, Callable[[Path], Callback]]] = {
    "OnExceptionCheckpoint": OnExceptionCheckpoint,
    "LearningRateFinder": lambda _: LearningRateFinder(),
    "BatchSizeFinder": lambda _: BatchSizeFinder(),
    "BaseFinetuning": lambda _: BaseFinetuning(),
    "BackboneFinetuning": lambda _: BackboneFinetuning(),
    "StochasticWeightAveraging": lambda _: StochasticWeightAveraging(0.1),
    "ModelPruning": lambda _: ModelPruning("l1_unstructured"),
    "SpikeDetection": lambda _: SpikeDetection(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_callbacks_that_cannot_work_are_refused(kind: str, tmp_path: Path) -> None:
    name = "BaseFinetuning" if kind == "BackboneFinetuning" else kind
    with pytest.raises(SpecError, match=f"the callback {name} cannot work"):
        check(
            trainer_with(
                tmp_path, holdfast(tmp_path), OTHERS[kind](tmp_path), enable_checkpointing=True
            )
        )


class Drawing(IterableDataset[Any]):
    """A stream that shuffles, by the global generator or by one of its own."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self.own = own

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(16, generator=self.own).tolist():
            yield torch.full((2,), float(number))


@pytest.mark.more
def test_a_stream_that_draws_where_the_model_draws_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    trainer = trainer_with(tmp_path, holdfast(tmp_path))
    with pytest.raises(SpecError, match="stream Drawing draws from the global random") as caught:
        trainer.fit(Tiny(), DataLoader(Drawing(), 2))
    assert trainer.global_step == 0
    # What the message advises is accepted.
    assert "its own generator" in str(caught.value)
    for stream, workers in ((Drawing(torch.Generator()), 0), (Drawing(), 1)):
        Holdfast._has_fitted = False
        accepted = trainer_with(tmp_path, Holdfast(directory=tmp_path / f"run{workers}"))
        accepted.fit(Tiny(), DataLoader(stream, 2, num_workers=workers))
        assert accepted.global_step == 4


class Rows(IterableDataset[Any]):
    """A stream that names no shards. Another process may find other samples in it."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.first, self.first + 16):
            yield {"row": torch.full((2,), float(number)), "name": str(number)}


class OfRows(Tiny):
    """Fails in a batch, and notes the rows of the others."""

    def __init__(self, fails_in: int) -> None:
        super().__init__()
        self.fails_in, self.rows = fails_in, list[list[float]]()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == self.fails_in:
            raise ArithmeticError("no such loss")
        self.rows.append(batch["row"][:, 0].tolist())
        return super().training_step(batch["row"], number)


@pytest.mark.more
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_shards_continues_only_if_it_gives_the_same_again(
    tmp_path: Path, workers: int
) -> None:
    """Its batches are read again at a resume, and compared with those of the former launch."""

    def continued(first: int, fails_in: int = -1) -> list[list[float]]:
        Holdfast._has_fitted, model = False, OfRows(fails_in)
        each_step = Holdfast(directory=tmp_path / "run", interval=1, snapshots="off")
        trainer = trainer_with(tmp_path, each_step, max_steps=6)
        trainer.fit(model, DataLoader(Rows(first), 2, num_workers=workers))
        return model.rows

    with pytest.raises(ArithmeticError):
        continued(0, fails_in=3)
    with pytest.raises(CheckpointError, match="Rows gave other samples when the first") as caught:
        continued(1)
    assert "StreamDataset" in str(caught.value)
    # The last step before the failure may have been too early for its checkpoint.
    trained = 3 if "first 3" in str(caught.value) else 2
    assert continued(0) == [[2 * at, 2 * at + 1] for at in range(trained, 6)]


def test_requeue_by_lightning_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("NTASKS", "1"), ("PROCID", "0"), ("LOCALID", "0"), ("NODEID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    environment = SLURMEnvironment(auto_requeue=True)
    check(trainer_with(tmp_path, holdfast(tmp_path), plugins=[environment], strategy="ddp"))
    assert not environment.auto_requeue
    assert "Lightning's requeue on Slurm is off" in "".join(capsys.readouterr())


def test_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, directory=tmp_path / "run", snapshots="off") as session:
        for _ in session.steps(2):
            model.training_step(torch.ones(2, 2), 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with pytest.raises(CheckpointError, match="not made by Holdfast's callback for Lightning"):
        fit(trainer_with(tmp_path, holdfast(tmp_path)))


def test_state_of_a_newer_version_is_refused() -> None:
    newer = {"format": FORMAT + 1, "lightning": "2.6.9"}
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 1}.*2\.6\.9"):
        SharedState(cast(TrainerFit, None)).load_state_dict(newer)


def test_ckpt_path_is_the_start_of_the_first_attempt_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues the steps of the file, and later does not need the file."""
    start = tmp_path / "start.ckpt"
    before = trainer_with(tmp_path, max_steps=3)
    fit(before)
    before.save_checkpoint(start)
    first = trainer_with(tmp_path, holdfast(tmp_path), max_steps=5)
    fit(first, ckpt_path=str(start))
    assert first.global_step == 5
    (made,) = RunPaths(tmp_path / "run").list_checkpoints()
    assert made.name.startswith("step-00000002")
    start.unlink()
    monkeypatch.setattr(Holdfast, "_has_fitted", False)
    again = trainer_with(tmp_path, holdfast(tmp_path), max_steps=7)
    fit(again, ckpt_path=str(start))
    assert again.global_step == 7


def test_metrics_that_a_hook_resets_at_the_start_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates reset a metric of all epochs in `on_train_start`, which each launch calls."""

    class Counting(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.seen = SumMetric()

        def on_train_start(self) -> None:
            self.seen.reset()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.seen(1)
            return super().training_step(batch, number)

    for steps in (3, 6):
        monkeypatch.setattr(Holdfast, "_has_fitted", False)
        model = Counting()
        trainer_with(tmp_path, holdfast(tmp_path), max_steps=steps).fit(model, loader())
        assert model.seen.compute() == steps


def test_best_file_stays_known_when_the_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra gives each launch a separate folder, whose name is the time."""
    found = []
    for steps in (2, 4):
        monkeypatch.setattr(Holdfast, "_has_fitted", False)
        saver = ModelCheckpoint(
            tmp_path / f"folder-{steps}", monitor="level", mode="max", every_n_train_steps=1
        )

        class Leveling(Tiny):
            def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
                self.log("level", float([0, 9, 1, 2][number]))
                return super().training_step(batch, number)

        trainer = trainer_with(
            tmp_path, saver, holdfast(tmp_path), enable_checkpointing=True, max_steps=steps
        )
        trainer.fit(Leveling(), loader())
        found.append((saver.best_model_path, saver.best_model_score))
    first, last = found
    assert Path(first[0]).parent.name == "folder-2"
    assert last == first
    assert Path(first[0]).exists()
    # New files would be in the new folder.
    assert saver.dirpath == str(tmp_path / "folder-4")


def test_fork_leaves_the_files_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, fork = RunPaths(tmp_path / "parent"), RunPaths(tmp_path / "fork")
    folders = []
    for run, steps in ((parent, 2), (fork, 4)):
        monkeypatch.setattr(Holdfast, "_has_fitted", False)
        saver = ModelCheckpoint(every_n_train_steps=1)
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=[saver, Holdfast(directory=run.directory, interval=1000, snapshots="off")],
            logger=CSVLogger(tmp_path),
            enable_progress_bar=False,
        )
        trainer.fit(Tiny(), loader())
        folders.append(saver.dirpath)
        record = {
            "uid": "1" * 32,
            "run": fork.name,
            "name": fork.name,
            "root": str(tmp_path),
            "created_at": 1.0,
            "spec": {},
            "spec_digest": "",
            "forked_path": str(parent.list_checkpoints()[-1]),
        }
        fork.directory.mkdir(exist_ok=True)
        write_document(fork.spec, RunRecord(**record))
    assert os.listdir(folders[0]) == ["epoch=0-step=2.ckpt"]
    assert os.listdir(folders[1]) == ["epoch=1-step=4.ckpt"]


def test_failure_in_a_step_releases_the_session(tmp_path: Path) -> None:
    class Failing(Tiny):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == 2:
                raise ArithmeticError("no such loss")
            return super().training_step(batch, number)

    with pytest.raises(ArithmeticError, match="no such loss"):
        trainer_with(tmp_path, holdfast(tmp_path)).fit(Failing(), loader())
    model = Tiny()
    with Session(model, directory=tmp_path / "other", snapshots="off") as session:
        assert session.step == 0


class Paused(Callback):
    """Stops the flusher before the second save, and looks for its file `path` after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.was_there: bool | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == 1:
            # Flushers of earlier tests may have ended without having been waited for.
            self._flusher = next(
                child
                for child in psutil.Process().children()
                if child.status() != psutil.STATUS_ZOMBIE
                and "holdfast.trainer.flusher" in child.cmdline()
            )
            self._flusher.suspend()

    def on_train_end(self, *_: Any) -> None:
        self.was_there = self._path.exists()
        self._flusher.resume()


def test_model_checkpoint_does_not_wait_for_storage(tmp_path: Path) -> None:
    """Its file is written in the background, and equals the one that Lightning itself writes."""
    found = []
    for name in ("bare", "ours"):
        torch.manual_seed(1)
        saver = ModelCheckpoint(tmp_path / name, every_n_train_steps=1)
        paused = Paused(tmp_path / name / "epoch=0-step=2.ckpt")
        extra = [paused, holdfast(tmp_path)] if name == "ours" else []
        trainer = trainer_with(tmp_path, saver, *extra, enable_checkpointing=True, max_steps=2)
        fit(trainer)
        assert saver.best_model_path == str(tmp_path / name / "epoch=0-step=2.ckpt")
        found.append(torch.load(saver.best_model_path, weights_only=False))
    assert paused.was_there is False
    assert os.listdir(tmp_path / "ours") == ["epoch=0-step=2.ckpt"]
    bare, ours = found
    assert torch.equal(bare["state_dict"]["layer.weight"], ours["state_dict"]["layer.weight"])
    assert bare["loops"] == ours["loops"]
    assert bare["optimizer_states"] == ours["optimizer_states"]


def test_file_that_the_program_saves_is_there_at_once(tmp_path: Path) -> None:
    class Saving(Callback):
        was_there = False

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "mine.ckpt")
            self.was_there = (tmp_path / "mine.ckpt").exists()

    saving = Saving()
    fit(trainer_with(tmp_path, saving, holdfast(tmp_path), max_steps=1))
    assert saving.was_there


def test_weights_equal_those_of_bare_lightning(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bare = fit(trainer_with(tmp_path, max_steps=20, max_epochs=-1))
    torch.manual_seed(1)
    ours = fit(trainer_with(tmp_path, holdfast(tmp_path), max_steps=20, max_epochs=-1))
    assert torch.equal(bare.layer.weight, ours.layer.weight)
