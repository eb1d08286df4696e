"""Flight records: read without running their code, and merged into the rank the others wait for."""

from __future__ import annotations

import json
import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.node.flight import (
    FILE,
    RECORD_BYTES_MAX,
    RankFlight,
    read_spans,
    span_text,
)
from holdfast.trainer.flight_records import main, read_record, read_records, summarise
from holdfast.workers.agent.watch.collectives import CollectiveBlame, find_missing
from holdfast.workers.agent.watch.flight_recorder import MergedRecords, read_summaries
from holdfast.workers.flight_records import main as merge

LINE = {"name": "step", "filename": "/home/ann/tour/train.py", "line": 24}
TORCH = {"name": "all_reduce", "filename": "/opt/torch/distributed/c10d.py", "line": 3}


class Record:
    """A rank's flight record, in the form that PyTorch writes."""

    def __init__(self, **groups: list[int]) -> None:
        """`groups` are the global ranks of each group, by name."""
        self.groups = groups
        self.entries: list[dict[str, Any]] = []

    def call(
        self,
        group: str,
        sequence: int,
        name: str = "all_reduce",
        state: str = "scheduled",
        **facts: Any,
    ) -> Record:
        self.entries.append(
            {
                "frames": [TORCH, LINE],
                "record_id": len(self.entries),
                "pg_id": 0,
                "process_group": (group, f"{group} group"),
                "collective_seq_id": sequence,
                "p2p_seq_id": 0,
                "op_id": sequence,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 1_758_610_505_924_024_825,
                "input_sizes": [[4096, 5120]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[4096, 5120]],
                "output_dtypes": ["BFloat16"],
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
            | facts
        )
        return self

    def done(self, group: str, *sequences: int) -> Record:
        for sequence in sequences:
            self.call(group, sequence, state="completed")
        return self

    def transfer(self, group: str, name: str, state: str = "scheduled") -> Record:
        number = len(self.entries) + 1
        return self.call(group, 0, name, state, is_p2p=True, p2p_seq_id=number)

    def batch(self, group: str, state: str, *names: str) -> Record:
        """Transfers in one batch, whose parts are recorded without a state."""
        number = len(self.entries) + 1
        for name in names:
            self.call(group, 0, name, is_p2p=True, p2p_seq_id=number)
        return self.call(group, 0, "coalesced", state, is_p2p=True, p2p_seq_id=number)

    @property
    def value(self) -> dict[str, Any]:
        config = {
            name: {"name": name, "desc": f"{name} group", "ranks": str(ranks)}
            for name, ranks in self.groups.items()
        }
        return {
            "version": "2.10",
            "nccl_version": "2.27",
            "pg_config": config,
            "pg_status": {},
            "entries": self.entries,
        }


def blame(*records: Record, world_size: int | None = None) -> CollectiveBlame:
    summaries = [summarise(rank, one.value) for rank, one in enumerate(records)]
    # As node 0 gets them.
    passed = [RankFlight.from_json(json.loads(json.dumps(one.to_json()))) for one in summaries]
    assert passed == summaries
    found = find_missing(passed, world_size or len(records))
    assert found is not None
    return found


def test_a_rank_that_never_called_the_collective_is_named_with_the_line() -> None:
    waiting = [Record(a=[0, 1, 2]).done("a", 1, 2).call("a", 3) for _ in range(2)]
    absent = Record(a=[0, 1, 2]).done("a", 1, 2)
    found = blame(waiting[0], absent, waiting[1])
    assert (found.ranks, found.is_missing) == ((1,), True)
    assert found.finding == (
        "rank 1 is missing in all_reduce 3 of a group (a) (never called, the last call is "
        "all_reduce 2 at step (tour/train.py:24)): ranks 0, 2 wait at step (tour/train.py:24)"
    )


def test_a_gpu_that_does_not_finish_what_the_others_finished_is_named() -> None:
    ahead = [Record(a=[0, 1, 2]).done("a", 1, 2).call("a", 3) for _ in range(2)]
    behind = Record(a=[0, 1, 2]).done("a", 1).call("a", 2).call("a", 3)
    found = blame(*ahead, behind)
    assert found.ranks == (2,)
    assert "all_reduce 2 is unfinished there and finished elsewhere" in found.finding


def test_a_gpu_that_has_not_started_what_the_others_run_is_named() -> None:
    running = [
        Record(a=[0, 1, 2]).call("a", 1, state="started", time_discovered_started_ns=1)
        for _ in range(2)
    ]
    late = Record(a=[0, 1, 2]).call("a", 0, state="completed", time_discovered_started_ns=1)
    found = blame(running[0], late.call("a", 1), running[1])
    assert found.ranks == (1,)
    assert "called at step (tour/train.py:24), not started by its GPU" in found.finding
    # A record of active calls alone does not show that GPUs record when they start.
    assert blame(running[0], active(late), running[1]).ranks == (1,)


def test_the_cause_is_found_through_other_groups_and_transfers() -> None:
    # Rank 3 is missing in group b. Rank 1 waits for a send of rank 2, which waits for rank 3.
    records = [Record(a=[0, 1], b=[2, 3], p=[0, 1, 2, 3]) for _ in range(4)]
    records[0].call("a", 7)
    records[1].done("a", 6).transfer("p", "recv 1<-2")
    records[2].call("b", 9)
    records[3].done("b", 8)
    found = blame(*records)
    assert found.ranks == (3,)
    assert "missing in all_reduce 9 of b group" in found.finding


def test_a_transfer_whose_peer_has_not_called_it_names_the_peer() -> None:
    waiting = Record(p=[4, 5]).transfer("p", "recv 0<-1")
    found = find_missing([summarise(4, waiting.value), summarise(5, Record(p=[4, 5]).value)])
    assert found is not None
    assert found.ranks == (5,)
    assert "no send for rank 4 is open" in found.finding
    peer = summarise(5, Record(p=[4, 5]).transfer("p", "send 1->0").value)
    both = find_missing([summarise(4, waiting.value), peer])
    assert both is not None
    assert (both.ranks, both.is_missing) == ((), False)
    assert both.finding.startswith("ranks 4, 5 have called recv 0<-1 1 of group p at step")


def test_ranks_whose_gpus_are_at_an_earlier_call_are_not_missing() -> None:
    """Rank 3 has no record. Ranks 0 and 1 have called the send and the receive that rank 1's GPU
    has not reached, because rank 1 waits for rank 3."""
    records = [Record(w=[0, 1, 2, 3], p=[0, 1], t=[1, 3]) for _ in range(3)]
    records[0].transfer("p", "recv 0<-1")
    records[1].call("t", 1).transfer("p", "send 1->0")
    records[2].call("w", 1)
    found = blame(*records, world_size=4)
    assert (found.ranks, found.is_missing) == ((3,), True)


def test_a_rank_waits_only_in_its_first_unfinished_call() -> None:
    """Rank 1's GPU does not finish the collective with rank 0, and both have called it. Nobody
    waits for a later call of theirs, so neither the ranks behind it nor a circle are named."""
    records = [Record(t=[0, 1], w=[0, 1, 2], p=[0, 2]) for _ in range(3)]
    records[0].call("t", 7).call("w", 1).transfer("p", "send 0->1")
    records[1].call("t", 7).call("w", 1)
    records[2].transfer("p", "recv 1<-0")
    found = blame(*records)
    assert (found.ranks, found.is_missing) == ((), False)
    assert found.finding.startswith("ranks 0, 1 have called all_reduce 7 of t group")
    assert "a link or a GPU" in found.finding


def test_the_same_calls_in_another_order_are_a_circle() -> None:
    first = Record(a=[0, 1], b=[0, 1]).call("a", 1).call("b", 1)
    second = Record(a=[0, 1], b=[0, 1]).call("b", 1).call("a", 1)
    found = blame(first, second)
    assert found.ranks == (0, 1)
    assert found.finding.startswith("ranks 0, 1 wait for each other")


def test_a_gpu_that_has_not_started_its_part_of_a_batch_is_named() -> None:
    runs = Record(p=[0, 1]).batch("p", "started", "send 0->1", "recv 0<-1")
    late = Record(p=[0, 1]).call("p", 0, state="completed", time_discovered_started_ns=1)
    found = blame(runs, late.batch("p", "scheduled", "send 1->0", "recv 1<-0"))
    assert (found.ranks, found.is_missing) == ((1,), True)
    assert "not started by its GPU" in found.finding


def test_ranks_of_a_group_keep_its_order() -> None:
    """`new_group(..., sort_ranks=False)` numbers its ranks in the order that it is given."""
    records = [Record(w=[0, 1, 2], p=[2, 0, 1]) for _ in range(3)]
    records[0].call("w", 1)
    records[1].call("w", 1)
    records[2].transfer("p", "recv 0<-1")
    absent = blame(*records)
    assert absent.ranks == (0, 2)
    assert "wait for each other" in absent.finding


def test_a_call_that_timed_out_has_not_finished() -> None:
    """NCCL retires such a call. gloo retires what has finished, and nothing else says so."""
    records = [Record(a=[0, 1]).call("a", 1, retired=True), Record(a=[0, 1])]
    assert blame(*records).ranks == (1,)
    for record in records:
        for entry in record.entries:
            entry["profiling_name"] = "gloo:all_reduce"
    assert find_missing([summarise(rank, one.value) for rank, one in enumerate(records)]) is None


def test_records_in_json_are_read(tmp_path: Path) -> None:
    """PyTorch leaves the list of calls out of the JSON of a rank that has called nothing."""
    records = [Record(a=[0, 1, 2]).call("a", 1) for _ in range(2)]
    values = [one.value for one in (*records, Record(a=[0, 1, 2]))]
    del values[2]["entries"]
    for rank, value in enumerate(values):
        for entry in value.get("entries", []):
            del entry["frames"]
            entry["time_discovered_started_ns"] = entry["time_discovered_completed_ns"] = 0
        (tmp_path / f"nccl-rank-{rank}").write_text(json.dumps(value))
    read = read_records(tmp_path)
    assert [(one.problem, one.is_timed) for one in read] == [("", False)] * 3
    found = find_missing(read)
    assert found is not None
    assert found.ranks == (2,)
    assert "its record has no call" in found.finding
    (tmp_path / "nccl-rank-1").write_text("{" + "[" * 100_000)
    (tmp_path / "nccl-rank-2").write_bytes(b"{" + bytes(9 << 20))
    assert [bool(one.problem) for one in read_records(tmp_path)] == [False, True, True]


def test_different_collectives_of_one_number_are_named() -> None:
    others = [Record(a=[0, 1, 2]).call("a", 5) for _ in range(2)]
    other_name = blame(*others, Record(a=[0, 1, 2]).call("a", 5, "_all_gather_base"))
    assert (other_name.ranks, other_name.is_missing) == ((2,), False)
    assert "rank 2 calls _all_gather_base 5 of 4096x5120 BFloat16 at step" in other_name.finding
    other_size = blame(*others, Record(a=[0, 1, 2]).call("a", 5, input_sizes=[[4096, 5121]]))
    assert other_size.ranks == (2,)
    other_type = blame(*others, Record(a=[0, 1, 2]).call("a", 5, input_dtypes=["Float"]))
    assert other_type.ranks == (2,)
    undecided = blame(others[0], Record(a=[0, 1, 2]).call("a", 5, "barrier"))
    assert undecided.ranks == (0, 1)


def test_an_exchange_of_other_sizes_is_no_mismatch() -> None:
    records = [Record(a=[0, 1]).call("a", 5, "all_to_all", input_sizes=[[size]]) for size in (3, 4)]
    found = blame(*records)
    assert found.ranks == ()
    assert "ranks 0, 1 have called all_to_all 5 of a group (a)" in found.finding
    assert "none finishes it" in found.finding


def test_a_rank_without_a_record_is_named_if_nobody_else_is_missing() -> None:
    waiting = [Record(a=[0, 1, 2]).call("a", 1) for _ in range(2)]
    found = blame(*waiting, world_size=3)
    assert found.ranks == (2,)
    assert found.finding.endswith("; no flight record of rank 2")
    absent = Record(a=[0, 1, 2, 3]).done("a", 0)
    others = [Record(a=[0, 1, 2, 3]).call("a", 1) for _ in range(2)]
    assert blame(*others, absent, world_size=4).ranks == (2,)


def test_two_groups_in_opposite_orders_are_a_circle() -> None:
    first = Record(a=[0, 1], b=[0, 1]).done("b", 1).call("a", 1)
    second = Record(a=[0, 1], b=[0, 1]).done("a", 0).call("b", 2)
    found = blame(first, second)
    assert found.ranks == (0, 1)
    assert found.finding.startswith("ranks 0, 1 wait for each other: rank 0 in all_reduce 1 of a")


def test_records_without_an_open_collective_blame_nobody() -> None:
    # The parts of a coalesced call stay scheduled for ever.
    part = Record(a=[0]).call("a", 1).call("a", 1, "coalesced", state="completed")
    assert find_missing([summarise(0, part.value)], 1) is None
    assert find_missing([], 2) is None


def test_a_thousand_ranks_are_merged_within_two_seconds() -> None:
    """Groups of all ranks, of 8 and of 128 with 1,024 ranks, of which one is missing."""
    count, missing = 1024, 700
    records = []
    for rank in range(count):
        groups = {
            "world": list(range(count)),
            f"tensor {rank // 8}": list(range(rank // 8 * 8, rank // 8 * 8 + 8)),
            f"data {rank % 8}": list(range(rank % 8, count, 8)),
        }
        record = Record(**groups)
        for name in groups:
            record.done(name, 41)
            if rank != missing:
                record.call(name, 42)
        records.append(summarise(rank, record.value))
    began = time.process_time()
    found = find_missing(records, count)
    took_s = time.process_time() - began
    assert found is not None
    assert found.ranks == (missing,)
    assert took_s < 2.0


def test_spans_are_short_and_exact() -> None:
    for numbers in ([], [3], [0, 1], list(range(1024)), list(range(5, 1024, 8)), [1, 2, 3, 9, 11]):
        assert list(read_spans(span_text(numbers))) == numbers
    assert span_text(range(0, 1024, 8)) == "0-1016:8"
    for text in ("1-2-3", "x", "0-999999,0-999999"):
        with pytest.raises(ValueError, match="rank"):
            read_spans(text)


def write(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=2))
    return path


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value, value]
    return value


def test_hostile_records_are_refused_with_a_reason(tmp_path: Path) -> None:
    good = Record(a=[0, 1]).call("a", 1)
    assert read_record(0, write(tmp_path / "good", good.value)).problem == ""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "good")
    os.mkfifo(tmp_path / "pipe")
    deep = Record(a=[0, 1]).call("a", 1, input_sizes=nested(64), state=nested(64)).value
    cases = {
        "code": write(tmp_path / "code", {"entries": [Evil(tmp_path / "evil")]}),
        "link": link,
        "pipe": tmp_path / "pipe",
        "exponential": write(tmp_path / "exponential", deep),
        "cut": tmp_path / "cut",
        "empty": write(tmp_path / "empty", {}),
        "list": write(tmp_path / "list", []),
        "entry": write(tmp_path / "entry", {"entries": [7]}),
        "absent": tmp_path / "absent",
    }
    cases["cut"].write_bytes((tmp_path / "good").read_bytes()[:-9])
    for name, path in cases.items():
        assert read_record(3, path).problem, name
    assert not (tmp_path / "evil").exists()


