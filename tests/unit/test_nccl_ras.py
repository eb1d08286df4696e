"""NCCL's RAS is asked in a hang, and its answer is evidence. Only RAS itself is played.

The answers have the form that NCCL 2.24, 2.27 and 2.29 print.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import played_ras
from tests.support.ras_answers import PlayedRank, in_json, in_text
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.records.documents import Request, read_document
from holdfast.workers.agent.watch import nccl_ras
from holdfast.workers.agent.watch.hangs import HangWatch
from holdfast.workers.agent.watch.nccl_ras import (
    ADDRESS,
    ANSWER_BYTES_MAX,
    CUT_FILE,
    FILE,
    describe,
    read_answer,
    start_asking,
)
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.agent.watch.stacks import StackTaker, StackTarget
from holdfast.workers.nodes.calibration import PhaseTimes

WORLD = 0x27A079B828FF1A75
PAIR = 0x9E17
WAIT_S = 30.0
Format = Callable[..., bytes]
OLDEST: Format = partial(in_text, version="2.24.3")
FORMATS = pytest.mark.parametrize("form", [in_json, in_text, OLDEST], ids=["2.29", "2.27", "2.24"])


def world(size: int = 8, **more: dict[int, Any]) -> list[PlayedRank]:
    """Two ranks per host. `more` has the values of some ranks, by field."""
    return [
        PlayedRank(
            rank=rank,
            pid=1000 + rank,
            host=f"10.0.0.{1 + rank // 2}",
            calls=more.get("calls", {}).get(rank, {"AllReduce": 42, "AllGather": 7}),
            is_dead=rank in more.get("dead", ()),
            is_silent=rank in more.get("silent", ()),
        )
        for rank in range(size)
    ]


def pids(size: int = 8) -> dict[int, int]:
    return {rank: 1000 + rank for rank in range(size)}


# --- what an answer says --------------------------------------------------------------------


@FORMATS
def test_the_rank_behind_the_dead_process_and_the_silent_host_are_named(form: Format) -> None:
    ranks = world(calls={3: {"AllReduce": 41, "AllGather": 7}}, dead={5: True}, silent={6: 1, 7: 1})
    found = describe(read_answer(form({WORLD: ranks})), pids(), 8)
    operation = "the collectives" if form is OLDEST else "AllReduce"
    calls = (48, 49) if form is OLDEST else (41, 42)
    assert found == (
        "rank 5 on 10.0.0.3 counts as dead, ranks 6, 7 on 10.0.0.4 do not answer, "
        f"rank 3 is behind in {operation} of communicator 27a079b828ff1a75 "
        f"({calls[0]} calls, {calls[1]} by 4 others)"
    )


@FORMATS
def test_a_rank_that_waits_in_another_communicator_is_no_cause(form: Format) -> None:
    # Rank 1 waits for rank 0 in the pair, so rank 2 waits for it in the world.
    everyone = world(4, calls={rank: {"AllReduce": 9 if rank > 1 else 8} for rank in range(4)})
    pair = [
        PlayedRank(0, 1000, "10.0.0.1", {"AllGather": 3}),
        PlayedRank(1, 1001, "10.0.0.1", {"AllGather": 4}),
    ]
    found = describe(read_answer(form({WORLD: everyone, PAIR: pair})), pids(4), 4)
    # The text does not name two ranks in four.
    in_world = "rank 0 is behind in AllReduce of communicator 27a079b828ff1a75 (8 calls, 9 by 2 "
    assert found.startswith(in_world) is (form is in_json)
    operation = "the collectives" if form is OLDEST else "AllGather"
    assert f"rank 0 is behind in {operation} of communicator 9e17 (3 calls, 4 by 1 o" in found
    assert "rank 1" not in found


@FORMATS
def test_ranks_are_named_by_their_process_and_not_by_their_place(form: Format) -> None:
    pair = [
        PlayedRank(0, 1006, "10.0.0.4", {"AllReduce": 4}),
        PlayedRank(1, 1002, "10.0.0.2", {"AllReduce": 3}),
    ]
    answer = read_answer(form({PAIR: pair}))
    assert describe(answer, pids(), 8).startswith("rank 2 is behind in ")
    assert describe(answer, {}, 8).startswith("process 1002 is behind in ")
    # Two nodes with pid namespaces have equal pids. All ranks are in this communicator.
    assert describe(answer, dict.fromkeys(range(2), 1002), 2).startswith("rank 1 is behind in ")


@pytest.mark.parametrize("form", [in_json, in_text], ids=["2.29", "2.27"])
def test_different_collectives_are_both_named(form: Format) -> None:
    ranks = world(4, calls={1: {"AllReduce": 41, "AllGather": 8}})
    found = describe(read_answer(form({WORLD: ranks})), pids(4), 4)
    assert "rank 1 is behind in AllReduce of communicator 27a079b828ff1a75" in found
    assert (form is in_json) is ("ranks 0, 2, 3 are behind in AllGather" in found)


@FORMATS
def test_most_ranks_behind_one(form: Format) -> None:
    ranks = world(4, calls={0: {"AllReduce": 43, "AllGather": 7}})
    found = describe(read_answer(form({WORLD: ranks})), pids(4), 4)
    named = ("ranks 1, 2, 3", "1 other") if form is in_json else ("3 ranks", "rank 0")
    assert found.startswith(f"{named[0]} are behind in ")
    assert found.endswith(f"by {named[1]})")


@FORMATS
def test_equal_ranks_are_said_to_be_equal(form: Format) -> None:
    found = describe(read_answer(form({WORLD: world()})), pids(), 8)
    assert found == "every process answers, and all ranks have launched the same collectives"
    assert describe(read_answer(form({})), pids(), 8) == ""


DEEP = b'{"communicators": ' + b"[" * 100_000
WRONG = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 40,
    "another program": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no communicators": b"{}",
    "a list": b'{"communicators": {"ranks": 1}}',
    "deep": DEEP,
    "a number of digits": b'{"communicators": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"communicators": "\xff"}',
    "cut text": in_text({WORLD: world()})[:-200],
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_answer(content)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pid": 1003', '"pid": "1003"'),
        ('"pid": 1003', '"pid": true'),
        ('"pid": 1003', '"pid": -2'),
        ('"rank": 3', '"rank": 1e3'),
        ('"host": "10.0.0.2"', '"host": "\\u001b[2J"'),
        ('"host": "10.0.0.2"', '"host": null'),
        ('"AllReduce": 41', '"AllReduce": 18446744073709551616'),
        ('"AllReduce": 41', '"All\\nReduce": 41'),
        ('"hash": "0x27a079b828ff1a75"', '"hash": "<b>"'),
        ('"size": 8', '"size": null'),
    ],
)
def test_a_wrong_value_in_the_answer_is_refused(old: str, new: str) -> None:
    content = in_json({WORLD: world(calls={3: {"AllReduce": 41}})}).decode()
    assert old in content
    with pytest.raises(ValueError, match=r"."):
        read_answer(content.replace(old, new).encode())


@FORMATS
def test_damaged_answers_are_read_or_refused(form: Format) -> None:
    ranks = world(calls={3: {"AllReduce": 41}}, dead={5: True}, silent={6: 1})
    content = form({WORLD: ranks, PAIR: world(2)})
    draw = random.Random(7)
    read = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        try:
            found = describe(read_answer(bytes(damaged)), pids(), 8)
        except ValueError:
            continue
        read += 1
        assert found.isprintable()
        assert len(found) < 2000
    assert read or form is in_json


@pytest.mark.parametrize(
    "line",
    [
        "  Rank 1 -- GPU 0 managed by process 5 on node ::1\n",
        "  Process 7 on node h managing GPU 1\n",
    ],
)
def test_the_largest_text_is_read_in_bounded_time(line: str) -> None:
    text = in_text({WORLD: world(calls={3: {"AllReduce": 1}, 4: {"AllReduce": 1}})}).decode()
    mark = "  Rank 3 -- " if "Rank" in line else "Errors\n======\n\n"
    assert mark in text
    extra = line * ((ANSWER_BYTES_MAX - len(text)) // len(line))
    extra = f"DEAD\n{extra}\n" if "Process" in line else extra
    at = text.index(mark) + (0 if "Rank" in line else len(mark))
    began = time.process_time()
    found = describe(read_answer((text[:at] + extra + text[at:]).encode()), pids(), 8)
    assert time.process_time() - began < 10.0
    assert len(found) < 2000


# --- the client -----------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """A free port, which this process holds without listening at it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


