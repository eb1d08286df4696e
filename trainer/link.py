"""How a rank finds its run, its board and its flusher: given by an agent, or made here.

Under an agent the environment names them. Under plain torchrun, or with none at all, the run's
folder is chosen, an incarnation is taken, and the local rank 0 of each node makes a board and
starts a flusher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh

from holdfast.contracts import environment as names
from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.board import NOWHERE, Board, Phase
from holdfast.contracts.durable import make_directory
from holdfast.contracts.errors import HoldfastError, PreflightError
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.trainer.collective import Ranks
from holdfast.trainer.identity import Identity
from holdfast.trainer.keeper import FlusherKeeper, wait_for_former
from holdfast.trainer.planning.pipeline import find_place
from holdfast.trainer.program import program_digest, program_stem
from holdfast.trainer.stacks import offer_stacks

INCARNATIONS_MAX: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank needs of its node. `keeper` is set where this process started the flusher.

    `flusher` is the path of the file by which it is found: see `contracts.wire`.
    `board_handle` keeps the board alive in the process that made it. Of each batch's `data_parts`
    this rank has number `data_part`.
    """

    run: RunPaths
    identity: Identity
    board: Board
    flusher: str
    has_agent: bool
    keeper: FlusherKeeper | None = None
    board_handle: int | None = None
    data_part: int = 0
    data_parts: int = 1

    @property
    def attempt(self) -> AttemptPaths:
        return self.run.attempt(self.identity.attempt)

    def close(self, *, wait: bool) -> None:
        """Let everything go; with `wait`, wait for a flusher that this process started."""
        if self.keeper is not None:
            self.keeper.close(wait=wait)
        self.board.close()
        if self.board_handle is not None:
            os.close(self.board_handle)


def meet_ranks() -> Ranks:
    """All ranks, once they have come. Every rank must call it."""
    if os.environ.get(names.BOARD):
        _say_rendezvous(os.environ)
    return Ranks()


def _say_rendezvous(env: Mapping[str, str]) -> None:
    """Tell the agent that this rank now waits for all others; its stacks can be had from here."""
    try:
        board = Board.open(env[names.BOARD])
    except OSError:
        # `open_link` says what is wrong, once all ranks can be told.
        return
    record = board.record(int(env.get("LOCAL_RANK", "0")))
    record.register(int(env.get("RANK", "0")), NOWHERE)
    record.beat(Phase.RENDEZVOUS)
    offer_stacks(record)
    board.close()


def open_link(directory: str | Path | None, ranks: Ranks, mesh: DeviceMesh | None = None) -> Link:
    """This rank's link; every rank must call it. Raises `PreflightError` when it cannot be."""
    link = _open(directory, ranks)
    ranks.meet_on(link.board, link.identity.local_rank)
    place = find_place(link.identity, ranks, mesh)
    return replace(
        link,
        identity=place.identity,
        data_part=place.data_part,
        data_parts=place.data_parts,
    )


def _open(directory: str | Path | None, ranks: Ranks) -> Link:
    env = os.environ
    wanted = int(env.get("WORLD_SIZE", "1"))
    if wanted > 1 and ranks.group is None:
        raise PreflightError(
            f"WORLD_SIZE is {wanted} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before Session(...)"
        )
    if env.get(names.BOARD):
        return _agents_link(env, ranks)
    return _own_link(directory, env, ranks)


def choose_directory(given: str | Path | None, env: Mapping[str, str], stem: str) -> Path:
    """Where a run without an agent lives: as given, under `$HOLDFAST_ROOT`, or under ./runs."""
    if given is not None:
        return Path(given).expanduser().absolute()
    root = env.get("HOLDFAST_ROOT")
    return (Path(root).expanduser() if root else Path("runs")).absolute() / stem


