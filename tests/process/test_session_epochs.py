"""Loops over epochs: the contents of checkpoints around an epoch end, and refused loops."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import KeyMismatchError, SaveError, SessionError, SpecError
from holdfast.trainer import Session, load_checkpoint

SAMPLES = 10
GLOBAL_BATCH = 4


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return SAMPLES


class Training:
    """A model, its session in a folder, and a loader of its sample ids."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.run = RunPaths(directory)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        settings = {"interval": 100, "snapshots": "off", **more}
        self.session = Session(
            self.model, self.optimizer, self.scheduler, directory=directory, **settings
        )
        sampler = self.session.distributed_sampler(SAMPLES, GLOBAL_BATCH)
        self.loader: Any = DataLoader(Numbers(), batch_size=GLOBAL_BATCH, sampler=sampler)

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(ids[:, None].float() / SAMPLES).sum().backward()
        self.optimizer.step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def saved(self, step: int) -> tuple[Manifest, dict[str, Any]]:
        """Manifest and train state of the newest checkpoint of `step`."""
        path = [p for p in self.run.list_checkpoints() if f"step-{step:08d}" in p.name][-1]
        manifest = read_manifest(path)
        assert manifest is not None
        return manifest, json.loads((path / "train_state.json").read_text())


def test_checkpoint_of_the_last_step_of_an_epoch_includes_the_epoch_end(tmp_path: Path) -> None:
    """Ten samples in batches of four give epochs of 3, 2 and 3 steps; every step saves."""
    own = Training(tmp_path / "run", interval=1, best=("score", "max"))
    for epoch in own.session.epochs(3):
        for ids in own.session.batches(own.loader):
            own.step(ids)
        own.session.log(score=epoch)
        own.scheduler.step()
        own.session._saver.wait()
    own.session.close()
    for epoch, step in ((0, 3), (1, 5), (2, 8)):
        manifest, document = own.saved(step)
        assert (document["epoch"], document["in_epoch"]) == (epoch + 1, False)
        assert manifest.metrics["score"] == epoch
        best = {"metric": "score", "mode": "max", "value": epoch, "step": step}
        assert document["best"] == best
    _, document = own.saved(2)
    assert (document["epoch"], document["in_epoch"]) == (0, True)


def test_checkpoint_requested_at_an_epoch_end_is_of_the_last_step(tmp_path: Path) -> None:
    own = Training(tmp_path / "run", snapshots=1)
    for epoch in own.session.epochs(2):
        for ids in own.session.batches(own.loader):
            own.step(ids)
        if epoch == 0:
            own.session.checkpoint()
            evaluated = own.model.weight.item()
    own.session.close()
    manifest, document = own.saved(3)
    assert (manifest.reason, document["epoch"]) == ("request", 1)
    saved = nn.Linear(1, 1)
    load_checkpoint(own.run.checkpoint(manifest.name), saved, strict=False)
    assert saved.weight.item() == evaluated != own.model.weight.item()


@pytest.mark.parametrize("is_trained", [True, False])
def test_loop_left_by_break_in_an_epoch_counts_a_trained_step(
    tmp_path: Path, is_trained: bool
) -> None:
    own = Training(tmp_path / "run")
    epochs = own.session.epochs(2)
    next(epochs)
    for ids in own.session.batches(own.loader):
        if is_trained:
            own.step(ids)
        break
    next(epochs)
    assert (own.session.epoch, own.session.step) == (1, is_trained)
    own.session.close()


