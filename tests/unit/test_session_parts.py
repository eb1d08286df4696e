"""Small parts of the session: cadence, command line, folder, settings, metrics, errors."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.environment import FLUSH_TIMEOUT, flush_timeout_s
from holdfast.contracts.errors import CheckpointError, HoldfastError, SpecError
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.trainer.config import config
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.loading.restore import Resumed, describe, recorded_skips
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.pacing.cadence import AUTO_INTERVAL_S, MUST_SAVE, Cadence, Interval
from holdfast.trainer.process.child_signals import STOP_SIGNALS
from holdfast.trainer.process.program import program_argv
from holdfast.trainer.process.signals import FailureRecord, SignalFlags
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.rank_context import choose_directory
from holdfast.trainer.ranks.rank_tree import RankTree
from holdfast.trainer.session.session import Session
from holdfast.trainer.state.not_restored import check_objects
from holdfast.trainer.state.run_state import Restored


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (50, Interval(steps=50)),
        ("50", Interval(steps=50)),
        ("300s", Interval(seconds=300)),
        ("10m", Interval(seconds=600)),
        ("auto", Interval(seconds=AUTO_INTERVAL_S, is_auto=True)),
    ],
)
def test_intervals_are_read(given: int | str, expected: Interval) -> None:
    assert Interval.parse(given) == expected


@pytest.mark.parametrize("given", [0, "soon", "0", "-5"])
def test_an_invalid_interval_is_refused(given: int | str) -> None:
    with pytest.raises(SpecError, match="expected"):
        Interval.parse(given)


def test_saves_are_due_at_multiples_after_any_resume() -> None:
    cadence = Cadence(Interval(steps=10), step=13, now=0.0)
    assert [step for step in range(14, 21) if cadence.is_due(step)] == [20]
    assert cadence.decide(20, 5.0) == (True, 30)
    cadence.update(20, 30, saved=True, now=5.0)
    assert not cadence.is_due(29)


def saves_of(interval: Interval, first: int, last: int) -> dict[int, int]:
    """The decision of each step after which something is saved; a step takes 1 s."""
    cadence = Cadence(interval, step=first, now=0.0)
    found: dict[int, int] = {}
    for step in range(first + 1, last + 1):
        if cadence.is_due(step):
            save, next_step = cadence.decide(step, float(step))
            assert next_step > step
            cadence.update(step, next_step, saved=bool(save), now=float(step))
            found |= {step: save} if save else {}
    return found


@pytest.mark.parametrize(
    ("interval", "first", "saves"),
    [
        (Interval(steps=50, doubling=1), 0, {1, 2, 4, 8, 16, 32, 50, 64, 100}),
        (Interval(steps=50, doubling=3), 6, {12, 24, 48, 50, 96, 100}),
        (Interval(seconds=40, doubling=20), 0, {20, 40, 80}),
        (Interval(seconds=1e6, is_auto=True, doubling=10), 15, {20, 40, 80}),
        (Interval(seconds=1e6, doubling=10**12), 0, set()),
    ],
)
def test_doublings_are_saved_beside_the_interval(
    interval: Interval, first: int, saves: set[int]
) -> None:
    found = saves_of(interval, first, 100)
    assert found.keys() == saves
    assert interval.doubling
    doublings = {interval.doubling << power for power in range(8)}
    assert {step for step, save in found.items() if save == MUST_SAVE} == doublings & saves


def test_a_meeting_that_comes_late_saves_the_doubling_that_it_missed() -> None:
    cadence = Cadence(Interval(steps=1000, doubling=4), step=0, now=0.0)
    assert cadence.next_step == 4
    assert cadence.decide(6, 1.0) == (MUST_SAVE, 8)


@pytest.mark.parametrize("slow_down", [1.0, 0.2, 7.0])
def test_an_interval_in_seconds_is_kept_when_the_step_time_changes(slow_down: float) -> None:
    cadence = Cadence(Interval(seconds=100), step=0, now=0.0)
    now, saves, meetings = 0.0, [], 0
    for step in range(1, 20_000):
        now += 0.1 if step < 2500 else 0.1 * slow_down
        if cadence.is_due(step):
            meetings += 1
            save, next_step = cadence.decide(step, now)
            cadence.update(step, next_step, saved=bool(save), now=now)
            saves += [now] if save else []
    gaps = [b - a for a, b in zip([0.0, *saves], saves, strict=False)]
    assert len(gaps) > 3
    assert all(90 <= gap <= 102 + 50 * slow_down for gap in gaps)
    # Only the gap in which the step time changed may differ much: half of it was planned before.
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(100, abs=4)
    assert meetings <= 12 * len(saves) + 12


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        (["python", "-u", "train.py", "a", "-m"], ["train.py", "a", "-m"]),
        (["python", "-m", "pkg.train", "x"], ["-m", "pkg.train", "x"]),
        (["python", "-um", "pkg.train"], ["-m", "pkg.train"]),
        (["python", "-X", "dev", "-Wignore", "-W", "error", "t.py"], ["t.py"]),
        (["python", "--check-hash-based-pycs", "always", "t.py"], ["t.py"]),
        (["python", "-c", "print()", "x"], ["-c", "print()", "x"]),
        (["python"], []),
    ],
)
def test_the_programs_own_command_line(original: list[str], expected: list[str]) -> None:
    assert program_argv(original) == expected


def test_the_folder_of_a_run_without_an_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_directory(None, {}, "train") == tmp_path / "runs" / "train"
    assert choose_directory(None, {"HOLDFAST_ROOT": "/data"}, "train") == Path("/data/train")
    assert choose_directory("here", {"HOLDFAST_ROOT": "/data"}, "train") == tmp_path / "here"


def test_settings_come_from_the_environment_before_the_spec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('name = "x"\n[config]\nsteps = 3\n')
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    assert config(spec) == {"steps": 3}
    monkeypatch.setenv("HOLDFAST_CONFIG", '{"steps": 4}')
    assert config(spec) == {"steps": 4}


@pytest.mark.parametrize("given", ["[1]", "{", "3"])
def test_settings_that_are_not_a_table_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HOLDFAST_CONFIG", given)
    with pytest.raises(SpecError, match="HOLDFAST_CONFIG"):
        config()


def test_settings_without_a_source_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    with pytest.raises(SpecError, match="expected"):
        config()
    with pytest.raises(SpecError, match="cannot be read"):
        config(tmp_path / "none.toml")


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf"])
def test_an_invalid_flush_timeout_is_refused(given: str) -> None:
    with pytest.raises(SpecError, match="expected a positive number of seconds"):
        flush_timeout_s({FLUSH_TIMEOUT: given})
    assert flush_timeout_s({FLUSH_TIMEOUT: "90.5"}) == 90.5
    assert flush_timeout_s({}) == 1800


def test_the_recorder_writes_lines_and_metrics(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal" / "rank0.jsonl", tmp_path / "metrics" / "m.jsonl")
    recorder.event(EventKind.NOTE, text=object())  # JSON cannot have it
    recorder.event(EventKind.NOTE, text="hello")
    recorder.log(7, {"loss": 1.5, "bad": float("nan")})
    recorder.close()
    events, _ = read_journal(tmp_path / "journal" / "rank0.jsonl")
    assert [event.data for event in events] == [{"text": "hello"}]
    line = json.loads((tmp_path / "metrics" / "m.jsonl").read_text())
    assert (line["step"], line["loss"], line["bad"]) == (7, 1.5, "nan")
    assert recorder.latest == {"loss": 1.5}


def test_an_error_on_rank_0_is_raised_unchanged() -> None:
    def fail() -> int:
        raise SpecError("no")

    ranks = ControlGroup()
    with pytest.raises(SpecError, match="no"):
        ranks.share(fail)
    with pytest.raises(HoldfastError, match="no"):
        ranks.gather(fail)
    assert ranks.gather(lambda: 3) == [3]
    assert ranks.largest([True, 5]) == [1, 5]


@pytest.mark.parametrize("given", [[["extra.a"], []], [["extra.a"], ["extra.a"]]])
def test_rank_0_may_have_more_objects_than_others(given: list[list[str]]) -> None:
    assert _checked_on_ranks(given) == ["", ""]


def test_an_object_that_rank_0_lacks_is_refused_on_all_ranks() -> None:
    """A checkpoint with one could not be loaded, or would not restore it."""
    for problem in _checked_on_ranks([["extra.a"], ["extra.a", "extra.b"]]):
        assert problem.startswith("rank 1 has extra.b, but rank 0 does not")


def _checked_on_ranks(given: list[list[str]]) -> list[str]:
    """Return for each rank, a thread with a separate connection, why its objects are refused."""
    store = HashStore()

    def check(rank: int) -> str:
        ranks = ControlGroup()
        ranks.rank, ranks.world_size = rank, len(given)
        ranks.group = RankTree.over_store(store, rank, len(given))
        try:
            check_objects(given[rank], {}, ranks)
        except CheckpointError as error:
            return str(error)
        finally:
            ranks.close()
        return ""

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(check, range(len(given))))


def test_a_signal_is_stored_in_the_rank_status() -> None:
    status_table, handle = RankStatusTable.create(1)
    before = signal.getsignal(signal.SIGTERM)
    flags = SignalFlags(status_table.record(0))
    signal.raise_signal(signal.SIGTERM)
    assert status_table.signals == signal.SIGTERM
    flags.close()
    assert signal.getsignal(signal.SIGTERM) is before
    status_table.close()
    os.close(handle)


@pytest.fixture
def table() -> Iterator[RankStatusTable]:
    """A status table. Afterwards the handlers of signals are as before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    status_table, handle = RankStatusTable.create(1)
    yield status_table
    for number, handler in before.items():
        signal.signal(number, handler)
    status_table.close()
    os.close(handle)


