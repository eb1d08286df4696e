"""The context of a rank: its run, its status table and its flusher.

Under an agent, the environment names them. Under plain torchrun, or in a single process, the
session chooses the run's folder and takes a launch number. The local rank 0 of each node creates a
status table and starts a flusher.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.contracts import environment as names
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, given_folder
from holdfast.contracts.errors import HoldfastError, PreflightError
from holdfast.contracts.node.rank_status import NOWHERE, Phase, RankRecord, RankStatusTable
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor, wait_for_former
from holdfast.trainer.process.program import program_digest, program_stem
from holdfast.trainer.ranks import forks
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.topology import find_place

# Access to a rank's Python stacks from the agent, whatever the rank is doing.
#
# The agent first tries py-spy. The kernel may refuse that, so the rank allows the agent to trace
# it. As a second way, the rank registers a signal on which `faulthandler` writes the stacks to a
# memory file. This handler is the one exception to "handlers only set a flag". It is written in C
# for this use, allocates nothing, takes no lock, and works even if the interpreter is stuck.

# Only the program itself uses real-time signals. Launchers do not send them.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 6
_PR_SET_PTRACER: Final = 0x59616D61
_FLUSHER_SUPERVISOR: Final = re.compile(r"/proc/(\d+)/fd/\d+")


def offer_stacks(record: RankRecord) -> None:
    """Let the agent of this node read this process's stacks, if the system supports it."""
    flusher_supervisor = _FLUSHER_SUPERVISOR.fullmatch(os.environ.get(names.RANK_STATUS, ""))
    if flusher_supervisor:
        _allow_tracing_by(int(flusher_supervisor[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        record.offer_stacks(STACKS_SIGNAL, _stacks_file())


@functools.cache
def _stacks_file() -> int:
    """Return the memory file for this process's stacks, and install its handler.

    The handler stays until the process ends. Without it, a signal that is on its way would end the
    process.
    """
    descriptor = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
    # The interpreter removes the handler when it ends. Without this, a late question for the stacks
    # would then kill the process, and hide why it ends.
    with contextlib.suppress(ValueError):
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _allow_tracing_by(pid: int) -> None:
    """Allow tracing under Yama, by which only parents and declared processes may trace a child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


LAUNCHES_MAX: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The parts of its node that a rank uses.

    `flusher_supervisor` is set if this process started the flusher. `flusher` is the path of the
    flusher's address file: see `contracts.wire`. `status_handle` keeps the status table alive in
    the process that created it. Each batch has `data_parts` parts, and this rank takes part number
    `data_part`.
    """

    run: RunPaths
    identity: Identity
    status_table: RankStatusTable
    flusher: str
    has_agent: bool
    flusher_supervisor: FlusherSupervisor | None = None
    status_handle: int | None = None
    data_part: int = 0
    data_parts: int = 1
    data_waits: DataWaits | None = None

    @property
    def attempt(self) -> AttemptPaths:
        return self.run.attempt(self.identity.attempt)

    def close(self, *, wait: bool) -> None:
        """Release all resources. With `wait`, wait for a flusher that this process started."""
        if self.flusher_supervisor is not None:
            self.flusher_supervisor.close(wait=wait)
        if self.data_waits is not None:
            self.data_waits.close()
        self.status_table.close()
        if self.status_handle is not None:
            os.close(self.status_handle)


def open_control_group() -> ControlGroup:
    """Create the control group of all ranks. Every rank must call this."""
    if os.environ.get(names.RANK_STATUS):
        _report_rendezvous(os.environ)
    return ControlGroup()


def _report_rendezvous(env: Mapping[str, str]) -> None:
    """Report that this rank waits for all others. From now on the agent can read its stacks."""
    try:
        status_table = RankStatusTable.open(env[names.RANK_STATUS])
    except OSError:
        # `open_rank_context` reports this problem once the control group exists.
        return
    record = status_table.record(int(env.get("LOCAL_RANK", "0")))
    record.register(int(env.get("RANK", "0")), NOWHERE)
    record.beat(Phase.RENDEZVOUS)
    offer_stacks(record)
    status_table.close()


def open_rank_context(
    directory: str | Path | None, ranks: ControlGroup, mesh: DeviceMesh | None = None
) -> RankContext:
    """Return this rank's context. Every rank must call this. Raises `PreflightError`."""
    context = _open(directory, ranks)
    # From here on the ranks of one node agree in its memory, see decision 43.
    ranks.meet_on(context.status_table, context.identity.local_rank)
    place = find_place(context.identity, ranks, mesh)
    record = context.status_table.record(context.identity.local_rank)
    return replace(
        context,
        identity=place.identity,
        data_part=place.data_part,
        data_parts=place.data_parts,
        # Only an agent reads them.
        data_waits=DataWaits(record) if context.has_agent else None,
    )


def _open(directory: str | Path | None, ranks: ControlGroup) -> RankContext:
    env = os.environ
    wanted = int(env.get("WORLD_SIZE", "1"))
    # torchrun started several ranks, but each would take itself for the whole program, and all
    # would write the same checkpoint.
    if wanted > 1 and ranks.world_size == 1:
        raise PreflightError(
            f"WORLD_SIZE is {wanted} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before Session(...)"
        )
    if env.get(names.RANK_STATUS):
        return _context_of_agent(env, ranks)
    return _context_of_own(directory, env, ranks)


def choose_directory(given: str | Path | None, env: Mapping[str, str], stem: str) -> Path:
    """Return the run's folder without an agent: as given, in `$HOLDFAST_ROOT`, or in ./runs."""
    if given is not None:
        return Path(given).expanduser().absolute()
    root = env.get(names.ROOT)
    return (given_folder(root, names.ROOT) if root else Path("runs").absolute()) / stem


def _context_of_agent(env: Mapping[str, str], ranks: ControlGroup) -> RankContext:
    expected = (names.RUN_DIRECTORY, names.ATTEMPT, names.LAUNCH, names.FLUSHER)
    missing = [name for name in expected if not env.get(name)]
    if missing:
        raise PreflightError(
            f"{names.RANK_STATUS} is set but {', '.join(missing)} is not; the agent sets all of "
            "them. Unset it to run without an agent"
        )
    run = RunPaths(Path(env[names.RUN_DIRECTORY]))
    identity = _identity(
        run,
        env,
        ranks,
        attempt=int(env[names.ATTEMPT]),
        launch=int(env[names.LAUNCH]),
        node=int(env.get(names.NODE, "0")),
        nodes=int(env.get(names.NODES, "1")),
    )
    try:
        status_table = RankStatusTable.open(env[names.RANK_STATUS])
    except OSError as error:
        raise PreflightError(
            f"{names.RANK_STATUS}={env[names.RANK_STATUS]} cannot be opened ({error.strerror}); "
            "the agent that created it has ended. Start the attempt again"
        ) from error
    return RankContext(
        run=run,
        identity=identity,
        status_table=status_table,
        flusher=env[names.FLUSHER],
        has_agent=True,
    )


def _context_of_own(
    directory: str | Path | None, env: Mapping[str, str], ranks: ControlGroup
) -> RankContext:
    # On rank 0 alone: two ranks would take two launch numbers and two folders.
    def begin() -> tuple[str, int]:
        run = RunPaths(choose_directory(directory, env, program_stem()))
        launch = _take_launch(run.attempt(0))
        # An earlier stop file was meant for an earlier launch.
        run.stop_file.unlink(missing_ok=True)
        return str(run.directory), launch

    where, launch = ranks.share(begin)
    run = RunPaths(Path(where))
    identity = _identity(
        run,
        env,
        ranks,
        attempt=0,
        launch=launch,
        node=int(env.get("GROUP_RANK", "0")),
        nodes=int(env.get("GROUP_WORLD_SIZE", "1")),
    )
    own: dict[str, Any] = {}

    def make() -> tuple[int, str, str] | None:
        if identity.local_rank != 0:
            return None
        attempt = run.attempt(0)
        flusher = attempt.flusher_address(launch, identity.node)
        if launch > 1:
            former = attempt.flusher_address(launch - 1, identity.node)
            # Two flushers must not commit in one run. The former one may still write steps that
            # were sealed before the program ended.
            wait_for_former(former, run.directory)
        log = attempt.flusher_log(identity.node)
        own["flusher_supervisor"] = FlusherSupervisor(
            flusher, node=identity.node, nodes=identity.nodes, log=log, run=run.directory
        )
        own["status_table"], handle = RankStatusTable.create(identity.local_ranks)
        own["status_handle"] = handle
        # The table has no name in the file system. Other ranks open it through this process, which
        # keeps it alive until it closes the context.
        return identity.node, f"/proc/{os.getpid()}/fd/{handle}", str(flusher)

    # Every rank waits here until local rank 0 of its node has the flusher and the table.
    places = {place[0]: place[1:] for place in ranks.gather(make) if place is not None}
    path, flusher = places[identity.node]
    if not own:
        own["status_table"] = RankStatusTable.open(path)
    return RankContext(run=run, identity=identity, flusher=flusher, has_agent=False, **own)


def _identity(
    run: RunPaths,
    env: Mapping[str, str],
    ranks: ControlGroup,
    *,
    attempt: int,
    launch: int,
    node: int,
    nodes: int,
) -> Identity:
    record = read_document(RunRecord, run.spec)
    return Identity(
        # Without a `spec.json` the run has no uid, so derive one from its folder.
        run_uid=record.uid if record else sha256(str(run.directory).encode()).hexdigest()[:32],
        run=run.name,
        attempt=attempt,
        launch=launch,
        rank=ranks.rank,
        local_rank=int(env.get("LOCAL_RANK", ranks.rank)),
        local_ranks=int(env.get("LOCAL_WORLD_SIZE", ranks.world_size)),
        world_size=ranks.world_size,
        node=node,
        nodes=nodes,
        command_digest=program_digest(),
    )


def _take_launch(attempt: AttemptPaths) -> int:
    """Take the next launch number by creating its folder."""
    parent = attempt.launch(1).parent
    make_directory(parent)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    # Creating the folder takes the number: of two programs that start together, one finds it taken.
    for number in range(max(taken, default=0) + 1, LAUNCHES_MAX):
        try:
            attempt.launch(number).mkdir()
        except FileExistsError:
            continue
        return number
    raise HoldfastError(f"{parent}: no launch number below {LAUNCHES_MAX} is free")


# The time that this rank waits for its next batch, in the rank status table. torch has no hook for
# it, so the method that gives the next batch is wrapped, in the iterators of torch's DataLoader
# and of torchdata's, if the program has loaded it. Their subclasses in frameworks call it. Other
# loaders are not measured: their time counts as the rank's own work.

_TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_NEXT: Final = "__next__"


class DataWaits:
    """Records the waits of the thread that creates it. `close` must be called."""

    def __init__(self, record: RankRecord) -> None:
        self._record, self._thread, self._owner = record, threading.get_ident(), forks.count
        self._is_waiting = False
        stateful = getattr(sys.modules.get(_TORCHDATA), "_StatefulBaseDataLoaderIter", None)
        self._wrapped = [
            (each, each.__dict__[_NEXT], self._wrap(each.__dict__[_NEXT]))
            for each in (_BaseDataLoaderIter, stateful)
            if each is not None and _NEXT in each.__dict__
        ]
        for each, _, method in self._wrapped:
            setattr(each, _NEXT, method)

    def close(self) -> None:
        """Stop recording."""
        for each, inner, method in self._wrapped:
            # A library may have wrapped it again. Then this one stays, and records nothing.
            if each.__dict__.get(_NEXT) is method:
                setattr(each, _NEXT, inner)
        self._owner = -1

    def _wrap(self, inner: Any) -> Any:
        @functools.wraps(inner)
        def next_batch(iterator: Any) -> Any:
            # A loader may read another one, and a thread of the program or a forked worker of a
            # loader does not keep this rank waiting.
            if (
                self._is_waiting
                or forks.count != self._owner
                or threading.get_ident() != self._thread
            ):
                return inner(iterator)
            self._is_waiting = True
            self._record.begin_data_wait()
            try:
                return inner(iterator)
            finally:
                self._is_waiting = False
                # The program may have closed the session inside.
                if self._owner != -1:
                    self._record.end_data_wait()

        return next_batch
