"""Heartbeats: small, bounded, and judged only by the reader's clock; GPUs of a fake driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.node.rank_status import RECENT_STEPS, Phase, RankStatusTable
from holdfast.trainer.ranks import rank_context as trainer_stacks
from holdfast.workers.agent.context import AgentContext, NodePlace, load_context
from holdfast.workers.agent.watch import stacks
from holdfast.workers.agent.watch.flight_recorder import recorder_environment, take_flight_record
from holdfast.workers.agent.watch.heartbeat import Heartbeat, earlier_times
from holdfast.workers.agent.watch.kernel_view import ProcessTree, look_below, waits_for_others
from holdfast.workers.agent.watch.rank_watch import RankWatch
from holdfast.workers.nodes.calibration import PhaseTimes
from holdfast.workers.nodes.gpus import GpuBeat, GpuWatch, watch_gpus
from holdfast.workers.nodes.heartbeats import (
    HeartbeatWatch,
    HeartbeatWriter,
    NodeBeat,
    RankBeat,
    clock_problems,
    read_heartbeats,
)
from holdfast.workers.nodes.series_reading import list_series, read_series

WAIT_S = 20.0


def wait_for(look: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError("the condition did not become true in time")


def beat(**more: Any) -> NodeBeat:
    facts: dict[str, Any] = {"node": 0, "host": "n", "time": 100.0, "attempt": 1, **more}
    return NodeBeat(launch=1, agent_pid=1, **facts)


def test_a_heartbeat_of_eight_ranks_has_at_most_4_kb_plus_2_kb_for_gpus() -> None:
    big = 10**13
    rank = RankBeat(
        rank=99_999,
        step=10**7,
        phase="rendezvous",
        age_s=12345.678,
        step_time_s=1234.123456,
        pid=4_194_304,
        step_p50_s=1234.123456,
        step_p99_s=1234.123456,
        own_s=1234.123456,
        rss_bytes=big,
        cpu_percent=6400.5,
        threads=1000,
        read_bytes=big,
        write_bytes=big,
    )
    gpu = GpuBeat(
        index=7,
        uuid="GPU-5a2e4f3c-9d1b-4c7e-8f6a-0b1c2d3e4f5a",
        memory_used_bytes=big,
        memory_total_bytes=big,
        utilisation_percent=100,
        temperature_c=90,
        ecc_uncorrected=100,
        xids=(79, 48, 63, 94),
    )
    known = PhaseTimes(count=10**7, p50_s=1234.123456, p99_s=1234.123456)
    phases = {phase.name.lower(): known for phase in Phase}
    whole = beat(ranks=(rank,) * 8, gpus=(gpu,) * 8, phases=phases, boot_id="b" * 36)
    assert len(whole.model_dump_json(exclude_none=True)) < 4096 + 2048
    usual = beat(ranks=(rank,) * 8, phases=dict(list(phases.items())[:5]), boot_id="b" * 36)
    assert len(usual.model_dump_json(exclude_none=True)) < 4096


def test_a_node_is_silent_when_its_heartbeat_does_not_change_at_any_clock_time(
    tmp_path: Path,
) -> None:
    attempt = AttemptPaths(tmp_path / "attempts" / "0001")
    known: dict[int, dict[str, Any]] = {}
    writer = HeartbeatWriter(attempt)

    def write_heartbeat(node: int, **more: Any) -> None:
        known[node] = beat(node=node, **more).model_dump(mode="json")
        writer.write(list(known.values()))

    watch = HeartbeatWatch(attempt, heartbeat_s=2.0)
    write_heartbeat(0, time=250e9)
    write_heartbeat(1, time=5.0)
    assert watch.look(0.0) == ([], [])
    write_heartbeat(1, time=5.0, monotonic_s=1.0)
    assert watch.look(3.0) == ([], [])
    assert watch.look(6.0) == ([], [])
    assert watch.look(6.1) == (["node-0000"], [])
    assert watch.look(7.0) == ([], [])
    write_heartbeat(0, time=250e9, monotonic_s=1.0)
    assert watch.look(8.0) == ([], ["node-0000"])
    known[1]["ranks"] = "none"
    writer.write(list(known.values()))
    assert [one.node for one in read_heartbeats(attempt)] == [0]
    writer.close()
    (problem,) = clock_problems(read_heartbeats(attempt), now=250e9 - 3600)
    assert "3600 s in the future" in problem
    assert clock_problems(read_heartbeats(attempt), now=250e9) == []


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempts" / "0001")
    writer = HeartbeatWriter(attempt)
    assert read_heartbeats(attempt) == []
    inodes = set()
    for step in range(6):
        beats = [beat(node=node, time=float(step)) for node in range(1 + step % 3)]
        writer.write([one.model_dump(mode="json") for one in beats])
        assert read_heartbeats(attempt) == beats
        inodes |= {(path.name, path.stat().st_ino) for path in attempt.heartbeats.iterdir()}
    assert len(inodes) == 2, "the two files are written in place"
    newest = max(attempt.heartbeats.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    whole = newest.read_bytes()
    for cut in range(0, len(whole.rstrip()), 7):
        # The former text ends where the new one has not been written yet.
        newest.write_bytes(whole[:cut] + b"9" + whole[cut + 1 :])
        if newest.read_bytes() != whole:
            assert [one.time for one in read_heartbeats(attempt)] == [4.0] * 2, cut
    newest.write_bytes(b'{"digest":"')
    assert [one.time for one in read_heartbeats(attempt)] == [4.0] * 2
    writer.close()


@pytest.fixture
def context(tmp_path: Path) -> AgentContext:
    run = RunFolder(tmp_path, "tried", "u" * 32)
    return load_context(run.submit(1, 2, 0.0).request, {})


def test_silences_are_measured_reported_and_known_to_the_next_attempt(
    context: AgentContext, tmp_path: Path
) -> None:
    status_table, handle = RankStatusTable.create(2)
    watch = RankWatch(status_table, 0, {})
    attempt = context.attempt
    attempt.heartbeats.mkdir(parents=True, exist_ok=True)
    heartbeat = Heartbeat(context, status_table, watch)
    record = status_table.record(1)
    record.register(1, 0)
    record.beat(Phase.EVAL)
    wait_for(lambda: watch.statuses()[1].phase == "eval")
    time.sleep(0.3)
    record.beat(Phase.TRAIN)
    for step in range(1, 40):
        time.sleep(0.01)
        record.finish_step(step)
    assert len(record.recent_steps_s(0)) == RECENT_STEPS
    assert all(0.005 < one < 5 for one in record.recent_steps_s(36))
    wait_for(lambda: watch.summary().get("train"))
    heartbeat.close()
    (reported,) = read_heartbeats(attempt)
    assert [rank.rank for rank in reported.ranks] == [1]
    assert reported.ranks[0].threads
    assert reported.phases["eval"].p99_s >= 0.25
    assert reported.boot_id
    later = RunFolder(tmp_path / "other", "tried", "u" * 32)
    for number in (1, 2):
        later.submit(number, 2, 0.0)
    writer = HeartbeatWriter(later.paths.attempt(1))
    writer.write([reported.model_copy(update={"world_size": 4}).model_dump(mode="json")])
    writer.close()
    known = earlier_times(load_context(later.paths.attempt(2).request, {}))
    assert known["eval"].p99_s == pytest.approx(2 * reported.phases["eval"].p99_s)
    watch.close()
    status_table.close()
    os.close(handle)


def test_each_launch_has_its_own_rows_up_to_its_last_second(context: AgentContext) -> None:
    status_table, handle = RankStatusTable.create(2)
    watch = RankWatch(status_table, 0, {})
    heartbeat = Heartbeat(context, status_table, watch)
    for launch, first_rank in ((1, 0), (2, 6)):
        # As the agent does at the start of a launch.
        heartbeat.end_launch()
        watch.move(first_rank)
        heartbeat.move(context.at(NodePlace(node=3 * launch - 3, nodes=4)))
        status_table.reset()
        watch.begin()
        heartbeat.launch = launch
        record = status_table.record(0)
        record.register(first_rank, 0)
        for step in range(1, 4):
            record.finish_step(step)
            time.sleep(0.1 * launch)
    heartbeat.close()
    files = list_series(context.attempt, "ranks")
    assert [node for node, _ in files] == [0, 3]
    series, problems = read_series([path for _, path in files], "ranks")
    assert not problems
    rows = [(one.launch.tolist(), one.first_rank.tolist()) for one in series]
    assert rows == [([1], [0]), ([2], [6])]
    first, second = (one.values[0, 0, 0] for one in series)
    assert 0.05 < first < second
    assert series[0].end[0] <= series[1].start[0] + 0.1
    watch.close()
    status_table.close()
    os.close(handle)


def test_a_clock_jump_is_journaled_and_changes_no_silence(
    context: AgentContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_table, handle = RankStatusTable.create(2)
    watch = RankWatch(status_table, 0, {})
    context.attempt.heartbeats.mkdir(parents=True, exist_ok=True)
    heartbeat = Heartbeat(context, status_table, watch)
    status_table.record(0).register(0, 0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    heartbeat.close()
    (event,) = read_journal(context.attempt.node_journal(0))[0]
    assert event.kind is EventKind.NOTE
    assert "jumped by +86400" in event.data["text"]
    assert watch.statuses()[0].silent_s < 60
    watch.close()
    status_table.close()
    os.close(handle)


def test_waiting_for_other_ranks_is_distinguished_from_sleeping() -> None:
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import threading;threading.Lock();"
                "l=threading.Lock();l.acquire();print(1,flush=True);l.acquire()"
            ),
        ],
        stdout=subprocess.PIPE,
    )
    sleeping = subprocess.Popen(
        [sys.executable, "-c", "import time;print(1,flush=True);time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        for process in (waiting, sleeping):
            assert process.stdout is not None
            process.stdout.readline()
        wait_for(lambda: waits_for_others(waiting.pid))
        time.sleep(0.1)
        assert not waits_for_others(sleeping.pid)
    finally:
        for process in (waiting, sleeping):
            process.kill()
            process.communicate()


# A parent that waits for its `vfork` child is in the same state as one that waits for a disk.
STALLS = """
import ctypes, time
while time.process_time() < 0.2: pass
if ctypes.PyDLL(None).vfork() == 0:
    print("there", flush=True)
    time.sleep(60)
