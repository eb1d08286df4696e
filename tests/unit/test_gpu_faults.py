"""What GPUs report during training: errors that are new, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, spec_of
from tests.unit.test_workers_heartbeats import Driver, NvmlFails, wait_for

from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.spec.sections import GpuFaults, Health
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.health.gpus import GpuHealth, GpuJudge
from holdfast.workers.agent.node import NodeReport
from holdfast.workers.decisions.causes import RankFailure, classify_crash, hung_ending
from holdfast.workers.decisions.exclusions import exclusions
from holdfast.workers.decisions.gpu_faults import (
    FATAL_XIDS,
    GpuFinding,
    GpuLimits,
    find_faults,
    find_wear,
    hosts_at_fault,
)
from holdfast.workers.decisions.policy import decide_in_place
from holdfast.workers.nodes.gpus import GpuBeat, GpuWatch, KernelLog, pci_place, xids_in

USED = {"ecc_uncorrected": 7, "xids": (48,), "xids_seen": 1, "nvlink_errors": 900}
BEFORE = GpuBeat(
    index=2,
    uuid="GPU-2",
    nvlinks_down=1,
    pcie_replays=5,
    throttled_s=50.0,
    remap_failed=False,
    temperature_c=70,
    **USED,
)


def after(**changes: Any) -> GpuBeat:
    return BEFORE.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        # What was there before the launch is nothing new.
        ({}, []),
        ({"xids": (48, 79), "xids_seen": 2}, ["xid-79"]),
        ({"xids": (13, 48, 95, 31), "xids_seen": 5}, ["xid-48", "xid-95"]),
        # Errors of programs, contained errors, and a row that was remapped as it should be.
        ({"xids": (13, 31, 94, 63), "xids_seen": 5}, []),
        ({"ecc_uncorrected": 8}, ["ecc"]),
        ({"ecc_uncorrected": None}, []),
        ({"ecc_uncorrected": 0}, []),
        ({"remap_failed": True}, ["remap"]),
        ({"is_lost": True, "ecc_uncorrected": None}, ["lost"]),
        ({"nvlinks_down": 2}, ["nvlink-down"]),
        ({"nvlinks_down": 0}, []),
        # Another GPU has taken the index.
        ({"uuid": "GPU-9", "ecc_uncorrected": 99}, []),
    ],
)
def test_only_new_faults_count(changes: dict[str, Any], kinds: list[str]) -> None:
    found = find_faults([BEFORE], [after(**changes)])
    assert [one.kind for one in found] == kinds
    assert all(one.is_fault and one.text.startswith("GPU 2: ") for one in found)


def test_a_failure_to_remap_that_was_unknown_before_is_no_change() -> None:
    old, new = after(remap_failed=None), after(remap_failed=True)
    assert not find_faults([old], [new])
    assert not find_faults([], [new])


def test_the_fatal_errors_are_those_after_which_a_gpu_must_be_reset() -> None:
    assert {48, 62, 64, 74, 79, 95, 119, 120, 140} <= FATAL_XIDS.keys()
    assert not {13, 31, 43, 45, 63, 68, 92, 94} & FATAL_XIDS.keys()


LIMITS = GpuLimits(throttled_s=60.0, link_errors=100)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"throttled_s": 109.0}, []),
        ({"throttled_s": 110.0}, ["heat"]),
        ({"nvlink_errors": 999}, []),
        ({"nvlink_errors": 1000}, ["nvlink"]),
        ({"pcie_replays": 105}, ["pcie"]),
        ({"pcie_replays": None}, []),
    ],
)
def test_what_slows_a_gpu_down_counts_beyond_the_limit(
    changes: dict[str, Any], kinds: list[str]
) -> None:
    found = find_wear([BEFORE], [after(**changes)], LIMITS)
    assert [one.kind for one in found] == kinds
    assert not any(one.is_fault for one in found)
    assert not find_wear([BEFORE], [after(**changes)], GpuLimits())


def finding(kind: str, *, is_fault: bool = True) -> GpuFinding:
    return GpuFinding(gpu=0, kind=kind, text=f"GPU 0: {kind}", is_fault=is_fault)


ECC, HEAT = finding("ecc"), finding("heat", is_fault=False)


@pytest.mark.parametrize(
    ("found", "nodes", "hosts"),
    [
        ({"n1": [ECC]}, 4, ("n1",)),
        ({"n1": [ECC]}, 1, ("n1",)),
        ({"n1": [ECC], "n2": [ECC]}, 4, ("n1", "n2")),
        # The driver, or the room.
        ({"n1": [HEAT], "n2": [HEAT], "n3": [HEAT]}, 4, ()),
        ({"n1": [HEAT], "n2": [HEAT], "n3": [HEAT, ECC]}, 4, ("n3",)),
        ({"n1": [ECC]}, 0, ()),
        ({"n1": []}, 4, ()),
    ],
)
def test_what_most_nodes_have_is_no_fault_of_a_node(
    found: dict[str, list[GpuFinding]], nodes: int, hosts: tuple[str, ...]
) -> None:
    assert hosts_at_fault(found, nodes) == hosts


class Node:
    """A node whose readings a test sets."""

    def __init__(self, **health: Any) -> None:
        self.beats: tuple[GpuBeat, ...] = ()
        self.health = GpuHealth(lambda: self.beats, Health(**health))

    def read(self, *beats: GpuBeat) -> list[str]:
        self.beats = beats
        return [one.kind for one in self.health.findings()]


def test_a_node_compares_with_the_first_reading_of_each_launch() -> None:
    node = Node()
    node.health.begin()
    assert node.read() == []
    assert node.read(BEFORE) == []
    assert node.read(after(ecc_uncorrected=8)) == ["ecc"]
    assert node.read(after(ecc_uncorrected=8)) == ["ecc"], "it stays known for the launch"
    node.health.begin()
    assert node.read(after(ecc_uncorrected=8)) == []
    assert node.read(after(ecc_uncorrected=9)) == ["ecc"]
    off = Node(gpus="off")
    assert [off.read(BEFORE), off.read(after(ecc_uncorrected=8))] == [[], []]


def test_wear_counts_within_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    node = Node(throttled_s_max=60)
    throttled_s = 0.0
    for _ in range(100):
        # A tenth of the time is no slowdown, however long it lasts.
        now, throttled_s = now + 60.0, throttled_s + 6.0
        assert node.read(after(throttled_s=throttled_s)) == []
    assert node.read(after(throttled_s=throttled_s + 50.0)) == ["heat"]


def report(*found: GpuFinding) -> NodeReport:
    blank: dict[str, Any] = {"phases": (), "registered": 0, "alive": 0, "completed": 0}
    return NodeReport(exit_code=None, resumed=0, gpus=found, **blank)


def test_a_report_brings_the_findings_to_node_0() -> None:
    sent = report(ECC, HEAT).to_json()
    assert NodeReport.from_json(sent).gpus == (ECC, HEAT)
    del sent["gpus"]
    assert NodeReport.from_json(sent).gpus == (), "an agent of an older version reports none"


@pytest.fixture
def judge_of(tmp_path: Path) -> Callable[[GpuFaults], GpuJudge]:
    def make(gpus: GpuFaults) -> GpuJudge:
        return GpuJudge(Health(gpus=gpus), 3, JournalWriter(tmp_path / "node.jsonl"))

    return make


KILLED = RankFailure(rank=0, exit_code=-11, host="n1")
WRONG = RankFailure(
    rank=0, exit_code=1, traceback="Traceback (most recent call last):\nKeyError: 1"
)


@pytest.mark.parametrize("gpus", ["exclude", "report", "off"])
def test_a_fault_of_a_gpu_is_a_cause(
    tmp_path: Path, judge_of: Callable[[GpuFaults], GpuJudge], gpus: GpuFaults
) -> None:
    judge = judge_of(gpus)
    found = () if gpus == "off" else (ECC,)
    for _ in range(2):
        judge.look({"n1": report(), "n2": report(*found)})
    events = read_journal(tmp_path / "node.jsonl")[0]
    assert {event.kind for event in events} <= {EventKind.NODE_UNHEALTHY}
    expected = {"attempt": 3, "host": "n2", "check": "gpus", "detail": ECC.text}
    assert [event.data for event in events] == [expected] * len(found)
    crash, _ = classify_crash([KILLED])
    for ending in (crash, hung_ending(["every rank is silent"])):
        explained = judge.explain(ending, 2)
        if gpus != "exclude":
            assert explained == ending
            continue
        assert (explained.cause, explained.state) == (Cause.NODE_FAILURE, AttemptState.NODE_FAILED)
        assert explained.evidence == (f"n2 is unhealthy: gpus: {ECC.text}", *ending.evidence)
        assert decide_in_place(explained, restarts=0, restarts_max=3).action == "stop"
    assert judge.hosts == (("n2",) if gpus == "exclude" else ())
    # The program's own error stays the cause.
    error, _ = classify_crash([WRONG])
    assert judge.explain(error, 2) == error
    judge.begin()
    assert judge.explain(crash, 2) == crash, "a fault of the launch before explains nothing"


def test_wear_beyond_a_limit_excludes_a_host(judge_of: Callable[[GpuFaults], GpuJudge]) -> None:
    judge = judge_of("exclude")
    changes: dict[str, dict[str, Any]] = {
        "throttled_s_max": {"throttled_s": 110.0},
        "link_errors_max": {"pcie_replays": 65},
    }
    for limit, changed in changes.items():
        node = Node(**{limit: 60})
        node.read(BEFORE)
        assert len(node.read(after(**changed))) == 1
        judge.look({"n1": report(), limit: report(*node.health.findings())})
    assert judge.hosts == ("throttled_s_max", "link_errors_max")
    crash, _ = classify_crash([KILLED])
    assert judge.explain(crash, 2) == crash, "a slow GPU is no cause of a crash"


def test_a_host_at_fault_is_excluded_from_the_next_attempt() -> None:
    spec = spec_of()
    attempt = attempt_of(spec, 1, Cause.NODE_FAILURE, hosts=("n1", "n2"), failed_host="n1")
    attempt.facts.update(unhealthy_hosts=["n2"], lost_hosts=[])
    assert [str(one) for one in exclusions([attempt], NOW)] == ["n2 (unhealthy)"]


RECORDS = (
    "4,1201,91,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n"
    "6,1202,92,-;NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d\n"
    "4,1203,93,-;NVRM: Xid (PCI:0000:5e:00): 13, Graphics Exception\n"
    "4,1204,94,-;NVRM: Xid (PCI:what): 79, nonsense\n"
)


def test_errors_in_the_kernels_log_are_read_from_now_on(tmp_path: Path) -> None:
    assert xids_in(RECORDS) == [((0, 0x3B, 0), 79), ((0, 0x5E, 0), 13)]
    assert pci_place("00000000:3B:00.0") == pci_place("0000:3b:00") == (0, 0x3B, 0)
    path = tmp_path / "kmsg"
    path.write_text(RECORDS)
    log = KernelLog(path)
    assert log.read() == []
    with path.open("a") as stream:
        stream.write(RECORDS)
    assert [xid for _, xid in log.read()] == [79, 13]
    assert log.read() == []
    log.close()
    assert KernelLog(tmp_path / "none").read() == [], "without permission it reads nothing"


class FullDriver(Driver):
    """A driver with the counters of a data-center GPU. The second GPU has no events."""

    def __init__(self) -> None:
        super().__init__()
        self.heat_s = 4

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x3B + handle:02X}:00.0".encode())

    def nvmlDeviceGetRemappedRows(self, handle: int) -> list[int]:
        return [1, 0, 0, handle]

    def nvmlDeviceGetViolationStatus(self, handle: int, policy: int) -> Any:
        return SimpleNamespace(violationTime=self.heat_s * 10**9)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 4 or handle:
            raise NvmlFails("Not Supported")
        return int(link != 3)

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        if link == 3:
            raise NvmlFails("Inactive")
        return 10

    def nvmlDeviceGetPcieReplayCounter(self, handle: int) -> int:
        return 6

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980


def test_the_watch_reads_counters_and_the_kernels_log(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    log = KernelLog(path)
    path.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3c:00): 119, Timeout waiting for RPC from GSP\n")
    watch = GpuWatch(FullDriver(), log)
    first, second = wait_for(watch.beats)
    watch.close()
    assert (first.nvlink_errors, first.nvlinks_down, first.pcie_replays) == (90, 1, 6)
    assert (first.throttled_s, first.clock_mhz, first.clock_max_mhz) == (4.0, 1200, 1980)
    assert (first.remap_failed, second.remap_failed) == (False, True)
    assert (second.nvlink_errors, second.nvlinks_down) == (None, None)
    assert (first.xids, first.xids_seen) == ((79, 48), 2)
    assert (second.xids, second.xids_seen) == ((119,), 1), "from the log, as it has no events"
    assert first.is_lost is None


def test_a_lost_gpu_is_known_by_the_drivers_answer() -> None:
    class Lost(FullDriver):
        def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
            error = NvmlFails("GPU is lost")
            error.value = 15  # type: ignore[attr-defined]
            raise error

    watch = GpuWatch(Lost())
    first, _ = wait_for(watch.beats)
    watch.close()
    assert first.is_lost is True
