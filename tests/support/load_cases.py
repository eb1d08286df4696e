"""Runs the programs of `load_programs`, interrupted and not, and compares them bit by bit.

`run_fast` writes checkpoints with stock DCP and needs no flusher. `run_session` uses a Session.
`python -m tests.support.load_cases SEED DIRECTORY STEPS` is one launch of it in a separate process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.load_programs import Parts, Program, first_difference, print_of
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk.paths import TRAIN_STATE
from holdfast.contracts.errors import CheckpointError, HoldfastError, SaveError
from holdfast.trainer import Session
from holdfast.trainer.data.position import Position
from holdfast.trainer.loading.reader import open_together
from holdfast.trainer.loading.restore import load_opened
from holdfast.trainer.planning.layout import encode_train_state, read_train_state
from holdfast.trainer.planning.rank_rows import describe_rank
from holdfast.trainer.planning.signature import Signature, flatten
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.state.fresh import ResumeFit
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState

PROCESS_S = 120
# A refusal names one of these, which begin the names of all state.
NAMED = ("model.", "optimizer", "scheduler", "extra", "rng", "state.", "param_groups.")
SAME, REFUSED, EXCLUDED = "same", "refused", "loaded without excluded parts"
# A program that fails in plain torch too.
FAILS = "fails in plain torch"


class Launch:
    """What a Session does with its state, without processes around it."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program, self.directory = program, directory
        self.parts = parts = program.build()
        self._ranks = ControlGroup()
        self.state = TrainState(
            parts.model,
            parts.optimizers,
            parts.schedulers,
            parts.extra,
            per_rank=parts.per_rank,
            fit=ResumeFit.of(strict=True, rename=None, exclude=program.exclude),
            rank=0,
            world_size=1,
        )
        try:
            self.state.remember()
        except BaseException:
            self.close()
            raise
        self._signature: Signature | None = None
        self.completed = 0
        self.position = self._position({})

    def _position(self, former: dict[str, Any]) -> Position:
        return Position(
            rank=0,
            world_size=1,
            seed=self.program.seed,
            skips=(),
            former=former,
            completed=self.completed,
        )

    def train(self) -> int:
        """Train one step. Return its number."""
        ids = self.position.batch(*self.program.sizes)
        self.completed = self.position.finish_step()
        self.program.step(self.parts, self.completed, ids)
        self.state.notice()
        return self.completed

    def save(self) -> Path:
        """Save as a Saver does. Raises what it raises."""
        progress = TrainingProgress(
            step=self.completed, seed=self.program.seed, data=self.position.describe()
        )
        state, _ = self.state.capture(progress)
        flat = flatten(state)
        if self._signature is None or not self._signature.fits(flat):
            self.state.check(state)
            self._signature = describe_rank(state).signature
            self.state.note_forms(self._ranks)
        state, document = self.state.capture(progress)
        place = self.directory / f"step-{self.completed}"
        copies = {key: _copied(value) for key, value in state.items()}
        save_with_dcp(copies, checkpoint_id=place, no_dist=True)
        document["ids"] = self.parts.ids
        (place / TRAIN_STATE).write_bytes(encode_train_state(document))
        return place

    def load(self, place: Path) -> None:
        """Load as a Session does."""
        document = read_train_state(place, None)
        opened = open_together(place, None)
        load_opened(self._ranks, self.state, opened, document)
        self.completed = document["step"]
        self.position = self._position(document["data"])
        self.parts.ids = document["ids"]

    def close(self) -> None:
        self.state.close()
        self._ranks.close()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return (
            value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        )
    return value


def uninterrupted(program: Program) -> Parts:
    """Train in plain torch."""
    parts = program.build()
    position = Position(rank=0, world_size=1, seed=program.seed, skips=(), former={}, completed=0)
    for _ in range(program.steps):
        ids = position.batch(*program.sizes)
        program.step(parts, position.finish_step(), ids)
    return parts