"""


def test_child_processes_that_wait_for_storage_or_compute_are_detected() -> None:
    code = "import subprocess,sys;subprocess.Popen([sys.executable,'-c',sys.argv[1]]).wait()"
    rank = subprocess.Popen(
        [sys.executable, "-c", code, STALLS], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"there\n"
        wait_for(lambda: look_below(rank.pid).on_storage)
        here, there = look_below(os.getpid()), look_below(rank.pid)
        assert 0 < there.cpu_s < here.cpu_s
        assert 0 < there.io_bytes < here.io_bytes
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.communicate()
    assert look_below(rank.pid) == ProcessTree(on_storage=False, cpu_s=0.0, io_bytes=0)


OFFERS = """
import time
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.trainer.ranks.rank_context import offer_stacks
import sys
record = RankStatusTable.open(sys.argv[1]).record(0)
offer_stacks(record)
def stuck():
    print("there", flush=True)
    time.sleep(60)
stuck()
"""


@pytest.mark.root
def test_stacks_come_from_faulthandler_when_tracing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_table, handle = RankStatusTable.create(1)
    path = f"/proc/{os.getpid()}/fd/{handle}"
    rank = subprocess.Popen([sys.executable, "-c", OFFERS, path], stdout=subprocess.PIPE)
    refuses = tmp_path / "py-spy"
    refuses.write_text("#!/bin/sh\necho 'Permission Denied: ptrace' >&2\nexit 1\n")
    refuses.chmod(0o755)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"there\n"
        offer = status_table.record(0).stacks_offer
        assert offer[0] == trainer_stacks.STACKS_SIGNAL
        target = stacks.StackTarget(rank=0, pid=rank.pid, offer=offer)
        spied, _ = stacks.take_stack(target)
        assert (spied.source, spied.place.split()[0]) == ("py-spy", "stuck")
        monkeypatch.setattr(stacks, "_beside_python", lambda: str(tmp_path))
        reported, text = stacks.take_stack(target)
        assert (reported.source, reported.place.split()[0]) == ("faulthandler", "stuck")
        assert "in stuck" in text
        assert stacks.take_stack(target)[0].digest == reported.digest
        none, _ = stacks.take_stack(stacks.StackTarget(rank=0, pid=rank.pid))
        assert "Permission Denied" in none.problem
        assert "has no faulthandler" in none.problem
        assert rank.poll() is None
    finally:
        rank.kill()
        rank.communicate()
        status_table.close()
        os.close(handle)


RECORDER = """
import os, sys, time
os.mkfifo(sys.argv[1]); pipe = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
print("there", flush=True)
while not os.read(pipe, 1): time.sleep(0.05)
open(sys.argv[2], "w").write("entries")
time.sleep(60)
"""


def test_the_flight_record_is_requested_and_copied(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    own = recorder_environment(tmp_path, {})
    pipe = own["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe"
    record = own["TORCH_FR_DUMP_TEMP_FILE"] + "3"
    command = [sys.executable, "-c", RECORDER, pipe, record]
    rank = subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        found = take_flight_record(rank.pid, 3, folder)
        assert found is not None
        assert found.read_text() == "entries"
        assert take_flight_record(rank.pid, 4, folder) is None
        assert take_flight_record(os.getpid(), 0, folder) is None
    finally:
        rank.kill()
        rank.communicate()
    assert recorder_environment(tmp_path, {"TORCH_FR_BUFFER_SIZE": "0"}) == {}


class NvmlFails(Exception):
    pass


class Driver:
    """The functions of `pynvml` for two fake GPUs; the second supports little."""

    NVMLError = NvmlFails
    NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken, self.is_down = is_broken, threading.Event()
        self.xids = [79, 48]

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise NvmlFails("Driver/library version mismatch")

    def nvmlShutdown(self) -> None:
        self.is_down.set()

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=1 << 30, total=80 << 30, free=79 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle:
            raise NvmlFails("Not Supported")
        return 2

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        if handle:
            raise NvmlFails("Not Supported")

    def nvmlEventSetWait_v2(self, events: object, wait_ms: int) -> Any:
        if not self.xids:
            raise NvmlFails("Timeout")
        return SimpleNamespace(device=0, eventType=8, eventData=self.xids.pop(0))


def test_gpu_beats_contain_what_the_driver_supports() -> None:
    driver = Driver()
    watch = GpuWatch(driver)
    first, second = wait_for(watch.beats)
    assert first.xids == (79, 48)
    assert (first.memory_used_bytes, first.utilisation_percent) == (1 << 30, 97)
    assert (first.temperature_c, first.ecc_uncorrected) == (61, 2)
    assert (second.uuid, second.ecc_uncorrected, second.xids) == ("GPU-1", None, ())
    watch.close()
    assert driver.is_down.is_set()


def test_a_failing_or_missing_gpu_driver_only_loses_the_gpu_beats() -> None:
    broken = GpuWatch(Driver(is_broken=True))
    broken.close()
    assert broken.beats() == ()
    if not Path("/dev/nvidiactl").exists():
        assert watch_gpus() is None


def test_nodes_are_not_silent_after_a_pause_of_the_watch(tmp_path: Path) -> None:
    """All of them were suspended for an hour. The nodes' next heartbeats come a moment later."""
    attempt = AttemptPaths(tmp_path / "attempts" / "0001")
    writer = HeartbeatWriter(attempt)
    watch = HeartbeatWatch(attempt, heartbeat_s=2.0)
    writer.write([beat(monotonic_s=1.0).model_dump(mode="json")])
    assert [watch.look(at) for at in (0.0, 2.0)] == [([], [])] * 2
    assert watch.look(3602.0) == ([], [])
    writer.write([beat(monotonic_s=3603.0).model_dump(mode="json")])
    assert watch.look(3604.0) == ([], [])
    # Without a heartbeat, the node is silent soon after the pause.
    assert [watch.look(at) for at in (7200.0, 7202.0)] == [([], []), ([], [])]
    assert watch.look(7203.0) == (["node-0000"], [])
    writer.close()
