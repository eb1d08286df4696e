"""Cases of DeepSpeed programs whose ranks are forked, to save the start of Python and DeepSpeed.

    python -m tests.frameworks.deepspeed_cases FOLDER CASE…

Prints one JSON object: what each case found.
"""

from __future__ import annotations

import builtins
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from tests.frameworks.deepspeed_program import make_engine, train
from tests.process.stream_program import write_data
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.trainer import Session
from holdfast.trainer.frameworks.deepspeed import DeepSpeedSession
from holdfast.trainer.streams import StreamDataset, TextLines

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "deepspeed" / "train.py"
LAUNCH_S: Final = 60.0
STEPS: Final = 12
SAVED: Final = 4

Found = dict[str, Any]


class Launch:
    """Launches of one program in a folder. Each launch is a set of forked ranks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self._number = folder, 0
        directory = {"directory": str(folder / "run"), "interval": SAVED}
        self.settings = {"folder": str(folder), "steps": STEPS, "stage": 2, "session": directory}
        self.settings |= settings

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder / "run")

    def run(self, ranks: int, act: Callable[[Any], None] = train, **changes: Any) -> list[str]:
        """Launch `ranks` ranks and return the error of each, "" without one."""
        self._number += 1
        settings, folder = {**self.settings, **changes}, self.folder / f"launch{self._number}"
        folder.mkdir()
        pids = [fork(act, settings, rank, ranks, folder) for rank in range(ranks)]
        statuses = wait(pids)
        errors = [folder / f"error{rank}" for rank in range(ranks)]
        return [
            path.read_text() if path.exists() else f"status {status}" if status else ""
            for path, status in zip(errors, statuses, strict=True)
        ]

    def lines(self, rank: int = 0) -> list[Found]:
        path = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def record(self, rank: int = 0) -> dict[int, Found]:
        """The last line of each step."""
        return {line["step"]: line for line in self.lines(rank)}

    def losses(self) -> list[float]:
        """The mean loss of each step over the ranks that trained it."""
        records = [self.record(rank) for rank in range(2)]
        return [
            sum(record[step]["loss"] for record in records[: line["world"]]) / line["world"]
            for step, line in records[0].items()
        ]


def fork(act: Callable[[Any], None], settings: Found, rank: int, ranks: int, folder: Path) -> int:
    """Start one rank. Its error, if any, goes into a file of the folder."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
        deepspeed.init_distributed("gloo")
        act(settings)
        status = 0
    except Exception as error:
        # The rank ends here in any case, and the parent reports its error.
        traceback.print_exc()
        (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def wait(pids: list[int]) -> list[int]:
    """Wait for all ranks. If one fails, the others get a moment to fail too, and are killed."""
    statuses: dict[int, int] = {}
    give_up = time.monotonic() + LAUNCH_S
    while len(statuses) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            statuses[pid] = status
            if status:
                give_up = min(give_up, time.monotonic() + 2.0)
        elif time.monotonic() > give_up:
            for other in set(pids) - statuses.keys():
                os.kill(other, 9)
            give_up += LAUNCH_S
        else:
            time.sleep(0.005)
    return [statuses[pid] for pid in pids]


# --- what a resume restores ---------------------------------------------------------------


def whole(folder: Path) -> Found:
    """The uninterrupted run beside the one of `test_deepspeed`."""
    return {"errors": Launch(folder, steps=16).run(2), "folder": str(folder)}


def interrupted(folder: Path, stage: int) -> Found:
    """Whole, killed and terminated runs of two ranks. Equal to the bit, with dropout."""
    expected = Launch(folder / "whole", stage=stage, dropout=0.1)
    assert expected.run(2) == ["", ""]
    found: Found = {}
    for name in ("kill", "term"):
        broken = Launch(folder / name, stage=stage, dropout=0.1, **{name: [1, 6]})
        found[f"{name}, first"] = broken.run(2)
        found[f"{name}, second"] = broken.run(2)
        found[f"{name}, equal"] = [
            broken.record(rank) == expected.record(rank) for rank in range(2)
        ]
    return found


def resized(folder: Path, stage: int) -> Found:
    """A run on two ranks, then on one, then on two, beside one on two ranks only."""
    expected, changed = (Launch(folder / name, stage=stage) for name in ("whole", "changed"))
    assert expected.run(2) == ["", ""]
    errors = [changed.run(2, steps=4), changed.run(1, steps=8), changed.run(2)]
    ours, theirs = changed.record(), expected.record()
    return {
        "errors": errors,
        "worlds": [line["world"] for line in ours.values()],
        "lr": [line["lr"] for line in ours.values()] == [line["lr"] for line in theirs.values()],
        "seen": ours[STEPS]["seen"] == theirs[STEPS]["seen"],
        "apart": max(
            abs(loss / other - 1)
            for loss, other in zip(changed.losses(), expected.losses(), strict=True)
        ),
        "left": changed.paths.converted.exists(),
    }


# --- what is refused, and what is passed over ---------------------------------------------


def damaged(folder: Path) -> Found:
    """The newest checkpoint has a changed byte, the one before lacks a file of a rank."""
    made = Launch(folder, steps=SAVED * 3)
    first = made.run(2)
    oldest, middle, newest = made.paths.list_checkpoints()
    (part,) = newest.glob("*/zero_pp_rank_1_*")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (lost,) = middle.glob("*/zero_pp_rank_1_*")
    lost.unlink()
    before = {path.name: len(list(path.rglob("*"))) for path in (oldest, middle, newest)}
    second = made.run(2, steps=SAVED * 3 + 1)
    steps = [line["step"] for line in made.lines()]
    after = {path.name: len(list(path.rglob("*"))) for path in (oldest, middle, newest)}
    output = (folder / "launch2" / "output0").read_text()
    told = [line for line in output.splitlines() if "continues after" in line]
    return {"errors": [first, second], "steps": steps, "told": told, "kept": before == after}


def refused(folder: Path) -> Found:
    """What cannot be resumed: the run stays as it is, and its own program continues it."""
    made = Launch(folder, steps=SAVED)
    found: Found = {"saved": made.run(1)}
    (checkpoint,) = made.paths.list_checkpoints()
    names = sorted(path.name for path in checkpoint.rglob("*"))
    found["tried"] = made.run(1, act=try_all)
    found |= json.loads((folder / "tried.json").read_text())
    found["resumed"] = made.run(1, steps=SAVED + 1)
    found["unchanged"] = names == sorted(path.name for path in checkpoint.rglob("*"))
    found["steps"] = [line["step"] for line in made.lines()]
    return found


def try_all(settings: Found) -> None:
    """Try all that the session refuses, one after another in one process."""
    empty = {**settings, "session": {"directory": str(Path(settings["folder"]) / "empty")}}
    saved = (with_other_stage, with_plain_session, with_other_version)
    wrong = (unwrapped, twice_wrapped, two_sessions, one_micro_batch, taken_key)
    new = (*wrong, stream_of_epochs, unsaved_loader, stateless_loader)
    tries = dict.fromkeys(saved, settings) | dict.fromkeys(new, empty)
    found = {}
    for act, given in tries.items():
        try:
            act(given)
        except HoldfastError as error:
            found[act.__name__] = f"{type(error).__name__}: {error}"
    (Path(settings["folder"]) / "tried.json").write_text(json.dumps(found))


def with_other_stage(settings: Found) -> None:
    """The configuration has changed since."""
    train({**settings, "stage": 1})


def with_plain_session(settings: Found) -> None:
    """Another framework resumes the run: plain PyTorch with a Session."""
    model = torch.nn.Linear(2, 2)
    Session(model, torch.optim.AdamW(model.parameters()), **settings["session"])


def with_other_version(settings: Found) -> None:
    """Another version of DeepSpeed resumes the run."""
    version, deepspeed.__version__ = deepspeed.__version__, "0.20.1"
    try:
        train(settings)
    finally:
        deepspeed.__version__ = version


def unconvertible(folder: Path) -> Found:
    """RMSprop has a state that DeepSpeed does not convert."""
    made = Launch(folder, optimizer="RMSprop", steps=SAVED)
    return {"saved": made.run(2), "alone": made.run(1)}


def unwrapped(settings: Found) -> None:
    DeepSpeedSession(torch.nn.Linear(2, 2), **settings["session"])


def twice_wrapped(settings: Found) -> None:
    inner = make_engine(settings)
    outer, *_ = deepspeed.initialize(
        model=inner,
        optimizer=torch.optim.AdamW(inner.parameters()),
        config={
            "train_batch_size": 8,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    DeepSpeedSession(outer, **settings["session"])


def two_sessions(settings: Found) -> None:
    engine = make_engine(settings)
    first = DeepSpeedSession(engine, **settings["session"])
    try:
        DeepSpeedSession(engine, **settings["session"])
    finally:
        first.close()


def one_micro_batch(settings: Found) -> None:
    """The loop ends a step after one of four micro-batches."""
    engine = make_engine(settings)
    with DeepSpeedSession(engine, **settings["session"]) as session:
        for _ in session.steps(2):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()


def taken_key(settings: Found) -> None:
    DeepSpeedSession(make_engine(settings), {"module": 1}, **settings["session"])


# --- DeepSpeed's own loader ---------------------------------------------------------------


def loaders(folder: Path) -> Found:
    """A loop over DeepSpeed's loader is interrupted in the middle of an epoch."""
    whole, broken = (Launch(folder / name) for name in ("whole", "broken"))
    assert whole.run(2, act=over_loader) == ["", ""]
    errors = [broken.run(2, act=over_loader, term=[0, 5]), broken.run(2, act=over_loader)]
    same = [broken.record(rank) == whole.record(rank) for rank in range(2)]
    repeated = len(broken.lines()) - len(whole.lines())
    return {"errors": errors, "equal": same, "repeated": repeated}


def over_loader(settings: Found) -> None:
    """Two epochs over the loader of `deepspeed.initialize`, as in DeepSpeed's CIFAR example."""
    from tests.frameworks.deepspeed_program import interrupt, make_data, make_model

    inputs, targets = make_data()
    model = make_model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        training_data=torch.utils.data.TensorDataset(inputs, targets),
        config={
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    loader.num_local_io_workers = 0
    session = DeepSpeedSession(engine, **settings["session"])
    path = Path(settings["folder"]) / f"rank{session.rank}.jsonl"
    with open(path, "a", buffering=1) as record:
        for epoch in session.epochs(2):
            for part, target in session.batches(loader):
                loss = torch.nn.functional.mse_loss(engine(part), target)
                engine.backward(loss)
                engine.step()
                line = {"step": engine.micro_steps, "epoch": epoch, "loss": loss.item()}
                line["step"] = engine.global_steps * 2 + engine.micro_steps % 2
                record.write(json.dumps(line) + "\n")
                if not engine.micro_steps % 2:
                    interrupt(settings, session, engine.global_steps)
            if session.should_stop:
                break
    session.close()


# --- streams ------------------------------------------------------------------------------


def streams(folder: Path) -> Found:
    """Streams with loader workers are killed five times, and continue at three sizes."""
    folder.mkdir(parents=True)
    write_data(folder / "data")
    found: Found = {}
    # With gradient accumulation, and without it in a loop over epochs.
    for name, batch in (("steps", 12), ("epochs", 4)):
        config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 2}
        given: Found = {"data": str(folder / "data"), "stage": 1, "config": config}
        expected, broken = (Launch(folder / name / how, **given) for how in ("whole", "broken"))
        found[name] = expected.run(2, act=over_stream)
        for step in (2, 5, 6, 9, 11):
            found[f"{name}, {step}"] = broken.run(2, act=over_stream, kill_at=step)
        found[f"{name}, last"] = broken.run(2, act=over_stream)
        same = [broken.record(rank) == expected.record(rank) for rank in range(2)]
        found[f"{name}, equal"] = same
        found[f"{name}, samples"] = samples_of(expected)
    sized = Launch(folder / "sized", data=given["data"], stage=1, config={**config, **ACCUMULATED})
    sizes = ((2, 3), (1, 5), (3, 12))
    found["sized"] = [
        error for ranks, steps in sizes for error in sized.run(ranks, act=over_stream, steps=steps)
    ]
    found["sized, samples"] = samples_of(sized)
    found["sized, worlds"] = [line["world"] for line in sized.record().values()]
    return found


ACCUMULATED: Final = {"train_batch_size": 12}


def samples_of(made: Launch) -> dict[str, list[int]]:
    """Return the samples of each epoch in all steps of all ranks, sorted."""
    found: dict[str, list[int]] = {}
    for step, line in made.record().items():
        for rank in range(line["world"]):
            for epoch, ids in made.record(rank)[step]["given"]:
                found.setdefault(str(epoch), []).extend(ids)
    return {epoch: sorted(ids) for epoch, ids in found.items()}


def features(sample: Found) -> Found:
    """Return a sample with random numbers."""
    return {"id": sample["id"], "x": torch.rand(8) + sample["id"] / 1000}


def over_stream(settings: Found) -> None:
    """Train on files of lines; all ranks are killed within the step `kill_at`."""
    engine = make_engine(settings)
    # The last batches of an epoch may have one sample, of which BatchNorm takes no mean.
    engine.module[1].eval()
    session = DeepSpeedSession(engine, seed=3, **settings["session"])
    parts = engine.gradient_accumulation_steps()
    paths = sorted(Path(settings["data"]).glob("*.jsonl"))
    loader = session.stream(
        TextLines(paths, json.loads), engine.train_micro_batch_size_per_gpu(), shuffle=True,
        buffer=4, open_shards=2, num_workers=2, repeat=parts > 1, transform=features,
    )  # fmt: skip
    line: Found = {}

    def train_on(batch: Found) -> None:
        loss = engine(batch["x"]).square().mean()
        engine.backward(loss)
        engine.step()
        given = [loader.epoch, batch["id"].tolist()]
        line["given"] = [*line.get("given", []), given]
        line["loss"] = loss.item()

    with open(Path(settings["folder"]) / f"rank{session.rank}.jsonl", "a", buffering=1) as record:

        def end_step() -> None:
            line.update(step=engine.global_steps, world=session.world_size)
            record.write(json.dumps({**line, "draw": torch.rand(()).item()}) + "\n")
            line.clear()
            if engine.global_steps == settings.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

        if parts == 1:
            for _ in session.epochs(2):
                for batch in session.batches(loader):
                    train_on(batch)
                    end_step()
        else:
            batches = iter(loader)
            for _ in session.steps(settings["steps"]):
                for _ in range(parts):
                    train_on(next(batches))
                end_step()
    session.close()


def stream_of_epochs(settings: Found) -> None:
    """An epoch may end in the middle of a step."""
    DeepSpeedSession(make_engine(settings), **settings["session"]).stream(TextLines([__file__]), 2)


def unsaved_loader(settings: Found) -> None:
    """A loader of torchdata, whose state DeepSpeed's files do not have."""
    _over(StatefulDataLoader(list(range(8)), batch_size=2), settings)


def stateless_loader(settings: Found) -> None:
    """torch's loader over a stream."""
    _over(DataLoader(StreamDataset(TextLines([__file__])), batch_size=2), settings)


def _over(loader: Any, settings: Found) -> None:
    with DeepSpeedSession(make_engine(settings), **settings["session"]) as session:
        next(session.batches(loader))


# --- the example --------------------------------------------------------------------------


def example(folder: Path) -> Found:
    """The example is stopped on two ranks after its first epoch, and ends on one rank."""
    made = Launch(folder)
    errors = [made.run(2, act=stopped_example), made.run(1, act=whole_example)]
    outputs = [(folder / f"launch{number}" / "output0").read_text() for number in (1, 2)]
    epochs = [[line for line in text.splitlines() if line[:6] == "epoch "] for text in outputs]
    return {"errors": errors, "epochs": epochs}


def stopped_example(settings: Found) -> None:
    def show_and_stop(*words: object, **more: Any) -> None:
        show(*words, **more)
        if str(words[0]).startswith("epoch"):
            os.kill(os.getpid(), signal.SIGTERM)

    show, builtins.print = builtins.print, show_and_stop
    whole_example(settings)


def whole_example(settings: Found) -> None:
    os.environ["HOLDFAST_ROOT"] = settings["folder"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


CASES: Final[dict[str, Callable[[Path], Found]]] = {
    "whole": whole,
    "damaged": damaged,
    "refused": refused,
    "unconvertible": unconvertible,
    "loaders": loaders,
    "streams": streams,
    "example": example,
    **{
        f"{act.__name__}-{stage}": partial(act, stage=stage)
        for act in (interrupted, resized)
        for stage in (0, 1, 2, 3)
    },
}


def main() -> None:
    folder = Path(sys.argv[1])
    found = {name: CASES[name](folder / name) for name in sys.argv[2:]}
    sys.stdout.write(to_json(found).decode())


if __name__ == "__main__":
    main()