def _agents_link(env: Mapping[str, str], ranks: Ranks) -> Link:
    expected = (names.RUN_DIRECTORY, names.ATTEMPT, names.INCARNATION, names.FLUSHER)
    missing = [name for name in expected if not env.get(name)]
    if missing:
        raise PreflightError(
            f"{names.BOARD} is set but {', '.join(missing)} not; the agent sets all of them. "
            "Unset it to run without an agent"
        )
    run = RunPaths(Path(env[names.RUN_DIRECTORY]))
    identity = _identity(
        run,
        env,
        ranks,
        attempt=int(env[names.ATTEMPT]),
        incarnation=int(env[names.INCARNATION]),
        node=int(env.get(names.NODE, "0")),
        nodes=int(env.get(names.NODES, "1")),
    )
    try:
        board = Board.open(env[names.BOARD])
    except OSError as error:
        raise PreflightError(
            f"{names.BOARD}={env[names.BOARD]} cannot be opened ({error.strerror}); the agent "
            "that made it is gone. Start the attempt anew"
        ) from error
    return Link(run=run, identity=identity, board=board, flusher=env[names.FLUSHER], has_agent=True)


def _own_link(directory: str | Path | None, env: Mapping[str, str], ranks: Ranks) -> Link:
    def begin() -> tuple[str, int]:
        run = RunPaths(choose_directory(directory, env, program_stem()))
        incarnation = _take_incarnation(run.attempt(0))
        # A stop file from before this launch was meant for another one.
        run.stop_file.unlink(missing_ok=True)
        return str(run.directory), incarnation

    where, incarnation = ranks.share(begin)
    run = RunPaths(Path(where))
    identity = _identity(
        run,
        env,
        ranks,
        attempt=0,
        incarnation=incarnation,
        node=int(env.get("GROUP_RANK", "0")),
        nodes=int(env.get("GROUP_WORLD_SIZE", "1")),
    )
    made: list[tuple[Board, int, FlusherKeeper]] = []

    def make() -> tuple[int, str, str] | None:
        if identity.local_rank != 0:
            return None
        attempt = run.attempt(0)
        flusher = attempt.flusher_address(incarnation, identity.node)
        if incarnation > 1:
            former = attempt.flusher_address(incarnation - 1, identity.node)
            wait_for_former(former, run.directory)
        log = attempt.flusher_log(identity.node)
        keeper = FlusherKeeper(
            flusher, node=identity.node, nodes=identity.nodes, log=log, run=run.directory
        )
        board, handle = Board.create(identity.local_ranks)
        made.append((board, handle, keeper))
        return identity.node, f"/proc/{os.getpid()}/fd/{handle}", str(flusher)

    places = {place[0]: place[1:] for place in ranks.gather(make) if place is not None}
    path, flusher = places[identity.node]
    if made:
        board, handle, keeper = made[0]
        return _made(run, identity, flusher, board=board, board_handle=handle, keeper=keeper)
    return _made(run, identity, flusher, board=Board.open(path))


def _made(run: RunPaths, identity: Identity, flusher: str, **own: Any) -> Link:
    return Link(run=run, identity=identity, flusher=flusher, has_agent=False, **own)


def _identity(
    run: RunPaths,
    env: Mapping[str, str],
    ranks: Ranks,
    *,
    attempt: int,
    incarnation: int,
    node: int,
    nodes: int,
) -> Identity:
    record = read_document(RunRecord, run.spec)
    return Identity(
        # Without a `spec.json` nobody gave the run an identity; its folder is one.
        run_uid=record.uid if record else sha256(str(run.directory).encode()).hexdigest()[:32],
        run=run.name,
        attempt=attempt,
        incarnation=incarnation,
        rank=ranks.rank,
        local_rank=int(env.get("LOCAL_RANK", ranks.rank)),
        local_ranks=int(env.get("LOCAL_WORLD_SIZE", ranks.world_size)),
        world_size=ranks.world_size,
        node=node,
        nodes=nodes,
        command_digest=program_digest(),
    )


def _take_incarnation(attempt: AttemptPaths) -> int:
    """The next incarnation number, taken by creating its folder."""
    parent = attempt.incarnation(1).parent
    make_directory(parent)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdigit()]
    for number in range(max(taken, default=0) + 1, INCARNATIONS_MAX):
        try:
            attempt.incarnation(number).mkdir()
        except FileExistsError:
            continue
        return number
    raise HoldfastError(f"{parent}: no incarnation number below {INCARNATIONS_MAX} is free")
