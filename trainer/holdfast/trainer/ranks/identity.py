"""A rank's identity: the facts that are part of every file and message of the rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One rank of one launch. Numbers count from 0, except `attempt` and `launch`.

    Under pipeline parallelism, `stage` is the rank's stage out of `stages`, and `stage_rank` is its
    index among the stage's ranks. Otherwise `stage` is None. `mesh` contains the names and sizes of
    the device mesh's dimensions, if the program passed a mesh.
    """

    run_uid: str
    run: str
    attempt: int
    launch: int
    rank: int
    local_rank: int
    local_ranks: int
    world_size: int
    node: int
    nodes: int
    command_digest: str
    stage: int | None = None
    stages: int = 1
    stage_rank: int = 0
    stage_size: int = 1
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def folder(self) -> str:
        """The folder of this rank's files in the checkpoint: "", or "pp0/" for a stage."""
        return "" if self.stage is None else f"pp{self.stage}/"

    @property
    def file_name(self) -> str:
        """This rank's `.distcp` file, relative to the checkpoint, named as in stock DCP."""
        return f"{self.folder}{distcp_name(self.rank if self.stage is None else self.stage_rank)}"


def distcp_name(rank: int) -> str:
    """Return the file name of one rank, as stock DCP spells it."""
    return f"__{rank}_0.distcp"
