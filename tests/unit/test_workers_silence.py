"""When silent ranks are suspected and ended, and which rank is blamed."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.workers.agent.watch import silence
from holdfast.workers.agent.watch.hangs import TIMES_MIN, Slow, Stragglers, find_slow
from holdfast.workers.agent.watch.silence import LIMITS, RankStatus, Sample, SilenceLimits
from holdfast.workers.agent.watch.stack_text import (
    RankStack,
    find_blame,
    read_faulthandler,
    read_py_spy,
)
from holdfast.workers.nodes.calibration import (
    SLOW_FACTOR,
    SLOW_SHARE,
    Calibration,
    PhaseTimes,
    scaled,
)

SILENCE_LIMITS = SilenceLimits({})


def times(p99_s: float, count: int = 100, recurring_s: float = 0.0) -> PhaseTimes:
    return PhaseTimes(count=count, p50_s=p99_s / 2, p99_s=p99_s, recurring_s=recurring_s)


def look(rank: int = 0, silent_s: float = 0.0, phase: str = "train", **more: Any) -> RankStatus:
    facts: dict[str, Any] = {"pid": 100 + rank, "step": 7, "times": times(1.0), **more}
    return RankStatus(rank=rank, phase=phase, silent_s=silent_s, **facts)


@pytest.mark.parametrize(
    ("phase", "known", "suspect_s", "end_s"),
    [
        ("train", times(0.1), 2.2, 30.0),
        ("train", times(3.0), 8.0, 36.0),
        ("train", times(400.0, count=1), 2400.0, 4800.0),
        ("train", times(20.0), 42.0, 240.0),
        # Evaluations without a declared phase: rare, and longer than any step.
        ("train", times(0.1, recurring_s=5.0), 2.2, 60.0),
        ("train", times(0.1, recurring_s=90.0), 2.2, 300.0),
        ("train", times(0.1, count=4), 300.0, 600.0),
        ("train", None, 300.0, 600.0),
        ("eval", times(6.0, count=1), 14.0, 120.0),
        ("eval", times(60.0, count=1), 122.0, 720.0),
        ("eval", None, 900.0, 1800.0),
        ("compile", times(90.0, count=1), 182.0, 1080.0),
    ],
)
def test_silence_limits_follow_the_runs_history_above_a_minimum(
    phase: str, known: PhaseTimes | None, suspect_s: float, end_s: float
) -> None:
    assert SILENCE_LIMITS.suspect_s(phase, known) == pytest.approx(suspect_s)
    assert SILENCE_LIMITS.end_s(phase, known) == pytest.approx(end_s)


def test_a_limit_of_the_spec_replaces_the_default_but_not_the_history() -> None:
    limits = SilenceLimits({"train": 4.0})
    assert limits.end_s("train", None) == 4.0
    assert limits.end_s("train", times(0.1)) == 4.0
    assert limits.end_s("train", times(2.0)) == 24.0


@pytest.mark.parametrize("phase", sorted(LIMITS))
@pytest.mark.parametrize("usual_s", [0.5, 10.0, 400.0])
def test_a_phase_of_ten_times_its_usual_length_is_never_ended(phase: str, usual_s: float) -> None:
    assert SILENCE_LIMITS.end_s(phase, times(usual_s, count=1)) > 10 * usual_s


@pytest.mark.parametrize(
    ("statuses", "left_s"),
    [
        ([look(0, 31.0), look(1, 30.0)], 0.0),
        ([look(0, 31.0), look(1, 10.0)], 20.0),
        # One rank evaluates by itself while the others wait for it.
        ([look(0, 35.0), look(1, 35.0, "eval", times=times(6.0))], 85.0),
        ([look(0, 40.0), look(1, 12.0, is_alive=False, is_unreaped=True)], 0.0),
        ([look(0, 9.0), look(1, 9.0, is_alive=False, is_unreaped=True)], 21.0),
        # A rank that exited without an error is not dead: its peers may need more time.
        ([look(0, 12.0), look(1, 12.0, is_alive=False)], 18.0),
        ([look(0, 40.0), look(1, 40.0, "done", is_alive=False, times=None)], 3560.0),
    ],
)
def test_ranks_are_ended_when_all_are_silent_for_long_or_one_is_dead(
    statuses: list[RankStatus], left_s: float
) -> None:
    assert silence.left_to_wait_s(statuses, SILENCE_LIMITS, 1e6) == pytest.approx(left_s)


def test_a_sign_of_life_extends_the_wait() -> None:
    statuses = [look(0, 50.0), look(1, 50.0)]
    assert silence.left_to_wait_s(statuses, SILENCE_LIMITS, 5.0) == 10.0
    assert silence.left_to_wait_s(statuses, SILENCE_LIMITS, 15.0) == 0.0
    dead = [look(0, 50.0), look(1, 50.0, is_alive=False, is_unreaped=True)]
    assert silence.left_to_wait_s(dead, SILENCE_LIMITS, 4.0) == 6.0


def sample(at: float, *statuses: RankStatus, digest: str = "a", **stack: Any) -> Sample:
    stacks = {k.rank: RankStack(rank=k.rank, digest=digest, **stack) for k in statuses}
    return Sample(at=at, statuses=statuses, stacks=stacks)


def test_a_busy_rank_gets_more_time_except_in_training() -> None:
    before = [look(0, 10.0, "eval", cpu_s=5.0), look(1, 10.0, cpu_s=5.0)]
    after = [dataclasses.replace(one, cpu_s=14.0) for one in before]
    busy = silence.busy_ranks(sample(0.0, *before), sample(10.0, *after))
    assert busy == {0}
    ready = [look(0, 130.0, "eval", times=times(1.0)), look(1, 130.0)]
    assert silence.left_to_wait_s(ready, SILENCE_LIMITS, 1e6) == 0.0
    assert silence.left_to_wait_s(ready, SILENCE_LIMITS, 1e6, busy) == pytest.approx(230.0)


LONG_S = silence.FAINT_SIGNS_S


def one_function(digest: str, *, phase: str = "train", **stack: Any) -> Sample:
    """A sample of a rank that stays in its function `f`, 10 s after one with the digest `a`."""
    at = 0.0 if digest == "a" and not stack else 10.0
    return sample(at, look(phase=phase), digest=digest, **{"functions": "f", **stack})


@pytest.mark.parametrize(
    ("before", "after", "has_sign"),
    [
        (sample(0, look()), sample(10, look()), False),
        (sample(0, look()), sample(10, look(), digest="b"), True),
        (sample(0, look()), sample(10, look(step=8)), True),
        (sample(0, look()), sample(10, look(phase="eval")), True),
        (sample(0, look()), sample(10, look(pid=5)), True),
        (sample(0, look()), sample(10, look(io_bytes=2 << 20)), True),
        # CPU use of the rank is no sign: endless loops and waits for a GPU use the CPU too.
        (sample(0, look()), sample(10, look(cpu_s=9.0)), False),
        # A compiler in a child process, or a disk that does not answer: signs for a while.
        (sample(0, look()), sample(10, look(), helpers_cpu_s=6.0), True),
        (sample(0, look()), sample(10, look(), helpers_cpu_s=1.0), False),
        (sample(0, look()), sample(10, look(silent_s=LONG_S), helpers_cpu_s=6.0), False),
        (sample(0, look()), sample(10, look(), helpers_io_bytes=1 << 20), True),
        (sample(0, look()), sample(10, look(silent_s=LONG_S), helpers_io_bytes=1 << 20), False),
        (sample(0, look()), sample(10, look(), on_storage=True), True),
        (sample(0, look()), sample(10, look(silent_s=LONG_S), on_storage=True), False),
        # Only variables have changed: a sign with CPU time, and a weak one where it works alone.
        (one_function("a"), one_function("b"), False),
        (one_function("a"), one_function("b", computed_s=0.4), False),
        (one_function("a"), one_function("b", computed_s=0.6), True),
        (one_function("a"), one_function("a", computed_s=9.0), False),
        (one_function("a", phase="eval"), one_function("b", phase="eval"), True),
        (one_function("a"), one_function("a", functions="g"), True),
        # Stacks that py-spy and faulthandler read in turn say nothing about the rank.
        (
            sample(0, look(), digest="a", source="py-spy"),
            sample(10, look(silent_s=LONG_S), digest="b", source="faulthandler"),
            False,
        ),
        (sample(0, look(), digest=""), sample(10, look(silent_s=LONG_S)), False),
        # A rank whose stack cannot be read is not proven to hang; a rank that is gone is.
        (sample(0, look(), digest=""), sample(10, look(), digest=""), True),
        (sample(0, look(), digest=""), sample(10, look(silent_s=LONG_S), digest=""), False),
        (sample(0, look(), digest=""), sample(10, look(is_alive=False), digest=""), False),
    ],
)
def test_what_counts_as_a_sign_of_life(before: Sample, after: Sample, has_sign: bool) -> None:
    assert silence.signs_of_life(before, after) == ([0] if has_sign else [])


def test_a_program_without_a_session_is_never_suspected() -> None:
    mute = [look(rank, 9999.0, "start", pid=0, times=None) for rank in range(2)]
    assert silence.suspects(mute, SILENCE_LIMITS) == []
    half = [look(0, 9999.0, "rendezvous", times=None), mute[1]]
    assert {one.rank for one in silence.suspects(half, SILENCE_LIMITS)} == {0, 1}


def test_a_rank_status_round_trips_through_json() -> None:
    one = look(3, 1.5, cpu_s=2.0)
    assert RankStatus.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_calibration_uses_earlier_attempts_until_it_has_enough_steps() -> None:
    earlier = {"train": times(2.0), "eval": times(30.0)}
    calibration = Calibration(scaled(earlier, 2.0))
    assert calibration.times("train") == PhaseTimes(count=100, p50_s=2.0, p99_s=4.0)
    calibration.add("train", [0.1] * 10)
    known = calibration.times("train")
    assert known is not None
    assert (known.p50_s, known.p99_s) == (0.1, 4.0)
    calibration.add("train", [0.1] * 98 + [0.5, 0.7])
    known = calibration.times("train")
    assert known is not None
    assert (known.count, known.p99_s) == (110, 0.5)
    assert calibration.times("compile") is None
    assert known.recurring_s == 0.5
    assert set(calibration.summary()) == {"train", "eval"}


def test_a_pause_of_all_ranks_that_happened_once_is_not_recurring() -> None:
    calibration = Calibration(ranks=2)
    calibration.add("train", [0.1] * 6)
    calibration.add("train", [40.0, 41.0])
    assert calibration.summary()["train"].recurring_s == 0.1
    calibration.add("train", [40.5, 40.5])
    assert calibration.summary()["train"].recurring_s == 40.5


def test_a_slow_rank_is_reported_once_and_only_after_a_while() -> None:
    quick = [look(rank, step_s=1.0, own_s=0.4) for rank in range(3)]
    statuses = [*quick, look(3, step_s=1.0, own_s=0.9)]
    assert [slow.rank for slow in find_slow(statuses)] == [3]
    stragglers = Stragglers()
    named = [[slow.rank for slow in stragglers.look(statuses)] for _ in range(TIMES_MIN + 1)]
    assert named == [[], [], [3], []]
    interrupted = Stragglers()
    assert not any(interrupted.look(x) for x in (statuses, statuses, quick, statuses, statuses))


@pytest.mark.parametrize(
    "statuses",
    [
        [look(0, step_s=1.0, own_s=1.0), look(1, step_s=1.0, own_s=1.0)],
        [look(0, step_s=1.0, own_s=0.02), look(1, step_s=1.0, own_s=0.08)],
        [look(0, step_s=1.0, own_s=0.9), look(1, phase="eval", step_s=1.0, own_s=0.1)],
        [look(0, step_s=1.0, own_s=0.9)],
    ],
)
def test_equal_noisy_single_and_evaluating_ranks_are_not_slow(statuses: list[RankStatus]) -> None:
    assert find_slow(statuses) == []


def slow_ranks(statuses: Sequence[RankStatus]) -> list[Slow]:
    """The definition itself, in quadratic time."""
    timed = [one for one in statuses if one.phase == "train" and one.step_s > 0]
    found = []
    for one in timed if len(timed) > 1 else ():
        peers_s = statistics.median(other.own_s for other in timed if other is not one)
        excess = one.own_s - peers_s
        if excess >= SLOW_SHARE * one.step_s and one.own_s > SLOW_FACTOR * peers_s:
            found.append(Slow(rank=one.rank, own_s=one.own_s, peers_s=peers_s, step_s=one.step_s))
    return found


# Few values, so that ranks often have equal times.
SECONDS = st.sampled_from([0.0, 0.1, 0.1, 0.15, 0.3, 1.0]) | st.floats(0.0, 10.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["train", "train", "train", "eval"]), SECONDS, SECONDS),
        max_size=12,
    )
)
def test_find_slow_agrees_with_its_definition(
    given_looks: list[tuple[str, float, float]],
) -> None:
    statuses = [
        look(rank, phase=phase, step_s=step_s, own_s=own_s)
        for rank, (phase, step_s, own_s) in enumerate(given_looks)
    ]
    assert find_slow(statuses) == slow_ranks(statuses)


def test_slow_ranks_among_thousands_are_found_quickly() -> None:
    def seconds(ranks: int) -> float:
        statuses = [look(n, step_s=1.0, own_s=0.4 + n % 97 / 1000) for n in range(ranks)]
        began = time.process_time()
        assert find_slow([*statuses, look(ranks, step_s=1.0, own_s=0.95)])[0].rank == ranks
        return time.process_time() - began

    # 1,024 nodes of 8 ranks; a quadratic search took 9 s.
    assert seconds(8192) < 1.0


def stack(rank: int, place: str, top: str | None = None, *, waits: bool = False) -> RankStack:
    return RankStack(rank=rank, digest="d", top=(top or place,), place=place, waits=waits)


COLLECTIVE = "all_reduce (torch/distributed.py:1)"


@pytest.mark.parametrize(
    ("stacks", "steps", "words"),
    [
        (
            [stack(0, "train (t.py:3)", COLLECTIVE, waits=True), stack(1, "stuck (t.py:9)")],
            {0: 5, 1: 5},
            (
                "missing: rank 1 at stuck (t.py:9); "
                f"waiting: rank 0 at train (t.py:3), in {COLLECTIVE}"
            ),
        ),
        (
            [stack(r, "train (t.py:3)", COLLECTIVE, waits=True) for r in range(3)],
            {0: 5, 1: 4, 2: 5},
            (
                f"missing: rank 1 at train (t.py:3), in {COLLECTIVE}; "
                f"waiting: ranks 0, 2 at train (t.py:3), in {COLLECTIVE}"
            ),
        ),
        (
            [stack(0, "a (t.py:3)", waits=True), stack(1, "b (t.py:9)", waits=True)],
            {0: 5, 1: 5},
            (
                "the ranks are in different collectives; "
                "waiting: rank 0 at a (t.py:3); waiting: rank 1 at b (t.py:9)"
            ),
        ),
        ([RankStack(rank=0, problem="refused")], {0: 5}, "stack capture failed on every rank"),
    ],
)
def test_the_missing_and_waiting_ranks_are_named(
    stacks: list[RankStack], steps: dict[int, int], words: str
) -> None:
    assert find_blame(stacks, steps) == words


def frame(name: str, file: str, line: int, **local: int) -> dict[str, Any]:
    values = [{"name": k, "addr": v, "arg": False, "repr": str(v)} for k, v in local.items()]
    return {"name": name, "filename": file, "line": line, "locals": values}


def spied(i: int, helper_line: int = 1, *, active: bool = False) -> bytes:
    main = [frame("wait", "/x/torch/distributed/c10d.py", 9), frame("train", "/p/t.py", 3, i=i)]
    helper = [frame("poll", "/x/threading.py", helper_line)]
    threads = [
        {"os_thread_id": 78, "thread_name": "helper", "active": active, "frames": helper},
        {"os_thread_id": 77, "thread_name": None, "active": False, "frames": main},
    ]
    return json.dumps(threads).encode()


def test_local_variables_change_the_digest_and_are_never_written() -> None:
    first, text = read_py_spy(0, 77, spied(424242))
    assert first.waits
    assert first.place == "train (p/t.py:3)"
    assert "424242" not in text
    assert "(main, idle)" in text
    assert read_py_spy(0, 77, spied(424242))[0] == first
    changed = read_py_spy(0, 77, spied(5))[0]
    assert changed.digest != first.digest
    assert changed.functions == first.functions
    assert read_py_spy(0, 77, spied(424242, helper_line=2))[0].digest == first.digest
    assert read_py_spy(0, 77, spied(424242, helper_line=2, active=True))[0].digest != first.digest


def polling(*inside: tuple[str, str, int], step: int = 7) -> bytes:
    """py-spy's output of a rank whose program waits for its peers, at a place in that loop."""
    outside = (
        ("Loop.boundary", "/h/holdfast/trainer/session/loop.py", 99),
        ("train", "/p/t.py", 3),
    )
    frames = [
        {"name": name, "filename": file, "line": line, "locals": found}
        for (name, file, line), found in [
            *((one, [{"name": "poll", "addr": hash(one), "repr": None}]) for one in inside),
            (outside[0], []),
            (outside[1], [{"name": "step", "addr": 1, "repr": str(step)}]),
        ]
    ]
    thread = {"os_thread_id": 77, "thread_name": "Main", "active": False, "frames": frames}
    return json.dumps([thread]).encode()