def test_records_of_two_gigabytes_are_refused_unread(tmp_path: Path) -> None:
    for name in ("nccl-rank-00000", FILE):
        with open(tmp_path / name, "wb") as stream:
            stream.write(b"\x80\x02}(")
            stream.truncate(2 << 30)
    began = time.process_time()
    tracemalloc.start()
    try:
        (found,) = read_records(tmp_path)
        assert read_summaries(tmp_path) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert f"expected {RECORD_BYTES_MAX} or less" in found.problem
    assert time.process_time() - began < 0.5


def test_the_summaries_of_all_nodes_are_merged(tmp_path: Path) -> None:
    folders = [tmp_path / "node-0000-01", tmp_path / "node-0001-01"]
    for node, folder in enumerate(folders):
        folder.mkdir()
        for rank in (2 * node, 2 * node + 1):
            record = Record(a=[0, 1, 2, 3]).done("a", 1)
            if rank != 3:
                record.call("a", 2)
            write(folder / f"nccl-rank-{rank:05d}", record.value)
    assert read_summaries(folders[0]) is None
    assert main([str(folders[0])]) == 0
    merged = MergedRecords(folders, 4)
    assert main([str(folders[1])]) == 0
    give_up = time.monotonic() + 30
    while merged.blame is None and time.monotonic() < give_up:
        time.sleep(0.1)
    assert merged.blame is not None
    assert merged.blame.ranks == (3,)
    (folders[0] / FILE).write_text('{"ranks": [{"rank": "x"}]}')
    assert read_summaries(folders[0]) is None


