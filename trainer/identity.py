"""Who a rank is: the facts that every file it writes and every message it sends bear."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One rank of one launch. Numbers count from 0, but for `attempt` and `launch`.

    Under pipeline parallelism `stage` is the rank's stage of `stages`, and `stage_rank` its place
    among the stage's ranks; else `stage` is None. `mesh` has the names and sizes of the device
    mesh's dimensions, where the program told them.
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
        """Where in the checkpoint this rank's files lie: "" or, of a stage, "pp0/"."""
        return "" if self.stage is None else f"pp{self.stage}/"

    @property
    def file_name(self) -> str:
        """This rank's `.distcp` file, relative to the checkpoint, named as stock DCP does."""
        return f"{self.folder}{distcp_name(self.rank if self.stage is None else self.stage_rank)}"


def distcp_name(rank: int) -> str:
    """The file of one rank of a save, as stock DCP spells it."""
    return f"__{rank}_0.distcp"