def test_a_handler_that_the_program_set_earlier_is_called_too(table: RankStatusTable) -> None:
    called: list[int] = []

    def own(number: int, _frame: Any) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, own)
    flags = SignalFlags(table.record(0))
    signal.raise_signal(signal.SIGTERM)
    assert (called, table.signals) == ([signal.SIGTERM], signal.SIGTERM)
    flags.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_handlers_that_the_program_sets_later_are_chained_and_reported(
    table: RankStatusTable,
) -> None:
    called: list[str] = []

    def earlier(_number: int, _frame: Any) -> None:
        called.append("earlier")

    def later(name: str) -> Any:
        former: Any = signal.getsignal(signal.SIGTERM)

        def own(number: int, frame: Any) -> None:
            called.append(name)
            former(number, frame)

        signal.signal(signal.SIGTERM, own)
        return own

    signal.signal(signal.SIGTERM, earlier)
    flags = SignalFlags(table.record(0))
    assert flags.look(0.0) == []
    later("second")
    assert flags.look(0.5) == [], "it looks about once a second"
    (said,) = flags.look(2.0)
    assert "set a handler for SIGTERM after it created the Session" in said
    third = later("third")
    assert len(flags.look(4.0)) == 1
    assert flags.look(6.0) == []
    signal.raise_signal(signal.SIGTERM)
    assert called == ["third", "second", "earlier"]
    assert table.signals == signal.SIGTERM
    flags.close()
    assert signal.getsignal(signal.SIGTERM) is third
    signal.raise_signal(signal.SIGTERM)
    assert called[-2:] == ["third", "earlier"]


