"""Each public member and parameter of a program's interface has an effect, and refuses bad values.

The members are enumerated by code. One without a row fails the test.
"""

from __future__ import annotations

import inspect
import json
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.rank_programs import ROOT
from torch import nn

from holdfast.contracts import environment
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, HoldfastError, KeyMismatchError
from holdfast.trainer import ElasticSampler, Session, load_checkpoint, load_pretrained
from holdfast.trainer.config import config
from holdfast.trainer.data.order import DataOrder
from holdfast.trainer.streams import Counted
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker

SAMPLES, BATCH = 64, 8
INTERFACE: Final[Mapping[str, Callable[..., Any]]] = {
    "Session": Session,
    "load_checkpoint": load_checkpoint,
    "load_pretrained": load_pretrained,
    "ElasticSampler": ElasticSampler,
    "config": config,
}
ATTRIBUTES: Final = ("best", "resumed_from", "seed")
# Effects that need several ranks or processes, and the tests that observe them.
ELSEWHERE: Final = {
    "Session(mesh)": "tests/process/test_pipeline.py",
    "Session(planner)": "tests/process/test_session_fit.py",
}


def knobs() -> set[str]:
    """Every member and parameter, such as `Session(seed)`, `Session.step` and `Session.log()`."""
    found = {f"{name}({p})" for name, made in INTERFACE.items() for p in parameters(made)}
    found |= {f"Session.{name}" for name in ATTRIBUTES}
    for name, member in inspect.getmembers(Session, lambda one: not isinstance(one, type)):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found.add(f"Session.{name}")
            continue
        found |= {f"Session.{name}({p})" for p in parameters(member) or ("",)}
    return found


def parameters(made: Callable[..., object]) -> list[str]:
    names = inspect.signature(made).parameters
    return [name for name in names if name != "self" and not name.startswith("_")]