Play = Callable[..., int]


@pytest.fixture
def play(port: int, tmp_path: Path) -> Iterator[Play]:
    """Starts processes that play a rank with RAS, and returns their pids."""
    started: list[subprocess.Popen[bytes]] = []

    def start(content: bytes = b"", way: str = "answer") -> int:
        path = tmp_path / f"answer{len(started)}"
        path.write_bytes(content)
        process = subprocess.Popen(
            [sys.executable, played_ras.__file__, str(port), str(path), way],
            env={**os.environ, ADDRESS: f"127.0.0.1:{port}"},
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(look: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < give_up, what
        time.sleep(0.02)
    return found


def folder_of(tmp_path: Path, node: int = 0) -> Path:
    folder = tmp_path / "dumps" / f"node-{node:04d}-01"
    folder.mkdir(parents=True)
    return folder


def stored(folder: Path, name: str = FILE) -> bytes:
    path = folder / name
    wait_for(path.exists, f"{name} is stored")
    assert [one.name for one in folder.iterdir()] == [name]
    return path.read_bytes()


@FORMATS
def test_the_answer_is_stored_as_it_came(tmp_path: Path, play: Play, form: Format) -> None:
    content = form({WORLD: world()})
    folder = folder_of(tmp_path)
    assert start_asking([play(content)], folder, 1)
    assert stored(folder) == content
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600


@FORMATS
def test_after_timeouts_it_is_asked_again(
    tmp_path: Path, play: Play, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "AGAIN_AFTER_S", 0.2)
    # RAS reaches rank 4 only through rank 5, until it finds another way.
    first = form({WORLD: world(silent={4: 1, 5: 1})}, is_late=True)
    later = form({WORLD: world(silent={5: 1})})
    rank = play(first, "better")
    (tmp_path / "answer0.better").write_bytes(later)
    folder = folder_of(tmp_path)
    assert start_asking([rank], folder, 1)
    assert stored(folder) == later
    assert describe(read_answer(first), pids(), 8) == "ranks 4, 5 on 10.0.0.3 do not answer"


def test_without_a_second_answer_the_first_one_stays(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "AGAIN_AFTER_S", 0.2)
    first = in_json({WORLD: world(silent={5: 1})}, is_late=True)
    rank = play(first, "better")
    (tmp_path / "answer0.better").write_bytes(b"")
    assert start_asking([rank], folder := folder_of(tmp_path), 1)
    assert stored(folder) == first


def test_one_node_asks_and_the_next_one_if_there_is_no_answer(tmp_path: Path, play: Play) -> None:
    ranks = [play(in_text({WORLD: world()}))]
    first, second = folder_of(tmp_path), folder_of(tmp_path, 1)
    assert not start_asking(ranks, second, 1)
    assert start_asking(ranks, second, 2)
    stored(second)
    assert not start_asking(ranks, first, 1)
    assert not start_asking(ranks, folder_of(tmp_path, 9), 10)


def test_only_ranks_that_listen_are_asked(tmp_path: Path, play: Play) -> None:
    play(in_text({WORLD: world()}))
    assert not start_asking([os.getpid(), 1 << 22], folder_of(tmp_path), 1)


def test_an_address_that_is_no_host_gives_no_answer() -> None:
    assert nccl_ras._ask(("x" * 300, 28028), [os.getpid()]) == (b"", False)


def test_the_ranks_of_another_job_at_the_same_address_are_not_asked(
    tmp_path: Path, play: Play
) -> None:
    own, other = in_text({WORLD: world()}), in_text({PAIR: world(2)})
    play(other)
    rank = play(own)
    answers = []
    for number in range(12):
        folder = folder_of(tmp_path / str(number))
        nccl_ras._store(nccl_ras._find_address([rank]) or ("", 0), [rank], folder)
        answers += [path.read_bytes() for path in folder.iterdir()]
    assert set(answers) == {own}


@pytest.mark.parametrize("way", ["silent", "foreign", "stopped", "dies"])
def test_without_an_answer_nothing_is_stored(
    tmp_path: Path, play: Play, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "HELLO_S_MAX", 0.2)
    monkeypatch.setattr(nccl_ras, "ANSWER_S_MAX", 1.0)
    rank = play(b"", "answer" if way in {"stopped", "dies"} else way)
    address = nccl_ras._find_address([rank])
    assert address is not None
    if way in {"stopped", "dies"}:
        os.kill(rank, signal.SIGSTOP if way == "stopped" else signal.SIGKILL)
    began = time.monotonic()
    nccl_ras._store(address, [rank], folder := folder_of(tmp_path))
    assert time.monotonic() - began < 3.0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("way", "bytes_min", "bytes_max"),
    [("endless", ANSWER_BYTES_MAX, ANSWER_BYTES_MAX), ("slow", 5, 30)],
)
def test_an_endless_answer_is_cut(
    tmp_path: Path,
    play: Play,
    way: str,
    bytes_min: int,
    bytes_max: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "slow":
        monkeypatch.setattr(nccl_ras, "ANSWER_S_MAX", 2.0)
    folder = folder_of(tmp_path)
    began = time.monotonic()
    assert start_asking([play(in_text({WORLD: world()}) * 10, way)], folder, 1)
    # The agent's own thread does not wait for it.
    assert time.monotonic() - began < 2.0 or way == "endless"
    assert bytes_min <= len(stored(folder, CUT_FILE)) <= bytes_max


# --- in a hang ------------------------------------------------------------------------------


class AskingNode:
    """A node with the given processes as ranks, which are silent. Its samples are real."""

    name = "n0"

    def __init__(self, ranks: Sequence[int], folder: Callable[[int, int], Path]) -> None:
        self.ranks, self._folder, self.taker = ranks, folder, StackTaker()

    def take_stacks(self, dump: int, number: int) -> None:
        targets = [StackTarget(rank=rank, pid=pid) for rank, pid in enumerate(self.ranks)]
        self.taker.take(targets, self._folder(0, dump), dump, number)

    def report(self) -> Any:
        times = PhaseTimes(count=500, p50_s=0.8, p99_s=1.0)
        ranks = tuple(
            RankStatus(rank=rank, pid=pid, step=7, phase="train", silent_s=20.0, times=times)
            for rank, pid in enumerate(self.ranks)
        )
        return SimpleNamespace(ranks=ranks, sample=self.taker.sample)


def suspect(tmp_path: Path, ranks: Sequence[int], until: Callable[[list[Any]], Any]) -> HangWatch:
    """Watch silent ranks until `until`, of the journal's suspicions, is true."""
    attempt = RunFolder(tmp_path / "root", "tried", "u" * 32).submit(1, len(ranks), 0.0)
    request = read_document(Request, attempt.request)
    assert request is not None
    node = AskingNode(ranks, attempt.dump)
    watch = HangWatch(request, attempt, JournalWriter(attempt.node_journal(0)))
    watch.begin(1)
    # A silence counts only while this process could see it.
    watch._awake_since -= 60.0

    def look() -> Any:
        assert not watch.look([node], {node.name: node.report()})
        events = read_journal(attempt.node_journal(0))[0]
        return until([one for one in events if one.kind is EventKind.HANG_SUSPECTED])

    try:
        wait_for(look, "the suspicion")
    finally:
        node.taker.close()
    return watch


@FORMATS
def test_the_finding_of_a_hang_has_what_ras_says(tmp_path: Path, play: Play, form: Format) -> None:
    answer = tmp_path / "answer0"
    ranks = [play(), os.getpid()]
    there = [
        PlayedRank(0, ranks[0], "10.0.0.1", {"AllReduce": 42}),
        PlayedRank(1, ranks[1], "10.0.0.1", {"AllReduce": 41}),
    ]
    answer.write_bytes(form({WORLD: there}))
    found: list[Any] = []

    def until(events: list[Any]) -> bool:
        found[:] = events
        return bool(events) and "NCCL RAS" in events[-1].data["finding"]

    watch = suspect(tmp_path, ranks, until)
    operation = "the collectives" if form is OLDEST else "AllReduce"
    assert (
        found[-1]
        .data["finding"]
        .endswith(
            f"; by NCCL RAS, rank 1 is behind in {operation} of communicator 27a079b828ff1a75 "
            "(41 calls, 42 by 1 other)"
        )
    )
    assert "blamed" not in found[-1].data
    # It is evidence, and neither ends ranks nor excludes their host.
    assert (watch.evidence, watch.missing) == ((), ())


def test_an_unreadable_answer_is_said_once(tmp_path: Path, play: Play) -> None:
    found: list[Any] = []

    def until(events: list[Any]) -> bool:
        found[:] = events
        return bool(events) and "NCCL RAS" in events[-1].data["finding"]

    suspect(tmp_path, [play(b"{" + bytes(range(128, 256)))], until)
    assert f"the answer of NCCL RAS in {FILE} cannot be read: " in found[-1].data["finding"]
    assert found[-1].data["finding"].count("NCCL RAS") == 1
    assert sum("NCCL RAS" in one.data["finding"] for one in found) == 1


def test_without_ras_the_finding_does_not_mention_it(tmp_path: Path) -> None:
    began = time.monotonic()
    program = "import time\nprint(flush=True)\ntime.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    found: list[Any] = []

    def until(events: list[Any]) -> bool:
        found[:] = events
        return bool(events) and time.monotonic() > began + 4.0

    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        suspect(tmp_path, [rank.pid], until)
    finally:
        rank.kill()
        rank.communicate()
    assert len(found) == 1
    assert "RAS" not in json.dumps(found[0].data)