def test_the_place_in_a_loop_that_polls_for_peers_is_no_sign_of_life() -> None:
    meeting = "/h/holdfast/trainer/ranks/meeting.py"
    largest = ("NodeMeeting.largest", meeting, 58)
    asleep, _ = read_py_spy(0, 77, polling(largest))
    looking, text = read_py_spy(0, 77, polling(("NodeMeeting._find_ended", meeting, 82), largest))
    reading, _ = read_py_spy(0, 77, polling(("said", "/h/rank_status.py", 5), largest))
    assert asleep.digest == looking.digest == reading.digest
    assert read_py_spy(0, 77, polling(largest, step=8))[0].digest != asleep.digest
    assert all(one.waits for one in (asleep, looking, reading))
    assert {one.place for one in (asleep, looking)} == {"Loop.boundary (session/loop.py:99)"}
    assert "NodeMeeting._find_ended" in text


@pytest.mark.parametrize("words", [b"", b"[]", b"{}", b"Error: no such process"])
def test_output_that_is_not_from_py_spy_is_refused(words: bytes) -> None:
    with pytest.raises((ValueError, LookupError)):
        read_py_spy(0, 77, words)


def test_faulthandler_output_is_parsed() -> None:
    words = (
        'Thread 0x00007f (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
        'Current thread 0x00007e (most recent call first):\n  File "/p/t.py", line 9 in stuck\n'
        '  File "/p/t.py", line 20 in main\n'
    )
    found, text = read_faulthandler(1, words)
    assert (found.place, found.waits, text) == ("stuck (p/t.py:9)", False, words)
    with pytest.raises(ValueError, match="no threads"):
        read_faulthandler(1, "")
