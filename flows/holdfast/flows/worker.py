"""The Prefect worker type `holdfast`: it runs flows in places that outlive the worker.

A flow that dies while its training run lives is started again under the same flow run. So is the
flow of a host that was lost: its run's lock is free, which the kernel or the file server ensures.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

import anyio
import anyio.abc
from anyio.to_thread import run_sync
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import InfrastructureNotFound, ObjectNotFound
from prefect.states import Cancelled, Crashed, Pending
from prefect.workers.base import (
    BaseJobConfiguration,
    BaseVariables,
    BaseWorker,
    BaseWorkerResult,
)
from pydantic import BaseModel, Field

from holdfast.contracts.disk.paths import RunPaths, holdfast_home
from holdfast.contracts.errors import HoldfastError, SchedulerUnavailableError
from holdfast.contracts.records import history_cache, supervision
from holdfast.contracts.states import RunState
from holdfast.flows.flow_run_states import last_begun_at, times_scheduled
from holdfast.flows.supervisor import cancellation
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.flows.supervisor.redactor import Log
from holdfast.workers.schedulers import flow_places

# The settings of a work pool of the type `holdfast`.


class _PlaceSettings(BaseModel):
    """What one flow run's place is made of, with the descriptions in Prefect's UI."""

    place: Literal["process", "slurm"] = Field(
        default="process",
        description="Where flows run: processes on the worker's host, or a Slurm job for each.",
    )
    partition: str | None = Field(
        default=None, description="Partition of the flows' Slurm jobs. One that is not preempted."
    )
    account: str | None = Field(default=None, description="Slurm account of these jobs.")
    qos: str | None = Field(default=None, description="Slurm QOS of these jobs.")
    time_limit_min: int = Field(
        default=10_080,
        gt=0,
        description="Time limit of these jobs in minutes. The worker then submits the next one.",
    )
    memory_mb: int = Field(default=1024, gt=0, description="Memory of these jobs in MB.")
    sbatch: str | None = Field(default=None, description="Further options of sbatch.")
    working_dir: str | None = Field(
        default=None, description="Working directory of flows. Default: the worker's."
    )


class HoldfastConfiguration(_PlaceSettings, BaseJobConfiguration):
    """The settings of one flow run's place."""

    @property
    def options(self) -> list[str]:
        given = {"partition": self.partition, "account": self.account, "qos": self.qos}
        chosen = [f"--{name}={value}" for name, value in given.items() if value]
        limits = [f"--time={self.time_limit_min}", f"--mem={self.memory_mb}M"]
        return [*chosen, *limits, *shlex.split(self.sbatch or "")]


class HoldfastVariables(_PlaceSettings, BaseVariables):
    """The variables of a work pool."""


# Asks Prefect about flow runs, and waits while its server is down.

LOOK_S: Final = 2.0

T = TypeVar("T")


class PatientClient:
    """Asks with `client`, every `LOOK_S` seconds until there is an answer."""

    def __init__(self, client: PrefectClient, log: Log) -> None:
        self._client, self._log = client, log

    async def flow_run(self, number: UUID) -> FlowRun | None:
        """Return a flow run, or None if it was deleted."""
        try:
            return await self._ask(partial(self._client.read_flow_run, number))
        except ObjectNotFound:
            return None

    async def state(self, number: UUID) -> State[Any]:
        """Return a flow run's state: cancelled, if it was deleted."""
        found = await self.flow_run(number)
        if found is None:
            return Cancelled(message="the flow run was deleted")
        return found.state or Pending()

    async def states(self, number: UUID) -> list[State[Any]]:
        """Return the states that a flow run went through. Raises `ObjectNotFound`."""
        return await self._ask(partial(self._client.read_flow_run_states, number))

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await question()
            except ObjectNotFound:
                raise
            # Whatever its client raises, the server is asked again.
            except Exception as error:
                self._log.warning("Prefect does not answer: %s", error)
            await anyio.sleep(LOOK_S)


