"""Consumers of checkpoints: what is due, starts with real processes, failures and restarts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.leases import readers
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.consumers import (
    ConsumerOrder,
    ConsumerOutcome,
    ConsumerState,
    Use,
    needs_supervisor,
    open_uses,
    uses_in,
)
from holdfast.contracts.records.documents import (
    Claim,
    Submission,
    read_document,
    write_document,
)
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.reported import reported_metrics
from holdfast.contracts.spec.consumers import Consumer
from holdfast.contracts.states import AttemptState
from holdfast.flows.parameters import load_spec
from holdfast.workers.agent.guard import is_running
from holdfast.workers.checkpoints import consumer_process, consumers, deletion
from holdfast.workers.checkpoints.consumers import Consumers
from holdfast.workers.decisions import consumers as decisions
from holdfast.workers.decisions.consumers import CheckpointEvents, Due, find_due, find_startable
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.base import JobStatus
from holdfast.workers.schedulers.local import LocalExecutor

WAIT_S = 120.0
REPORT = """
import json, os, sys
step = int(os.environ["HOLDFAST_CHECKPOINT_STEP"])
assert os.path.isfile(os.environ["HOLDFAST_CHECKPOINT_PATH"] + "/manifest.json")
assert os.environ["HOLDFAST_CHECKPOINT"].startswith(os.environ["HOLDFAST_RUN"] + ":step-")
assert "HOLDFAST_ATTEMPT" not in os.environ and os.environ["MODE"] == "fast"
found = {"accuracy": step / 100, "odd": float("nan")}
json.dump(found, open(os.environ["HOLDFAST_METRICS_FILE"], "w"))
"""


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


def use(name: str, step: int, state: str, **more: Any) -> Use:
    facts: dict[str, Any] = {"start": 0, "tries": 0, "at": 0.0, **more}
    return Use(name, name_of(step), ConsumerState(state), step=step, **facts)


def known(*some: Use) -> dict[tuple[str, str], Use]:
    return {(one.consumer, one.checkpoint): one for one in some}


def consumer(**fields: Any) -> Consumer:
    return Consumer.model_validate({"name": "eval", "command": ["true"], **fields})


COMMITTED = [(name_of(step), step) for step in (5, 10, 15, 20, 25)]


@pytest.mark.parametrize(
    ("fields", "seen", "before", "steps"),
    [
        ({}, {}, [], [5, 10, 15, 20, 25]),
        ({}, {}, [use("eval", 5, "done"), use("eval", 10, "due")], [15, 20, 25]),
        ({}, {}, [use("other", 5, "done")], [5, 10, 15, 20, 25]),
        ({"every_steps": 10}, {}, [], [10, 20]),
        # The first of a period was deleted, or the period has one already.
        ({"every_steps": 10}, {}, [use("eval", 18, "done")], [20]),
        ({"event": "pin"}, {"pinned": [name_of(15), name_of(99)]}, [], [15]),
        ({"event": "best"}, {"best": name_of(20)}, [use("eval", 10, "done")], [20]),
        ({"event": "best"}, {}, [], []),
        ({"event": "preemption"}, {"preempted": [name_of(10)]}, [], [10]),
        ({"event": "end"}, {"ended": name_of(25)}, [], [25]),
        ({"event": "end"}, {}, [], []),
    ],
)
def test_what_is_due(
    fields: dict[str, Any], seen: dict[str, Any], before: list[Use], steps: list[int]
) -> None:
    found = find_due(
        [consumer(**fields)], CheckpointEvents(committed=COMMITTED, **seen), known(*before)
    )
    assert found == [Due("eval", name_of(step), step) for step in steps]


def test_a_few_start_at_once_and_a_failure_rests() -> None:
    due = [use("eval", step, "due") for step in range(10)]
    assert len(find_startable(due, 0.0)) == decisions.AT_ONCE_MAX
    busy = [use("eval", step, "started") for step in range(100, 100 + decisions.AT_ONCE_MAX)]
    assert find_startable([*busy, *due, use("other", 1, "due")], 0.0) == [use("other", 1, "due")]
    failed = use("eval", 1, "failed", tries=2, at=1000.0)
    assert find_startable([failed], 1000.0 + 1.9 * decisions.RETRY_S) == []
    assert find_startable([failed], 1000.1 + 2 * decisions.RETRY_S) == [failed]
    assert find_startable([failed], 900.0) == [failed], "a clock that was set back"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"on": [{"name": "a", "command": ["x"]}] * 2}, "two consumers have the name 'a'"),
        (
            {"on": [{"name": "a", "command": ["x"], "event": "pin", "every_steps": 5}]},
            "every_steps acts only with event = 'commit'",
        ),
        (
            {"on": [{"name": "a", "command": ["x"], "event": "best"}]},
            "event 'best' needs checkpoint.keep.best",
        ),
        ({"on": [{"name": "a", "command": ["x"], "job": {}}]}, "reserves no GPUs; leave job out"),
        ({"on": [{"name": "a"}]}, "neither of command and deployment"),
        ({"on": [{"name": "a", "command": ["x"], "deployment": "e/v"}]}, "both of command and"),
        ({"on": [{"name": "a", "deployment": "eval"}]}, "on[0].deployment"),
        ({"on": [{"name": "a", "deployment": "e/v", "job": {}}]}, "work pool"),
        ({"on": [{"name": "a", "command": ["x"], "parameters": {"n": 1}}]}, "only with deployment"),
        (
            {"on": [{"name": "a", "deployment": "e/v", "parameters": {"checkpoint": 1}}]},
            "parameters checkpoint: Holdfast sets them",
        ),
        ({"on": [{"name": "a", "command": ["x"], "job": {"extra": {"time": 5}}}]}, "timeout_min"),
        ({"on": [{"name": "a", "command": ["x"], "job": {"extra": {"mem": 5}}}]}, "job.memory_gb"),
        ({"on": [{"name": "a/b", "command": ["x"]}]}, "on[0].name"),
        ({"on": [{"name": "a", "command": []}]}, "on[0].command"),
        ({"on": [{"name": "a", "command": ["x"], "evnt": "pin"}]}, "evnt"),
    ],
)
def test_a_wrong_consumer_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec({"name": "kelp", "command": ["train.py"], **table})
    assert said in "\n".join([str(refused.value), *refused.value.problems])


def test_the_job_of_a_consumer_may_require_other_features_than_the_run() -> None:
    job = {"partition": "eval", "extra": {"constraint": "a100"}}
    on = [{"name": "a", "command": ["x"], "job": job}]
    table = {"on": on, "resources": {"executor": "slurm", "constraint": "h100"}}
    made = load_spec({"name": "kelp", "command": ["train.py"], **table})
    assert made.on[0].job is not None
    assert made.on[0].job.extra == {"constraint": "a100"}


class World:
    """A run with commits, and its consumers as one supervisor after another tends them."""

    def __init__(self, folder: Path, *on: dict[str, Any], **fields: Any) -> None:
        table = {
            "on": [{"name": "eval", "timeout_min": 1, **one} for one in on],
            "environment": {"MODE": "fast"},
            "launch": {"working_directory": str(folder)},
            **fields,
        }
        self.run = RunFolder(folder / "runs", "kelp", "a" * 32, table)
        self.run.submit(1, 2, T0)
        self.run.claim(1, T0)
        self.paths = self.run.paths
        self.journal = JournalWriter(self.paths.journal_of("flow"))
        self.supervisor = Consumers(self.paths)

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.run.commit(step, 1, at=T0 + step)

    def restart(self) -> None:
        self.supervisor = Consumers(self.paths)

    def tend(self) -> bool:
        return self.supervisor.tend(load_history(self.paths), self.journal).is_open

    def until(self, is_so: Callable[[], Any]) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < ends_at, self.uses()
            self.tend()
            time.sleep(0.1)

    def finish(self) -> dict[int, Use]:
        self.tend()
        self.until(lambda: not self.tend())
        return self.uses()

    def uses(self) -> dict[int, Use]:
        found = uses_in(load_history(self.paths).events)
        return {one.step: one for one in found.values()}

    def states(self, step: int) -> list[str]:
        return [
            event.data["state"]
            for event in load_history(self.paths).events
            if event.kind is EventKind.CONSUMER and event.data["step"] == step
        ]

    def metrics(self) -> dict[str, dict[str, float]]:
        return reported_metrics(load_history(self.paths).events)


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "RETRY_S", 0.1)
    monkeypatch.setattr(consumers, "OUTCOME_S", 0.5)


def python(program: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", program]}


def test_an_evaluation_reports_metrics_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    keep = {"checkpoint": {"keep": {"last": 1}}}
    world = World(tmp_path, {**python(wait + REPORT), "every_steps": 10}, **keep)
    world.commit(5, 10)
    world.tend()
    assert world.states(10) == ["due", "started"]
    world.commit(15)
    world.until(lambda: readers(world.paths.checkpoint(name_of(10))))
    assert [one.name for one in deletion.apply(world.paths, by="keep rules")] == [name_of(5)]
    (tmp_path / "go").touch()
    assert world.finish()[10].state is ConsumerState.DONE
    found = world.metrics()[name_of(10)]
    assert found["accuracy"] == 0.1
    assert found["odd"] != found["odd"], "NaN is recorded as what it is"
    assert readers(world.paths.checkpoint(name_of(10))) == []
    assert [one.name for one in deletion.apply(world.paths, by="keep rules")] == [name_of(10)]
    world.tend()
    assert world.states(10) == ["due", "started", "done"]


def test_a_pin_from_a_machine_whose_clock_is_behind_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, {**python(""), "event": "pin"})
    world.commit(10, 20)
    with JournalWriter(world.paths.journal_of("ann")) as journal:
        journal.append(EventKind.PINNED, checkpoint=name_of(10))
    assert world.finish()[10].state is ConsumerState.DONE
    now = time.time()
    monkeypatch.setattr("holdfast.contracts.disk.journal.time.time", lambda: now - 3600)
    with JournalWriter(world.paths.journal_of("bob")) as journal:
        journal.append(EventKind.PINNED, checkpoint=name_of(20))
    monkeypatch.undo()
    world.tend()
    assert 20 in world.uses()
    world.finish()


def test_a_failure_is_tried_again_within_its_retries(tmp_path: Path) -> None:
    world = World(tmp_path, {**python("import sys; print('no data'); sys.exit(3)"), "retries": 1})
    world.commit(10)
    last = world.finish()[10]
    assert (last.state, last.tries, last.start) == (ConsumerState.GIVEN_UP, 2, 2)
    assert last.reason == "it ended with exit status 3"
    assert world.states(10) == ["due", "started", "failed", "started", "given_up"]
    assert world.paths.consumer(2).log.read_text() == "no data\n"


@pytest.mark.parametrize(
    "written", ['{"a": "high"}', "[1]", "{", '{"a": true}', '{"a b": 1}', '{"a": 1e400}']
)
def test_metrics_that_are_none_are_a_failure(tmp_path: Path, written: str) -> None:
    program = f"import os; open(os.environ['HOLDFAST_METRICS_FILE'], 'w').write({written!r})"
    world = World(tmp_path, {**python(program), "retries": 0})
    world.commit(10)
    last = world.finish()[10]
    assert last.state is ConsumerState.GIVEN_UP
    assert "number" in last.reason or "JSON" in last.reason or "name" in last.reason
    assert world.metrics() == {}


def test_a_hang_and_its_children_end_at_the_time_limit(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, time\n"
        "one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('child', 'w').write(str(one.pid))\n"
        "time.sleep(600)\n"
    )
    world = World(tmp_path, {**python(program), "retries": 0, "timeout_min": 0.05})
    world.commit(10)
    last = world.finish()[10]
    assert last.reason == "killed after 3 s, its time limit"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)


def test_gigabytes_of_output_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_process, "OUTPUT_BYTES_MAX", 1000)
    read, write = os.pipe()
    os.write(write, b"x" * 5000)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        consumer_process._copy_output(stream, tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert text == "x" * 1000 + "\n[the rest of the output was dropped]\n"


def test_a_supervisor_that_restarts_adopts_what_runs(tmp_path: Path) -> None:
    wait = (
        "import os, time\nopen('starts', 'a').write('x')\n"
        "while not os.path.exists('go'): time.sleep(0.05)"
    )
    world = World(tmp_path, python(wait))
    world.commit(10)
    world.tend()
    # At once, before the process has claimed its start, and after.
    world.restart()
    world.tend()
    world.until(lambda: (tmp_path / "starts").exists())
    world.restart()
    world.tend()
    (tmp_path / "go").touch()
    assert world.finish()[10].state is ConsumerState.DONE
    assert (tmp_path / "starts").read_text() == "x"
    assert world.states(10) == ["due", "started", "done"]


def test_a_start_without_a_process_is_closed_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, python("print('ran')"))
    world.commit(10)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    # As if the supervisor were killed between the line and the process.
    with monkeypatch.context() as patch:
        patch.setattr(Consumers, "_spawn", die)
        with pytest.raises(KeyboardInterrupt):
            world.tend()
    assert world.states(10) == ["due", "started"]
    world.restart()
    monkeypatch.setattr(consumers, "CLAIM_S", 0.2)
    world.until(lambda: "failed" in world.states(10))
    monkeypatch.setattr(consumers, "CLAIM_S", 60.0)
    # The process that comes late finds the claim and runs nothing.
    assert consumer_process._claim(world.paths.consumer(1)) is False
    assert world.finish()[10].tries == 2
    assert world.states(10) == ["due", "started", "failed", "started", "done"]


def test_a_killed_process_is_lost_and_tried_again(tmp_path: Path) -> None:
    wait = (
        "import os, time\nprint(os.getpid(), flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.05)"
    )
    world = World(tmp_path, python(wait))
    world.commit(10)
    world.tend()
    log = world.paths.consumer(1).log
    world.until(lambda: log.exists() and log.read_text().endswith("\n"))
    claim = read_document(Claim, world.paths.consumer(1).claim)
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    world.until(lambda: world.uses()[10].tries == 2)
    assert not is_running(int(log.read_text())), "the command would work beside the next"
    (tmp_path / "go").touch()
    assert world.finish()[10].state is ConsumerState.DONE


def test_a_preempted_start_runs_again(tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)"
    world = World(tmp_path, python(wait))
    world.commit(10)
    world.tend()
    world.until(lambda: world.paths.consumer(1).log.exists())
    claim = read_document(Claim, world.paths.consumer(1).claim)
    assert claim is not None
    os.kill(claim.pid, signal.SIGTERM)
    world.until(lambda: world.uses()[10].tries == 2)
    reasons = [
        event.data["reason"]
        for event in load_history(world.paths).events
        if event.kind is EventKind.CONSUMER and event.data["state"] == "failed"
    ]
    assert reasons == ["SIGTERM came, as when a job is preempted or cancelled"]
    (tmp_path / "go").touch()
    assert world.finish()[10].state is ConsumerState.DONE


def test_what_was_preempted_is_tried_again_before_newer_checkpoints() -> None:
    waiting = [use("eval", 20, "due", at=5.0), use("eval", 10, "failed", at=900.0)]
    assert [one.step for one in open_uses(known(*waiting))] == [10, 20]


@pytest.mark.parametrize(
    ("ending", "state", "tries"),
    [
        # A process that ends within the time of grace ends its job as any other.
        ("stopped", AttemptState.FAILED, 0),
        ("stopped", AttemptState.PREEMPTED, 0),
        ("failed", AttemptState.PREEMPTED, 0),
        ("stopped", AttemptState.CANCELLED, 1),
        ("failed", AttemptState.FAILED, 1),
        ("stopped", None, 1),
    ],
)
def test_a_preemption_does_not_count_as_a_try(
    ending: str, state: AttemptState | None, tries: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    world = World(tmp_path, {"command": ["true"], "retries": 0})
    world.commit(10)
    start = world.paths.consumer(1)
    start.directory.mkdir(parents=True)
    order = ConsumerOrder(
        consumer="eval", checkpoint=name_of(10), step=10, working_directory="/", timeout_s=9.0,
        tries=1, is_job=True, created_at=T0,
    )  # fmt: skip
    history = load_history(world.paths)
    write_document(start.order, order)
    write_document(
        start.request,
        build_request(history.record, history.spec, attempt=1, gpus=1, reason="", created_at=T0),
    )
    write_document(start.submission, Submission(job_id="7", executor="local", submitted_at=T0))
    facts = {"ending": ending, "reason": "SIGTERM came", "ended_at": T0}
    write_document(start.outcome, ConsumerOutcome.model_validate(facts))
    with JournalWriter(world.paths.journal_of("flow")) as journal:
        line: dict[str, Any] = {"consumer": "eval", "checkpoint": name_of(10), "step": 10}
        journal.append(EventKind.CONSUMER, **line, start=1, tries=1, state="started", reason="")
    status = JobStatus(state=state)
    monkeypatch.setattr(LocalExecutor, "status", lambda *_, **__: status)
    monkeypatch.setattr(consumers, "STATE_S", 0.0)
    world.tend()
    assert world.uses()[10].tries == tries
    assert world.states(10)[-1] == ("given_up" if tries else "failed")
    assert needs_supervisor(load_history(world.paths))


def test_a_checkpoint_that_is_gone_is_given_up(tmp_path: Path) -> None:
    world = World(tmp_path, python("pass"))
    world.commit(10, 20)
    world.supervisor._find_due(load_history(world.paths), {}, world.journal)
    (world.paths.checkpoint(name_of(10)) / "manifest.json").unlink()
    found = world.finish()
    assert (found[10].state, found[10].tries) == (ConsumerState.GIVEN_UP, 0)
    assert found[20].state is ConsumerState.DONE