def test_loop_left_inside_an_optimizer_step_is_refused_at_the_epoch_end(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    epochs = own.session.epochs(2)
    next(epochs)
    for _ in own.session.batches(own.loader):
        own.session._optimizers._begin(own.optimizer, (), {})
        break
    with pytest.raises(SpecError, match="was left in the middle of this step"):
        next(epochs)
    own.session.close()


def test_rest_of_an_epoch_that_ends_early_is_in_the_next_epoch(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    seen: list[list[int]] = []
    for epoch in own.session.epochs(2):
        for ids in own.loader:
            seen.append(ids.tolist())
            if own.session.boundary() or (epoch == 0 and len(seen) == 2):
                break
    own.session.close()
    order = own.session._position.order(SAMPLES, GLOBAL_BATCH)
    assert seen == [order.step_ids(step).tolist() for step in range(1, 6)]


def test_epochs_with_a_custom_length_are_saved(tmp_path: Path) -> None:
    """The program's epochs have four steps, those of its data two and three; no save waits."""
    own = Training(tmp_path / "run", interval=1)
    for epoch in own.session.epochs(3):
        for _ in own.session.steps(4 * (epoch + 1)):
            own.session.batch(SAMPLES, GLOBAL_BATCH)
            own.session._saver.wait()
    own.session.close()
    assert own.session.step == 12
    steps = {int(path.name[5:13]) for path in own.run.list_checkpoints()}
    # The first error is detected one step later.
    assert set(range(5, 13)) <= steps


def test_loader_with_its_own_order_is_refused(tmp_path: Path) -> None:
    own = Training(tmp_path / "run")
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH, shuffle=True)
    with pytest.raises(SpecError, match=r"RandomSampler.*whose order no resume can continue"):
        next(own.session.batches(loader))
    stream = torch.utils.data.ChainDataset([])
    web = webdataset.WebLoader([1, 2, 3], batch_size=2)
    for loader, kind in ((DataLoader(stream, batch_size=2), "DataLoader"), (web, "WebLoader")):
        with pytest.raises(SpecError, match=f"this {kind} reads a stream without a state"):
            next(own.session.batches(loader))
    own.session.close()


class Holder:
    """An object of a program that saves its loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def test_a_loader_s_own_state_counts_only_if_checkpoints_have_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "shuffle": True}
    seeded = StatefulDataLoader(Numbers(), generator=torch.Generator(), **given)
    loaders = [StatefulDataLoader(Numbers(), **given) for _ in range(3)]
    nodes_loader = nodes.Loader(nodes.IterableWrapper([1, 2, 3]))
    saved = {"seeded": seeded, "loader": loaders[0], "holder": Holder(loaders[1])}
    own = Training(tmp_path / "run", per_rank=saved)
    with pytest.raises(SpecError, match="its own generator"):
        next(own.session.batches(seeded))
    for unsaved in (loaders[2], nodes_loader):
        kind = type(unsaved).__name__
        with pytest.raises(SpecError, match=f"the state of this {kind}, .*per_rank"):
            next(own.session.batches(unsaved))
    for loader in loaders[:2]:
        assert next(own.session.batches(loader)).shape == (4,)
        own.step(torch.zeros(4))
    own.session.close()


def test_a_second_session_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    first = Training(tmp_path / "first")
    with pytest.raises(SessionError, match="already has a Session; expected one at a time"):
        Training(tmp_path / "second")
    for _ in first.session.steps(2):
        pass
    first.session.close()
    second = Training(tmp_path / "second")
    second.session.close()


def test_session_can_be_created_after_a_failed_constructor(tmp_path: Path) -> None:
    first = Training(tmp_path / "run")
    for _ in first.session.steps(2):
        pass
    first.session.close()
    model = nn.Linear(2, 1)
    with pytest.raises(KeyMismatchError) as caught:
        Session(model, directory=tmp_path / "run")
    # The exception still references the frames, and so the session that failed.
    assert caught.value.reshaped
    assert "does not fit this program's state" in str(caught.value)
    session = Session(model, directory=tmp_path / "run", exclude=["model", "optimizer"])
    assert session.step == 2
    session.close()


def test_save_fails_after_the_flush_timeout_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_FLUSH_TIMEOUT_S", "1.5")
    own = Training(tmp_path / "run")
    flusher_supervisor = own.session._context.flusher_supervisor
    assert flusher_supervisor is not None
    flusher = flusher_supervisor._process.pid
    later = threading.Timer(3.0, os.kill, (flusher, signal.SIGCONT))
    own.session.boundary()
    os.kill(flusher, signal.SIGSTOP)
    later.start()
    with pytest.raises(
        SaveError,
        match="the last checkpoint, of step 1, was not committed: still being written after 2 s",
    ):
        own.session.close()
    later.join()