def test_closing_leaves_a_handler_that_was_set_after_the_last_look(table: RankStatusTable) -> None:
    flags = SignalFlags(table.record(0))
    called = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    own = signal.getsignal(signal.SIGTERM)
    flags.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_signal_that_the_program_ignores_stays_ignored_and_is_reported(
    table: RankStatusTable,
) -> None:
    flags = SignalFlags(table.record(0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (said,) = flags.look(0.0)
    assert "the program ignores SIGTERM" in said
    assert "no longer stops the run" in said
    assert flags.look(5.0) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    flags.close()


def test_a_handler_that_raises_does_not_end_the_rank_before_the_last_checkpoint(
    table: RankStatusTable,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    flags = SignalFlags(table.record(0))
    signal.raise_signal(signal.SIGTERM)
    assert table.signals == signal.SIGTERM
    assert "raised SystemExit" in flags.look(0.0)[0]
    flags.close()


def test_a_session_outside_the_main_thread_says_that_it_hears_no_signals(
    table: RankStatusTable,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        flags = pool.submit(SignalFlags, table.record(0)).result(30)
        assert "not created in the main thread" in pool.submit(flags.look, 0.0).result(30)[0]
        pool.submit(flags.close).result(30)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("found", [signal.SIG_DFL, lambda *_: None], ids=["default", "own"])
def test_a_session_that_another_thread_collected_leaves_no_handler(
    table: RankStatusTable, found: Any
) -> None:
    """Only the main thread can restore handlers. The next session must not call the old ones."""
    signal.signal(signal.SIGTERM, found)
    dropped = SignalFlags(table.record(0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dropped.close).result(30)
    assert signal.getsignal(signal.SIGTERM) is dropped._handler
    flags = SignalFlags(table.record(0))
    signal.raise_signal(signal.SIGTERM)
    assert table.signals == signal.SIGTERM
    flags.close()
    assert signal.getsignal(signal.SIGTERM) is found


def test_handlers_of_asyncio_run_beside_those_of_the_session(table: RankStatusTable) -> None:
    flags = SignalFlags(table.record(0))
    called: list[str] = []

    async def train() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, called.append, "asyncio")
        assert len(flags.look(0.0)) == 1
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)

    asyncio.run(train())
    assert (called, table.signals) == (["asyncio"], signal.SIGTERM)
    flags.close()


def test_a_signal_to_a_forked_process_is_not_a_stop_request() -> None:
    status_table, handle = RankStatusTable.create(1)
    flags = SignalFlags(status_table.record(0))
    context = multiprocessing.get_context("fork")
    is_up = context.Event()

    def work() -> None:
        is_up.set()
        time.sleep(60)

    helper = context.Process(target=work, daemon=True)
    helper.start()
    assert is_up.wait(30)
    helper.terminate()
    helper.join(30)
    assert helper.exitcode is not None
    assert status_table.signals == 0
    flags.close()
    status_table.close()
    os.close(handle)


def test_an_exception_is_written_to_the_torchrun_error_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    record = FailureRecord()
    error: Exception | None = None
    try:
        raise ValueError("a bad batch")
    except ValueError as caught:
        error = caught
    trace = error.__traceback__
    record.write(error)
    record.close()
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: a bad batch"
    first = message["extraInfo"]["py_callstack"].splitlines()[1]
    assert "test_session_parts.py" in first, "the program's own frame comes first"
    assert error.__traceback__ is trace


def test_the_resume_line_lists_restored_missing_and_skipped_parts() -> None:
    found = Resumed(step=40, checkpoint="gpt:step-00000040.a0001.l01")
    own = Restored(parts=("model", "optimizer"), missing=("extra.ema",), unused=("scheduler",))
    restored = [own, Restored(parts=("model",), reseeded=True)]
    line = describe("gpt", found, restored, ("step-00000050.a0001.l01: never committed",))
    assert line == (
        "holdfast: gpt continues after step 40 from gpt:step-00000040.a0001.l01: restored model, "
        "optimizer; extra.ema was not in the checkpoint; the checkpoint's scheduler is not used; "
        "ranks 1 had no saved random state and were seeded from (seed, rank, step); skipped "
        "step-00000050.a0001.l01: never committed"
    )


def test_skip_windows_are_read_from_journaled_rollbacks_and_skips() -> None:
    rollbacks: list[dict[str, Any]] = [{"skip": [[41, 10]]}, {"skip": None}, {"skip": [[90, 1]]}]
    events = [
        Event(writer="cli", opening=1, sequence=n, time=0, kind=EventKind.ROLLED_BACK, data=d)
        for n, d in enumerate(rollbacks)
    ]
    skip = {"action": "skip", "skip": [[60, 5]]}
    later = events[0].model_copy(update={"kind": EventKind.NUMERICS, "data": skip})
    windows = recorded_skips([*events, later])
    assert windows == (SkipWindow(41, 10), SkipWindow(60, 5), SkipWindow(90, 1))


def test_importing_the_trainer_does_not_import_torch() -> None:
    code = "import sys, holdfast.trainer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_evaluation_after_a_save_does_not_count_as_flush_time(tmp_path: Path) -> None:
    evaluation_s, seen = 1.0, []
    session = Session(torch.nn.Linear(2, 2), directory=tmp_path, interval=10**9, snapshots="off")
    for step in session.steps(3):
        if step == 1:
            session.checkpoint()
        if step == 2:
            time.sleep(evaluation_s)
        if step == 3:
            ends_at = time.monotonic() + 30
            while session._saver.flush_s is None and time.monotonic() < ends_at:
                time.sleep(0.01)
            seen.append(session._saver.flush_s)
    session.close()
    assert seen[0] is not None
    assert seen[0] < evaluation_s
