"""The table of a sealed staging slot: whose step it holds, and which bytes belong to which file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.paths import RunPaths


@dataclass(frozen=True)
class FilePlace:
    """One file of the image. `path` is relative to the checkpoint's directory."""

    path: str
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """One rank's part of one step.

    `node_folder` is the run's folder on the node's own disk, "" without a node-local tier.
    `blocked_s` is the time for which the copy blocked training. `manifest` has rank 0's facts of
    the manifest, and is None on other ranks. `target` is the directory that the program chose for
    this checkpoint, "" for a checkpoint of a run. `error` is set if the rank could not copy its
    state, so that the step fails on all ranks.
    """

    run_directory: str
    node_folder: str
    checkpoint: str
    step: int
    rank: int
    local_rank: int
    local_ranks: int
    node: int
    nodes: int
    world_size: int
    staged_at: float
    blocked_s: float
    files: tuple[FilePlace, ...]
    manifest: Mapping[str, Any] | None = None
    target: str = ""
    error: str = ""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> SlotTable:
        """Return the table of a slot's JSON. Raises `ValueError` if it has other fields."""
        try:
            files = tuple(FilePlace(**file) for file in document["files"])
            return cls(**{**document, "files": files})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a slot's table: {error}") from error

    def to_document(self) -> dict[str, Any]:
        """Return the JSON form."""
        # Not by `asdict`, which copies all values and takes ten times as long.
        return vars(self) | {"files": [vars(file) for file in self.files]}

    @property
    def run(self) -> RunPaths:
        return RunPaths(Path(self.run_directory))

    @property
    def directory(self) -> Path:
        """The directory that the checkpoint is written into."""
        if self.target:
            return Path(self.target) / self.checkpoint
        return self.run.checkpoint(self.checkpoint)

    @property
    def files_directory(self) -> Path:
        """Where the checkpoint's files go: its directory, or its place on the node's own disk."""
        if not self.node_folder:
            return self.directory
        return RunPaths(Path(self.node_folder)).checkpoint(self.checkpoint)