# How often the flows of other workers are checked.
ZOMBIES_S: Final = 3.0
ZOMBIES_MAX: Final = 200
# A run whose flow crashed longer ago is left to people.
CRASHED_S_MAX: Final = 24 * 3600.0
SEARCH_S: Final = 30.0
# A flow's lock must be free for so many looks in a row.
LOOKS: Final = 2
# Before a flow is started again. The delay doubles while it lives for less than `SHORT_S`.
RESTART_S: Final = 0.5
RESTART_S_MAX: Final = 60.0
SHORT_S: Final = 60.0
# From the time at which a worker takes a flow run until its process supervises the run.
START_S_MAX: Final = 60.0


class HoldfastResult(BaseWorkerResult):
    """The end of a flow run's place."""


class HoldfastWorker(BaseWorker[HoldfastConfiguration, HoldfastVariables, HoldfastResult]):
    """Runs flows, attends to those of former workers, and starts lost ones again."""

    type = "holdfast"
    job_configuration = HoldfastConfiguration
    job_configuration_variables = HoldfastVariables
    _display_name = "Holdfast"
    _description = (
        "Run the supervisors of training runs as processes or as small Slurm jobs that outlive the "
        "worker, and start lost ones again."
    )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = flow_places.FlowPlaces(holdfast_home() / "flows")
        # How many tasks attend to a flow run: two while it is resumed.
        self._attended: Counter[str] = Counter()
        self._claimed: set[str] = set()
        # Crashed flow runs without a live run, which are not checked again.
        self._over: set[str] = set()
        self._found: dict[str, RunPaths] = {}
        self._free_looks: dict[str, int] = {}
        # When a flow run without a known run is searched for again, by the monotonic clock.
        self._search_at: dict[str, float] = {}

    @property
    def _prefect(self) -> PatientClient:
        return PatientClient(self.client, self._logger)

    async def setup(self) -> None:
        """Take up the flows that a former worker of this host started."""
        await super().setup()
        group = self._runs_task_group
        assert group is not None, "the base class has made it"
        for place in await run_sync(self._places.all):
            group.start_soon(self._attend_again, place)
        group.start_soon(self._watch_others)

    async def teardown(self, *exc_info: Any) -> None:
        """Stop attending to flows, which continue."""
        if self._runs_task_group is not None:
            # The flows run in separate sessions, so ending these tasks leaves them running, see
            # decision 67.
            self._runs_task_group.cancel_scope.cancel()
        await super().teardown(*exc_info)

    async def run(
        self,
        flow_run: FlowRun,
        configuration: HoldfastConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> HoldfastResult:
        """Run a flow to its final state, in one place after the other if it dies."""
        number = str(flow_run.id)
        with FlowLock(self._places.lock_path(number)) as lock:
            # Not waited for: another task of this worker may attend to the same flow run while it
            # is resumed.
            lock.try_take()
            place, child = await run_sync(self._start, flow_run, configuration)
            if task_status is not None:
                task_status.started(str(place))
            await self._attend(flow_run, place, child)
        return HoldfastResult(identifier=str(place), status_code=0)

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: HoldfastConfiguration,
        grace_seconds: int = 30,
    ) -> None:
        """End the place of a flow run that has not begun. Raises `InfrastructureNotFound`."""
        places = await run_sync(self._places.all)
        mine = [place for place in places if str(place) == infrastructure_pid]
        if not mine:
            raise InfrastructureNotFound(f"{infrastructure_pid} is not of this host")
        await run_sync(flow_places.end, mine[0])

    def _start(
        self, flow_run: FlowRun, configuration: HoldfastConfiguration
    ) -> tuple[flow_places.FlowPlace, subprocess.Popen[bytes] | None]:
        number = str(flow_run.id)
        command = [sys.executable, "-m", "prefect.engine"]
        given = {key: value for key, value in configuration.env.items() if value is not None}
        environment = {**os.environ, **given}
        log, child = self._places.log_path(number), None
        if configuration.place == "slurm":
            place = flow_places.submit_job(number, command, environment, log, configuration.options)
        else:
            place, child = flow_places.start_process(
                number, command, environment, log, configuration.working_dir
            )
        # Written before the flow is watched, so a worker that restarts finds it, see decision 67.
        self._places.write(place)
        return place, child

    async def _attend_again(self, place: flow_places.FlowPlace) -> None:
        """Attend to the flow of a former worker, unless another worker does."""
        with FlowLock(self._places.lock_path(place.flow_run)) as lock:
            if not lock.try_take():
                return
            flow_run = await self._prefect.flow_run(UUID(place.flow_run))
            if flow_run is None:
                await run_sync(self._places.forget, place.flow_run)
                return
            self._logger.info("found flow run '%s' again at %s", flow_run.name, place)
            await self._attend(flow_run, place)

    async def _attend(
        self,
        flow_run: FlowRun,
        place: flow_places.FlowPlace | None,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Watch a flow until it has a final state. Start it again if it dies and its run lives.

        Without a place, the flow was lost with another host. After an error, such as that of a
        server that is down, `_watch_others` finds a lost flow again.
        """
        number = str(flow_run.id)
        self._attended[number] += 1
        try:
            await self._attend_to_end(flow_run, place, child)
        # An error would end the worker, with everything that it attends to.
        except Exception:
            self._logger.exception("flow run '%s' cannot be attended to", flow_run.name)
        finally:
            self._attended[number] -= 1

    async def _attend_to_end(
        self,
        flow_run: FlowRun,
        place: flow_places.FlowPlace | None,
        child: subprocess.Popen[bytes] | None,
    ) -> None:
        """Do the work of `_attend`. The lock in the run's folder keeps other workers from it."""
        number, delay_s = str(flow_run.id), RESTART_S
        scheduled = await self._times_scheduled(flow_run)
        with contextlib.ExitStack() as locks:
            begun_at = anyio.current_time()
            await self._wait_for_end(flow_run, place, child)
            while await self._after_end(flow_run, scheduled):
                # One worker starts it again: the one that gets `worker.lock` in the run's folder,
                # see decision 67.
                if not await run_sync(self._claim, flow_run, locks):
                    return
                lived_s = anyio.current_time() - begun_at
                delay_s = RESTART_S if lived_s > SHORT_S else min(2 * delay_s, RESTART_S_MAX)
                await anyio.sleep(delay_s)
                begun_at = anyio.current_time()
                place, child = await self._start_again(flow_run)
                await self._wait_for_end(flow_run, place, child)
        state = await self._state(flow_run)
        if state.is_final() or await self._times_scheduled(flow_run) == scheduled:
            await run_sync(self._places.forget, number, state.is_crashed() or state.is_failed())

    def _claim(self, flow_run: FlowRun, locks: contextlib.ExitStack) -> bool:
        """Take the lock of the flow run's training run until the flow run has ended."""
        number = str(flow_run.id)
        paths = self._find_run(flow_run)
        if paths is None or number in self._claimed:
            return paths is not None
        lock = locks.enter_context(FlowLock(paths.worker_lock))
        # Checked again under the lock: another worker may have started the flow meanwhile.
        if not lock.try_take() or supervision.is_supervised(paths.flow_lock) is not False:
            return False
        self._claimed.add(number)
        locks.callback(self._claimed.discard, number)
        return True

    async def _wait_for_end(
        self,
        flow_run: FlowRun,
        place: flow_places.FlowPlace | None,
        child: subprocess.Popen[bytes] | None,
    ) -> None:
        """Wait until the place is gone. If Prefect cancels the flow run, cancel its training run.

        The flow then follows the run to its last checkpoint, and ends as cancelled on its own.
        """
        has_asked = False
        while place is not None and await run_sync(self._is_there, place, child):
            if not has_asked and (state := await self._state(flow_run)).is_cancelling():
                has_asked = True
                if not await run_sync(self._cancel, flow_run, state):
                    await run_sync(flow_places.end, place)
            await anyio.sleep(LOOK_S)

    def _cancel(self, flow_run: FlowRun, state: State[Any]) -> bool:
        """Ask the run of a flow run to end; return False if the flow run has none."""
        paths = self._find_run(flow_run)
        if paths is not None:
            self._logger.info("%s", cancellation.cancel_run(paths, flow_run, state))
        return paths is not None

    def _is_there(
        self, place: flow_places.FlowPlace, child: subprocess.Popen[bytes] | None
    ) -> bool:
        if child is not None and child.poll() is not None:
            return False
        try:
            return flow_places.is_running(place)
        except SchedulerUnavailableError:
            # Slurm does not answer. An unknown job counts as there, never as gone.
            return True

    async def _after_end(self, flow_run: FlowRun, scheduled: int) -> bool:
        """Give a flow run whose place is gone its state; return whether to start it again.

        `scheduled` is how often Prefect had scheduled the flow run when its place began. If it has
        done so again, as after a resumption, the flow run has another place by now.
        """
        state = await self._state(flow_run)
        # A flow that gets SIGTERM, as when its host shuts down, reports itself as crashed.
        if state.is_final() and not state.is_crashed():
            return False
        # A suspended flow run starts again when Prefect schedules it.
        if state.is_paused() or state.is_scheduled():
            return False
        if await self._times_scheduled(flow_run) != scheduled:
            return False
        if state.is_cancelling():
            await run_sync(self._cancel, flow_run, state)
            await self._set_state(flow_run, Cancelled(message="cancelled by its worker"))
            return False
        if await run_sync(self._has_live_run, flow_run):
            return True
        if state.is_final():
            return False
        log = self._places.log_path(str(flow_run.id))
        await self._set_state(flow_run, Crashed(message=f"the flow ended early; see {log}"))
        return False

    async def _start_again(
        self, flow_run: FlowRun
    ) -> tuple[flow_places.FlowPlace, subprocess.Popen[bytes] | None]:
        self._logger.warning("flow run '%s' was lost and is started again", flow_run.name)
        configuration = await self.job_configuration.resolve_for_flow_run(
            flow_run,
            client=self.client,
            work_pool=self.work_pool.model_copy(deep=True),
            worker_name=self.name,
            worker_id=self.backend_id,
        )
        # A scheduled run would be taken by any worker of the pool.
        await self._set_state(flow_run, Pending(message="its process was lost"))
        place, child = await run_sync(self._start, flow_run, configuration)
        await self.client.update_flow_run(flow_run.id, infrastructure_pid=str(place))
        return place, child

    async def _watch_others(self) -> None:
        """Look for flows of lost hosts, and take them over."""
        while True:
            try:
                await self._look_at_others()
                await self._look_at_cancelled()
            # A server that is down, or a root that hangs, is asked again.
            except Exception as error:
                self._logger.warning("flows of other workers were not looked at: %s", error)
            await anyio.sleep(ZOMBIES_S)

    async def _look_at_others(self) -> None:
        others = await self._unknown(
            [StateType.RUNNING, StateType.CRASHED], FlowRunSort.START_TIME_DESC
        )
        looks = {}
        for flow_run in others:
            number = str(flow_run.id)
            try:
                is_lost = await run_sync(self._is_lost, flow_run)
            # Such as a root that cannot be read. The next flow run may have another one.
            except Exception as error:
                self._logger.warning("flow run '%s': not looked at: %s", flow_run.name, error)
                continue
            if not is_lost:
                if flow_run.state is not None and flow_run.state.is_final():
                    self._over.add(number)
                continue
            looks[number] = self._free_looks.get(number, 0) + 1
            if looks[number] >= LOOKS and not await self._is_starting(flow_run):
                group = self._runs_task_group
                assert group is not None, "this is one of its tasks"
                del looks[number]
                group.start_soon(self._attend, flow_run, None)
        self._free_looks = looks

    async def _unknown(self, types: list[StateType], sort: FlowRunSort) -> list[FlowRun]:
        """Return the pool's flow runs in these states, without those attended or over."""
        states = filters.FlowRunFilterStateType(any_=types)
        pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[self._work_pool_name]))
        found = await self.client.read_flow_runs(
            flow_run_filter=filters.FlowRunFilter(state=filters.FlowRunFilterState(type=states)),
            work_pool_filter=pool,
            sort=sort,
            limit=ZOMBIES_MAX,
        )
        known = set(+self._attended) | self._over
        return [one for one in found if str(one.id) not in known]

    async def _look_at_cancelled(self) -> None:
        """Cancel paused runs whose suspended flow runs were cancelled: no process hears of that."""
        for flow_run in await self._unknown([StateType.CANCELLED], FlowRunSort.END_TIME_DESC):
            try:
                await run_sync(self._cancel_paused, flow_run)
                self._over.add(str(flow_run.id))
            # Such as a root that cannot be read, which is tried again.
            except Exception as error:
                self._logger.warning("flow run '%s': not looked at: %s", flow_run.name, error)

    def _cancel_paused(self, flow_run: FlowRun) -> None:
        state = flow_run.state
        if state is None or time.time() - state.timestamp.timestamp() > CRASHED_S_MAX:
            return
        # Another flow run may have taken up the run since.
        self._found.pop(str(flow_run.id), None)
        paths = self._find_run(flow_run)
        if paths is not None and history_cache.load_tallied(paths).state is RunState.PAUSED:
            self._logger.info("%s", cancellation.cancel_run(paths, flow_run, state))

    async def _is_starting(self, flow_run: FlowRun) -> bool:
        """Return whether the flow run's process may not have come to its run yet."""
        if flow_run.state is not None and flow_run.state.is_final():
            return False
        begun_at = last_begun_at(await self._prefect.states(flow_run.id))
        paths = self._find_run(flow_run)
        taken = None if paths is None else await run_sync(cancellation.last_supervision, paths)
        has_come = taken is not None and taken.time >= begun_at
        # Prefect's server has another clock, so a time that is far in the future proves nothing.
        return not has_come and abs(time.time() - begun_at) < START_S_MAX

    def _is_lost(self, flow_run: FlowRun) -> bool:
        """Return whether the flow run's training run lives and has no supervisor."""
        state = flow_run.state
        if state is not None and state.is_crashed():
            if time.time() - state.timestamp.timestamp() > CRASHED_S_MAX:
                return False
            # Another flow run may have taken up the run since.
            self._found.pop(str(flow_run.id), None)
        number, now = str(flow_run.id), time.monotonic()
        if now < self._search_at.get(number, 0.0):
            return False
        paths = self._find_run(flow_run)
        if paths is None:
            # It has not begun yet, or is of another flow. The search reads all runs.
            self._search_at[number] = now + SEARCH_S
            return False
        return supervision.is_supervised(paths.flow_lock) is False and self._has_live_run(flow_run)

    def _find_run(self, flow_run: FlowRun) -> RunPaths | None:
        """Return the run that the flow run supervises or supervised last, or None."""
        number = str(flow_run.id)
        if number not in self._found:
            paths = cancellation.find_supervised(
                cancellation.home_of(flow_run.parameters.get("root")), number
            )
            if paths is None:
                return None
            self._found[number] = paths
        return self._found[number]

    def _has_live_run(self, flow_run: FlowRun) -> bool:
        paths = self._find_run(flow_run)
        try:
            return paths is not None and history_cache.load_tallied(paths).state.is_live
        except (HoldfastError, OSError):
            return False

    async def _state(self, flow_run: FlowRun) -> State[Any]:
        return await self._prefect.state(flow_run.id)

    async def _times_scheduled(self, flow_run: FlowRun) -> int:
        return times_scheduled(await self._prefect.states(flow_run.id))

    async def _set_state(self, flow_run: FlowRun, state: State[Any]) -> None:
        await self.client.set_flow_run_state(flow_run.id, state, force=True)
