"""The state of a program whose framework saves and reads its own files.

A checkpoint has the framework's files, one small file per rank with the random generators, one with
the rank's part of each stream, and `train_state.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.topology import FIXED
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.staging.file_writers import Writer, bytes_writer, torch_writer
from holdfast.trainer.state import plain, rng, run_state

# The format of `train_state.json` beside a framework's own files.
FILES_FORMAT: Final = "files"
FACTS: Final = "framework_facts"
STREAMS: Final = "streams"


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """A verified checkpoint of a framework. `world_size` ranks saved it.

    `facts` are those of `Framework.facts`. `scratch` is a folder of the run that every rank sees,
    for files that only this resume needs. It may not exist.
    """

    directory: Path
    facts: Mapping[str, Any]
    world_size: int
    scratch: Path


class Framework(Protocol):
    """What an adapter implements. Every rank calls the same methods in the same order."""

    name: str

    def check(self, step: int) -> None:
        """Raise `SpecError` if the framework does not stand after `step` complete steps."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what `read` must know of the checkpoint, as JSON."""
        ...

    def why_fixed(self) -> str:
        """Return why only the same number of ranks can read the state, "" if any can."""
        ...

    def collect(self) -> dict[str, Writer]:
        """Return the writers of this rank's files, by their paths in the checkpoint."""
        ...

    def read(self, saved: SavedFiles, ranks: ControlGroup) -> Sequence[str]:
        """Restore a saved state. Return notes for the user.

        Raises `CheckpointError` before the program's state changes, if the checkpoint does not fit
        the program.
        """
        ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Return the local parameters and buffers of the model."""
        ...


class StreamFiles:
    """Implements `Streams`: a file of each rank with its rows, which other ranks can read."""

    def __init__(self, ranks: ControlGroup) -> None:
        self._ranks = ranks
        self._made: dict[str, run_state.ElasticRows] = {}
        self._saved: dict[str, run_state.SavedRows] = {}

    def add_rows(self, name: str, item: run_state.ElasticRows) -> run_state.SavedRows | None:
        """See `Streams`. Raises `CheckpointError` if the name is in use."""
        if not name or name in self._made:
            raise CheckpointError(f"name={name!r}: expected a name that no other stream has")
        self._made[name] = item
        return self._saved.pop(name, None)

    def forgotten_rows(self) -> list[str]:
        return list(self._saved)

    def collect(self) -> tuple[dict[str, Writer], dict[str, Any]]:
        """Return the writer of this rank's file, if there are streams, and their facts."""
        if not self._made:
            return {}, {}
        rows = {name: item.state_dict() for name, item in self._made.items()}
        content = plain.to_bytes(rows, STREAMS)
        facts = {name: item.facts() for name, item in self._made.items()}
        return {_rows_of(self._ranks.rank): bytes_writer(content)}, facts

    def load(self, directory: Path, facts: Mapping[str, Any], ranks: int) -> None:
        """Read the rows of a checkpoint of `ranks` ranks, of which this rank reads a share."""
        self._saved.clear()
        if not facts:
            return
        mine = range(self._ranks.rank, ranks, self._ranks.world_size)
        files = [plain.from_bytes((directory / _rows_of(rank)).read_bytes()) for rank in mine]
        self._saved |= {
            name: run_state.SavedRows(dict(one), [rows[name] for rows in files])
            for name, one in facts.items()
        }


class FileState:
    """Captures and restores one rank's state through a framework."""

    def __init__(self, framework: Framework, ranks: ControlGroup) -> None:
        self._framework, self._ranks = framework, ranks
        self._generators = rng.ResumedGenerators()
        self._is_resumed = False
        self.streams = StreamFiles(ranks)

    @property
    def awaits_first_step(self) -> bool:
        """True in a new run: the size of the files is known after the first step."""
        return not self._is_resumed

    def saves(self, item: object) -> bool:
        """Return False: checkpoints have no further objects."""
        return False

    def capture(
        self, progress: run_state.TrainingProgress
    ) -> tuple[run_state.State, dict[str, Any]]:
        """Return the writers of this rank's files, and the document, which rank 0 saves.

        All ranks call this together. Raises `SpecError` if the framework made other steps than the
        session.
        """
        # First, so that no file is written if framework and session disagree about the step.
        self._framework.check(progress.step)
        files: run_state.State = dict(self._framework.collect())
        generators = rng.capture()
        files[_generators_of(self._ranks.rank)] = torch_writer(generators)
        rows, facts = self.streams.collect()
        files |= rows
        document = {
            "format": FILES_FORMAT,
            run_state.FRAMEWORK: self._framework.name,
            FACTS: self._framework.facts(),
            FIXED: self._framework.why_fixed(),
            STREAMS: facts,
            **progress.as_document(),
            "world_size": self._ranks.world_size,
        }
        return files, document

    def load(
        self, directory: Path, document: Mapping[str, Any], scratch: Path
    ) -> tuple[run_state.Restored, Sequence[str]]:
        """Restore a verified checkpoint. Every rank calls this. `scratch` is as in `SavedFiles`.

        Raises `CheckpointError` if another framework wrote it, or if it does not fit.
        """
        self._check_fit(directory, document)
        saved = SavedFiles(
            directory=directory,
            facts=document[FACTS],
            world_size=int(document["world_size"]),
            scratch=scratch,
        )
        notes = self._framework.read(saved, self._ranks)
        self.streams.load(directory, document.get(STREAMS, {}), saved.world_size)
        rank = self._ranks.rank
        # A rank that did not exist then has no saved generators.
        is_reseeded = rank >= saved.world_size
        if is_reseeded:
            rng.reseed(int(document["seed"]), rank, int(document["step"]))
        else:
            rng.restore(torch.load(directory / _generators_of(rank), weights_only=True))
        # Noted right after the restore: the program may draw numbers before its first step.
        self._generators.note()
        self._is_resumed = True
        parts = (self._framework.name, "rng", *self.streams.forgotten_rows())
        return run_state.Restored(parts=parts, reseeded=is_reseeded), notes

    def rewind_generators(self, *, is_last: bool) -> list[str]:
        """Restore the random generators as resumed: see `rng.ResumedGenerators.rewind`."""
        return self._generators.rewind(is_last=is_last)

    def rewind_seeds(self) -> None:
        """Take back the seeds that loaders' iterators drew, if nothing else was drawn."""
        self._generators.rewind_seeds()

    def close(self) -> None:
        """Do nothing: nothing watches the program."""

    def weights(self) -> Iterable[torch.Tensor]:
        return self._framework.weights()

    def _check_fit(self, directory: Path, document: Mapping[str, Any]) -> None:
        wrote, ours = document.get(run_state.FRAMEWORK, "Session"), self._framework.name
        if wrote != ours:
            raise CheckpointError(
                f"{directory}: {wrote} wrote this checkpoint, and this program uses {ours}. Use "
                f"the session of {wrote}, or begin another run"
            )
        saved, now = int(document["world_size"]), self._ranks.world_size
        if saved != now and (reason := document.get(FIXED)):
            raise CheckpointError(
                f"{directory}: {counted(saved, 'rank')} saved it, and "
                f"{counted(now, 'rank')} cannot load it: {reason}. "
                f"Relaunch on {counted(saved, 'rank')}"
            )


def _rows_of(rank: int) -> str:
    return f"streams/rank-{rank:05d}.bin"


def _generators_of(rank: int) -> str:
    return f"rng/rank-{rank:05d}.pt"