class Box:
    """An object with a state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Told(Tracker):
    """A tracker that remembers what it was given."""

    name = "told"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def open(self, run: TrackedRun) -> str:
        return run.uid

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self, *, is_orderly: bool) -> None:
        self.rows.append((0, {"orderly": float(is_orderly)}))


class Parts:
    """What a program makes before its session."""

    def __init__(self, seed: int, *names: str, size: int = 4) -> None:
        torch.manual_seed(seed)
        self.size = size
        layers = [(name, nn.Linear(size, size)) for name in names or ("first", "last")]
        self.model: Any = nn.Sequential(OrderedDict(layers))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.box, self.own = Box(float(seed)), Box(float(seed))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.size)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def session(self, directory: Path, **options: Any) -> Session:
        given = {"interval": 2, "snapshots": "off", **options}
        extra, own = {"box": self.box}, {"own": self.own}
        return Session(
            self.model,
            self.optimizer,
            self.scheduler,
            extra=extra,
            per_rank=own,
            directory=directory,
            **given,
        )


def steps_on_disk(directory: Path) -> dict[int, str]:
    found = [read_manifest(path) for path in RunPaths(directory).list_checkpoints()]
    return {one.step: one.reason for one in found if one is not None}


def notes_of(directory: Path) -> str:
    return "".join(path.read_text() for path in RunPaths(directory).directory.rglob("rank*.jsonl"))


Facts = dict[str, bool]


def trained(folder: Path) -> Facts:
    """The first launch of a run, with each option set to another value than its default."""
    parts, told = Parts(1), Told()
    session = parts.session(folder / "a", seed=7, best=("loss", "max"))
    session.track(told)
    order, other = (DataOrder(samples=SAMPLES, global_batch=BATCH, seed=s) for s in (7, 0))
    ids, facts = [session.batch(SAMPLES, BATCH, ahead=1).tolist()], {}
    for step in session.steps(5):
        ids.append(session.batch(SAMPLES, BATCH).tolist())
        before = session._record.beat_at
        with session.phase("eval"):
            facts["Session.phase(name)"] = session._record.phase.name == "EVAL"
            session.beat()
        facts["Session.beat()"] = session._record.beat_at > before
        parts.step()
        parts.box.value = parts.own.value = float(step)
        session.log(loss=float(step % 4))
        if step == 3:
            session.checkpoint()
    session.close()
    saved = steps_on_disk(folder / "a")
    wanted = [order.rank_ids(step, 0, 1).tolist() for step in range(1, 6)]
    return facts | {
        "Session(seed)": ids[1:] == wanted and ids[1] != other.rank_ids(1, 0, 1).tolist(),
        "Session.seed": session.seed == 7,
        "Session.batch(dataset_size)": all(0 <= one < SAMPLES for step in ids for one in step),
        "Session.batch(global_batch)": {len(step) for step in ids} == {BATCH},
        "Session.batch(ahead)": ids[0] == wanted[1],
        "Session(directory)": (folder / "a" / "checkpoints").is_dir(),
        "Session.run_directory": session.run_directory == folder / "a",
        "Session(interval)": saved[2] == "interval",
        "Session.checkpoint()": saved[3] == "request" and 1 not in saved,
        "Session.steps(total)": session.step == 5 and saved[5] == "final",
        "Session.step": session.step == 5,
        "Session(best)": session.best["step"] == 3,
        "Session.best": session.best["value"] == 3.0,
        "Session.log(values)": told.rows[0] == (1, {"loss": 1.0}),
        "Session.track(tracker)": told.rows[-1] == (0, {"orderly": 1.0}),
        "Session.rank": session.rank == 0,
        "Session.world_size": session.world_size == 1,
    }


def resumed(folder: Path) -> Facts:
    """The same command again: it continues, and stops at a signal."""
    parts, first = Parts(2), Parts(1)
    for _ in range(5):
        first.step()
    session = parts.session(folder / "a", seed=7)
    moments = parts.optimizer.state_dict()["state"][0]["step"]
    facts = {
        "Session.resumed_from": str(session.resumed_from).startswith("a:step-00000005"),
        "Session(model)": torch.equal(parts.model[0].weight, first.model[0].weight),
        "Session(optimizer)": float(moments) == 5.0,
        "Session(scheduler)": parts.scheduler.last_epoch == 5,
        "Session(extra)": parts.box.value == 5.0,
        "Session(per_rank)": parts.own.value == 5.0,
    }
    before = session.stop_requested
    for step in session.steps(90):
        parts.step()
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        # The agreement takes a moment.
        time.sleep(0.05 * (step >= 7))
    with pytest.warns(DeprecationWarning, match="leave worker_init_fn out"):
        session.worker_init(0)
    facts["Session.worker_init()"] = True
    facts["Session.stop_requested"] = session.stop_requested and not before
    facts["Session.should_stop"] = session.should_stop and 7 <= session.step < 90
    session.close()
    return facts


def fitted(folder: Path) -> Facts:
    """A program with other names continues the run in the folder `a`."""
    with pytest.raises(CheckpointError):
        Parts(3, "first", "head").session(folder / "a")
    parts, other = Parts(3, "first", "head"), Parts(3, "first", "last", "new")
    rules: dict[str, Any] = {"rename": {"model.last.*": "model.head.*"}, "exclude": "optimizer"}
    session = parts.session(folder / "a", **rules)
    saved = Parts(1)
    load_checkpoint(RunPaths(folder / "a").list_checkpoints()[-1], saved.model)
    facts = {
        "Session(rename)": torch.equal(parts.model[1].weight, saved.model[1].weight),
        "Session(exclude)": not parts.optimizer.state,
    }
    session.close()
    with pytest.raises(CheckpointError):
        other.session(folder / "a")
    session = other.session(folder / "a", strict=False)
    facts["Session(strict)"] = session.step > 5
    session.close()
    return facts


def looped(folder: Path) -> Facts:
    """Epochs over loaders, with the numbers of their batches."""
    parts = Parts(4)
    session = parts.session(folder / "b", interval=100)
    sampler = session.sampler(SAMPLES, BATCH, 3)
    shuffled = session.distributed_sampler(SAMPLES, BATCH, batch_size=BATCH // 2)
    facts = {
        "Session.sampler(dataset_size)": max(map(max, sampler)) < SAMPLES,
        "Session.sampler(global_batch)": {len(ids) for ids in sampler} == {BATCH},
        "Session.sampler(total)": len(list(sampler)) == 3,
        "Session.distributed_sampler(dataset_size)": sorted(shuffled) == list(range(SAMPLES)),
        "Session.distributed_sampler(global_batch)": shuffled.local_batch == BATCH,
        "Session.distributed_sampler(batch_size)": session._position.batches_per_step == 2,
    }
    session._position.batches_per_step = 1
    seen: list[Any] = []
    for epoch in session.epochs(2):
        facts["Session.epoch"] = session.epoch == epoch
        loop = session.enumerate(["x", "y"]) if epoch else enumerate(session.batches(["x", "y"]))
        for number, batch in loop:
            seen.append((epoch, number, batch, session.first_batch))
            parts.step()
    facts["Session.epochs(total)"] = [one[0] for one in seen] == [0, 0, 1, 1]
    facts["Session.batches(loader)"] = [one[2] for one in seen[:2]] == ["x", "y"]
    facts["Session.enumerate(loader)"] = [one[1:3] for one in seen[2:]] == [(0, "x"), (1, "y")]
    facts["Session.first_batch"] = [one[3] for one in seen] == [0, 1, 0, 1]
    session.close()
    return facts


def ended(folder: Path) -> Facts:
    """Two ends before the last step: one by an exception, one by code of a framework."""
    parts = Parts(5)
    session = parts.session(folder / "c", interval=100, snapshots=1)
    for _ in islice(session.steps(9), 3):
        parts.step()
        # A snapshot is skipped while `.metadata` is made in the background, for each new plan.
        assert session._saver.engine.wait_for_metadata() is None
    before = session.has_failed
    try:
        raise ValueError("a bug of the program")
    except ValueError:
        facts = {"Session.has_failed": session.has_failed and not before}
        session.close()
    facts["Session(snapshots)"] = steps_on_disk(folder / "c") == {2: "crash"}
    parts = Parts(6)
    session = parts.session(folder / "d", interval=100)
    for _ in range(3):
        parts.step()
        facts["Session.boundary()"] = not session.boundary() and session.step > 0
    session.close(may_end_early=False)
    facts["Session.close(may_end_early)"] = '"is_declared":false' in notes_of(folder / "d").replace(
        " ", ""
    )
    return facts


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    monkeypatch.setenv(environment.NUMERICS, json.dumps({"on_nan": "stop"}))
    parts = Parts(7)
    session = parts.session(folder / "e")
    session.observe(torch.tensor(float("nan")))
    asked = session._guard.asked
    del session
    return {"Session.observe(loss)": asked == 1}


def overlapped(folder: Path) -> Facts:
    """The copies of the saves after the first one continue until `before_update`.

    Tensors of less than a mebibyte in sum are copied at once.
    """
    facts = {}
    for overlap in (False, True):
        parts = Parts(9, size=512)
        session = parts.session(folder / f"f{overlap}", interval=1, overlap=overlap)
        saver = session._saver
        for step in islice(session.steps(9), 3):
            if step == 3:
                before = saver.is_copying
                session.before_update()
                facts[f"{overlap}"] = (before, saver.is_copying) == (overlap, False)
            parts.step()
            assert saver.engine.wait_for_metadata() is None
        session.close()
    return {
        "Session(overlap)": facts["True"] and facts["False"],
        "Session.before_update()": facts["True"],
    }


def staged(folder: Path) -> Facts:
    """With one slot, the next save waits for the former one, and is not skipped."""
    found = {}
    for staging in ("memory", "single"):
        parts = Parts(10)
        session = parts.session(folder / f"s{staging}", interval=1, staging=staging)
        for _ in islice(session.steps(9), 2):
            parts.step()
        stage = session._saver.engine._stage
        found[staging] = 0 if stage is None else len(stage.slots)
        session.close()
    return {"Session(staging)": found == {"memory": 2, "single": 1}}


def loaded(folder: Path) -> Facts:
    """A checkpoint of the first run in other programs."""
    path = next(one for one in RunPaths(folder / "a").list_checkpoints())
    weights = Parts(1).model
    report = load_checkpoint(path, weights)

    def differs(load: Callable[..., object], **options: Any) -> list[str]:
        """The layers that are not those of the checkpoint."""
        parts = Parts(8)
        if load is load_checkpoint:
            load_checkpoint(path, parts.model, parts.optimizer, **options)
        else:
            load_pretrained(parts.model, path, **options)
        facts["load_checkpoint(optimizer)"] |= bool(parts.optimizer.state)
        both = parts.model.named_children(), weights.named_children()
        return [n for (n, a), (_, b) in zip(*both, strict=True) if not a.weight.equal(b.weight)]

    facts: Facts = {"load_checkpoint(optimizer)": False}
    model = Parts(8, "first", "head").model
    both: tuple[tuple[Callable[..., Any], str], ...] = (
        (load_checkpoint, "model."),
        (load_pretrained, ""),
    )
    for load, begin in both:
        name = load.__name__
        facts[f"{name}(exclude)"] = differs(load, exclude=f"{begin}last") == ["last"]
        odd = Parts(8, "first", "head").model
        given: tuple[Any, ...] = (path, odd) if begin else (odd, path)
        with pytest.raises(KeyMismatchError):
            load(*given)
        load(*given, strict=False)
        facts[f"{name}(strict)"] = odd[0].weight.equal(weights[0].weight)
        load(*given, rename={f"{begin}last.*": f"{begin}head.*"})
        facts[f"{name}(rename)"] = odd[1].weight.equal(weights[1].weight)
        facts[f"{name}(model)"] = not model[0].weight.equal(odd[0].weight)
    facts["load_checkpoint(include)"] = differs(load_checkpoint, include="model.last") == ["first"]
    facts["load_checkpoint(checkpoint)"] = report.restored == 4
    facts["load_pretrained(directory)"] = differs(load_pretrained) == []
    return facts


def sampled(folder: Path) -> Facts:
    order = DataOrder(samples=SAMPLES, global_batch=BATCH, seed=3)
    given: dict[str, Any] = {"rank": 1, "world_size": 2, "first_step": 3, "last_step": 4}
    ids = list(ElasticSampler(order, **given))
    is_right = ids == [order.rank_ids(step, 1, 2).tolist() for step in (3, 4)]
    (folder / "spec.toml").write_text("[config]\nsteps = 3\n")
    return {f"ElasticSampler({name})": is_right for name in ("order", *given)} | {
        "config(default)": config(folder / "spec.toml") == {"steps": 3}
    }


def streamed(folder: Path) -> Facts:
    """Streams over four shards of six numbers, each with another option."""
    session = Parts(11).session(folder / "t")
    numbers = {str(k): range(10 * k, 10 * k + 6) for k in range(4)}
    source, names = Counted(list(numbers), numbers.__getitem__), map("s{}".format, count())

    def batches(most: int = 100, **options: Any) -> list[Any]:
        given = {"batch_size": 4, "collate_fn": list, "name": next(names), **options}
        if "global_batch" in options:
            del given["batch_size"]
        return list(islice(session.stream(source, **given), most))

    plain = batches()
    seen = [number for batch in plain for number in batch]
    named = session.stream(source, 1, name="mine")
    facts = {
        "source": sorted(seen) == sorted(one for shard in numbers.values() for one in shard),
        "batch_size": [len(one) for one in plain] == [4] * 6,
        "global_batch": [len(one) for one in batches(global_batch=6)] == [6] * 4,
        "shuffle": batches(shuffle=True) != plain,
        "buffer": batches(shuffle=True, buffer=1) != batches(shuffle=True),
        "num_workers": sorted(chain.from_iterable(batches(num_workers=2))) == sorted(seen),
        "collate_fn": batches(1, collate_fn=sum) == [sum(plain[0])],
        "transform": batches(1, transform=float) == plain[:1],
        "drop_last": len(batches(batch_size=5, drop_last=True)) == len(batches(batch_size=5)) - 1,
        "repeat": len(batches(8, repeat=True)) == 8,
        "open_shards": batches(open_shards=2)[0] != plain[0],
        "seed": batches(shuffle=True, seed=1) != batches(shuffle=True, seed=2),
        "name": "mine" in str(session._capture()[1]) and named is not None,
        "loader": batches(1, num_workers=1, prefetch_factor=1) == plain[:1],
    }
    session.close()
    return {f"Session.stream({name})": is_seen for name, is_seen in facts.items()}


@pytest.mark.more
def test_each_member_and_parameter_has_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.CONFIG, raising=False)
    facts: Facts = {}
    for play in (
        trained,
        resumed,
        fitted,
        looped,
        ended,
        overlapped,
        staged,
        loaded,
        sampled,
        streamed,
    ):
        facts |= play(tmp_path)
    facts |= watched(tmp_path, monkeypatch)
    unseen = [name for name, is_seen in facts.items() if not is_seen]
    assert not unseen, unseen
    for path in ELSEWHERE.values():
        assert (ROOT / path).is_file()
    assert sorted(knobs()) == sorted(facts.keys() | ELSEWHERE.keys())


BAD: Final = (None, True, -1, 1 << 80, 1.5, "text", "", [1], {1: 2}, np.zeros(2))
# Values that have a meaning. Text is an iterable of batches, and the name of an excluded part.
MEANT: Final[Mapping[str, tuple[Any, ...]]] = {
    "Session(optimizer)": (None,),
    "Session(scheduler)": (None,),
    "Session(extra)": (None,),
    "Session(per_rank)": (None,),
    "Session(seed)": (-1,),
    "Session(interval)": (None,),
    "Session(snapshots)": (None,),
    "Session(overlap)": (None, True),
    "Session(staging)": (None,),
    "Session(directory)": (None, "text"),
    "Session(best)": (None,),
    "Session(mesh)": (None,),
    "Session(strict)": (True,),
    "Session(rename)": (None,),
    "Session(planner)": (None,),
    "Session.batches(loader)": ("text", "", [1], {1: 2}, "array"),
    "Session.enumerate(loader)": ("text", "", [1], {1: 2}, "array"),
    "Session.distributed_sampler(batch_size)": (None,),
    "Session.stream(shuffle)": (True,),
    "Session.stream(collate_fn)": (None,),
    "Session.stream(transform)": (None,),
    "Session.stream(drop_last)": (True,),
    "Session.stream(repeat)": (True,),
    "Session.stream(seed)": (None, -1),
    "Session.stream(name)": ("text",),
    "Session.log(values)": (True, -1, 1 << 80, 1.5),
    "Session.observe(loss)": (True, -1, 1 << 80, 1.5),
    "Session.close(may_end_early)": (True,),
    "load_checkpoint(optimizer)": (None,),
    "load_checkpoint(rename)": (None,),
    "load_checkpoint(strict)": (True,),
    "load_pretrained(directory)": ("text",),
    "load_pretrained(rename)": (None,),
    "load_pretrained(strict)": (True,),
    "load_checkpoint(exclude)": ("text",),
    "load_checkpoint(include)": ("text",),
    "load_pretrained(exclude)": ("text",),
    "config(default)": (None, "text"),
}
GOOD: Final[Mapping[str, Any]] = {
    "dataset_size": SAMPLES,
    "global_batch": BATCH,
    "total": 3,
    "order": DataOrder(samples=SAMPLES, global_batch=BATCH),
    "rank": 0,
    "world_size": 1,
    "first_step": 1,
    "last_step": 2,
    "source": Counted(["0"], lambda _: range(6)),
}


def call(knob: str, value: Any, session: Session, folder: Path) -> None:
    """Give `value` to one parameter, and good values to the required others."""
    owner, _, parameter = knob.removesuffix(")").partition("(")
    if owner.startswith("Session."):
        act: Callable[..., Any] = getattr(session, owner.removeprefix("Session."))
        made: Callable[..., object] = getattr(Session, owner.removeprefix("Session."))
    else:
        act = made = INTERFACE[owner]
    good = {**GOOD, "model": nn.Linear(1, 1), "checkpoint": folder, "directory": folder}
    needed = {
        name: good[name]
        for name, one in inspect.signature(made).parameters.items()
        if name in good and one.default is inspect.Parameter.empty and name != parameter
    }
    if owner == "Session.stream" and parameter not in ("batch_size", "global_batch"):
        needed["batch_size"] = 2
    found: Any = act(**needed, **{"loss" if parameter == "values" else parameter: value})
    if hasattr(found, "__enter__"):
        with found:
            pass
    elif hasattr(found, "__next__"):
        next(found)


def test_each_parameter_refuses_what_it_cannot_take(tmp_path: Path) -> None:
    """The error names the parameter. Nothing else happens."""
    parts = Parts(1)
    session = parts.session(tmp_path / "a")
    silent: list[str] = []
    for knob in sorted(one for one in knobs() if "(" in one and not one.endswith("()")):
        name = "loss" if knob == "Session.log(values)" else knob.removesuffix(")").split("(")[1]
        for value in BAD:
            known = "array" if isinstance(value, np.ndarray) else value
            if any(type(one) is type(known) and one == known for one in MEANT.get(knob, ())):
                continue
            try:
                call(knob, value, session, tmp_path)
            except (TypeError, ValueError, HoldfastError) as error:
                if name not in str(error):
                    silent.append(f"{knob} = {value!r}: {type(error).__name__}: {error}")
            else:
                silent.append(f"{knob} = {value!r}: accepted")
    assert not silent, "\n".join(silent)
    session.close()