def run_fast(program: Program, directory: Path) -> tuple[str, str]:
    """Return how the program ended, and the text of a refusal.

    Raises `AssertionError` if a checkpoint does not load, if a bit is wrong, or if a refusal names
    nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run_fast(program, directory)


def _whole(program: Program) -> Parts | None:
    """Return what plain torch reaches without an interruption; None if that fails."""
    try:
        return uninterrupted(program)
    except Exception:  # Some draws make no program, such as a model that has lost a layer's input.
        return None


def _run_fast(program: Program, directory: Path) -> tuple[str, str]:
    reached, problem = _whole(program), ""
    if reached is None:
        return FAILS, ""
    whole = print_of(reached)
    saved: list[Path] = []
    try:
        first = Launch(program, directory)
    except CheckpointError as error:
        return REFUSED, named(program, error)
    try:
        while first.completed < program.steps:
            if first.train() in program.saves:
                saved.append(first.save())
    except (SaveError, CheckpointError) as error:
        problem = named(program, error)
    finally:
        first.close()
    for place in saved:
        found = _resumed(program, directory, place)
        if program.exclude:
            continue
        if found != whole:
            raise AssertionError(f"{program}: {place.name}: {first_difference(found, whole)}")
    if problem:
        return REFUSED, problem
    return (EXCLUDED, "") if program.exclude else (SAME, "")


def _resumed(program: Program, directory: Path, place: Path) -> Any:
    """Return what a launch that resumes from `place` reaches, and another after it."""
    launch = Launch(program, directory)
    try:
        launch.load(place)
        is_refused = False
        while launch.completed < program.steps:
            try:
                launch.train()
            except (SaveError, CheckpointError) as error:
                named(program, error)
                is_refused = True
        found = print_of(launch.parts)
        if not is_refused:
            try:
                place = launch.save()
            except (SaveError, CheckpointError) as error:
                named(program, error)
                return found
            again = Launch(program, directory)
            try:
                again.load(place)
                if not program.exclude:
                    assert (second := print_of(again.parts)) == found, (
                        f"{program}: at the end: {first_difference(second, found)}"
                    )
            finally:
                again.close()
        return found
    except HoldfastError as error:
        raise AssertionError(f"{program}: {place.name} does not load: {error}") from error
    finally:
        launch.close()


def named(program: Program, error: Exception) -> str:
    """Return the text of a refusal, which must name a part of the state."""
    text = str(error)
    assert any(name in text for name in NAMED), f"{program}: a refusal without a name: {text}"
    return text


def count(
    programs: range, directory: Path, run: Callable[[Program, Path], str] | None = None
) -> Counter[str]:
    """Run the programs by `run_fast` or by `run`, and return how many ended in each way."""
    if run is None:
        return Counter(run_fast(Program(seed), directory / str(seed))[0] for seed in programs)
    return Counter(run(Program(seed), directory / str(seed)) for seed in programs)


def launch(program: Program, directory: Path, until: int) -> Parts:
    """Run one launch of a program with a Session, up to step `until`."""
    parts = program.build()
    session = Session(
        parts.model,
        parts.optimizers,
        parts.schedulers,
        extra=parts.extra,
        per_rank=parts.per_rank,
        seed=program.seed,
        interval=10**12,
        snapshots="off",
        directory=directory,
        exclude=program.exclude,
    )
    is_over = False
    try:
        for step in session.steps(until):
            ids = session.batch(*program.sizes)
            program.step(parts, step, ids)
        session.close()
        is_over = True
    finally:
        if not is_over:
            session._release(wait=True)
    return parts


def run_session(program: Program, directory: Path) -> str:
    """Interrupt a program with a Session, and return how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _whole(program)
        if whole is None:
            return FAILS
        try:
            launch(program, directory, program.saves[0])
        except (SaveError, CheckpointError) as error:
            named(program, error)
            return REFUSED
        try:
            resumed = launch(program, directory, program.steps)
        except SaveError as error:
            named(program, error)
            return REFUSED
        if program.exclude:
            return EXCLUDED
        resumed.ids = whole.ids
        found, wanted = print_of(resumed), print_of(whole)
        assert found == wanted, f"{program}: {first_difference(found, wanted)}"
    return SAME


def run_processes(program: Program, directory: Path) -> str:
    """Interrupt a program with a Session, in a process for each launch, as `run_session` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _whole(program)
        if whole is None:
            return FAILS
        whole.ids = []
        wanted = print_of(whole)
    for until in (program.saves[0], program.steps):
        command = [sys.executable, "-m", "tests.support.load_cases", str(program.seed)]
        ended = subprocess.run(
            [*command, str(directory), str(until)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
        if ended.returncode != 0:
            assert any(f"{kind}:" in ended.stderr for kind in ("SaveError", "CheckpointError"))
            assert until == program.saves[0] or "SaveError:" in ended.stderr, ended.stderr[-2000:]
            return REFUSED
    if program.exclude:
        return EXCLUDED
    found = pickle.loads((directory / "reached").read_bytes())
    assert found == wanted, f"{program}: {first_difference(found, wanted)}"
    return SAME


if __name__ == "__main__":
    made, place = Program(int(sys.argv[1])), Path(sys.argv[2])
    reached = launch(made, place, int(sys.argv[3]))
    reached.ids = []
    (place / "reached").write_bytes(pickle.dumps(print_of(reached)))