def test_records_that_nobody_can_read_do_not_say_that_nothing_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> dict[str, Any]:
        assert merge([str(tmp_path)]) == 1
        return dict(json.loads(capsys.readouterr().out))

    assert shown()["finding"].startswith("there is no flight record with this prefix")
    # PyTorch 2.3 does not say which calls are transfers.
    old = Record(a=[0, 1]).call("a", 1, state="started").value
    del old["entries"][0]["is_p2p"]
    write(tmp_path / "nccl-rank-0", old)
    found = shown()
    assert found["finding"] == "no flight record could be read"
    assert found["unread"] == {"0": "it has no 'is_p2p'; expected a record of PyTorch 2.5 or newer"}
    write(tmp_path / "nccl-rank-1", Record(a=[0, 1]).done("a", 1).value)
    assert shown()["finding"] == "the records show no open collective"


def active(record: Record) -> Record:
    """What `TORCH_INCLUDE_ONLY_ACTIVE` leaves of a record."""
    record.entries = [one for one in record.entries if one["state"] != "completed"]
    return record


def test_parts_of_finished_calls_are_not_open_in_a_record_of_active_calls() -> None:
    """A finished batch has lost its end, and its parts remain scheduled for ever."""
    ranks = [0, 1, 2]
    first = Record(p=ranks, w=ranks)
    first.batch("p", "completed", "send 0->1", "recv 0<-1").done("w", 1)
    first.batch("p", "completed", "send 0->1").call("w", 2)
    second = Record(p=ranks, w=ranks)
    second.batch("p", "completed", "recv 1<-0", "send 1->0").done("w", 1)
    second.batch("p", "completed", "recv 1<-0")
    third = Record(p=ranks, w=ranks).call("w", 1).call("w", 1)
    third.call("w", 1, "coalesced", state="completed").call("w", 2)
    found = blame(*map(active, (first, second, third)))
    assert (found.ranks, found.is_missing) == ((1,), True)
    assert "missing in all_reduce 2 of w group" in found.finding


def test_a_transfer_without_a_batch_is_open_in_a_record_of_active_calls() -> None:
    waits = Record(p=[0, 1], w=[0, 1]).call("w", 1).done("w", 2).transfer("p", "recv 0<-1")
    (found,) = summarise(0, active(waits).value).transfers
    assert found.call.name == "recv 0<-1"
