"""A supervisor forgets the frequent lines of a run, and decides as if it had kept them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runs import T0, RunFolder

from holdfast.contracts.account.timeline import goodput_of, safe_step_of
from holdfast.contracts.disk import journal
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.records.history import (
    RunHistory,
    excluded_checkpoints,
    load_events,
    load_history,
    pinned_checkpoints,
)
from holdfast.contracts.records.history_cache import HistoryReader, load_tallied
from holdfast.contracts.records.tally import RECENT_MAX
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.limits import new_findings
from holdfast.flows.supervisor.summary import recorded_progress
from holdfast.flows.train import state_name
from holdfast.workers.checkpoints.retention import checkpoints_in_use
from holdfast.workers.decisions.growth import grow_delay
from holdfast.workers.decisions.policy import decide

SPEC = {
    "resources": {"gpus_per_node": 2},
    "alerts": {"ettr_min": 0.5, "gpu_hours_max": 1.0, "checkpoint_age_max_min": 1.0},
}
ENDINGS = (Cause.PREEMPTION, Cause.INFRASTRUCTURE, Cause.NUMERICS)


class Story:
    """Writes the journals of one run. Each line is a second later than the one before."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root, "kelp", "u" * 32, SPEC)
        self.now, self.attempt, self.launch, self.step = T0, 0, 0, 0
        self.sequences: dict[Path, int] = {}
        self.names: list[str] = []

    def write(self, path: Path, kind: EventKind, **data: Any) -> None:
        self.now += 1.0
        sequence = self.sequences[path] = self.sequences.get(path, -1) + 1
        line = {"writer": path.stem, "opening": 1, "sequence": sequence, "time": self.now}
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as stream:
            stream.write(json.dumps({**line, "kind": kind, "data": data}) + "\n")

    def tell(self, kind: EventKind, **data: Any) -> None:
        self.write(self.folder.paths.journal_of("flow"), kind, **data)

    def of_rank(self, kind: EventKind, **data: Any) -> None:
        path = self.folder.paths.attempt(self.attempt).rank_journal
        self.write(path, kind, attempt=self.attempt, launch=self.launch, **data)

    def of_node(self, kind: EventKind, node: int = 0, **data: Any) -> None:
        path = self.folder.paths.attempt(self.attempt).node_journal(node)
        self.write(path, kind, attempt=self.attempt, **data)

    def start(self) -> None:
        self.attempt, self.launch = self.attempt + 1, 0
        self.folder.submit(self.attempt, 2, self.now)
        self.folder.claim(self.attempt, self.now)
        self.restart()

    def restart(self) -> None:
        self.launch += 1
        self.of_node(EventKind.LAUNCH_STARTED, launch=self.launch)
        newest = self.names[-1] if self.names else None
        self.of_rank(EventKind.RESUMED, checkpoint=newest, step=self.step, load_s=0.5)

    def save(self, blocked_s: float = 0.25, reason: str = "interval") -> None:
        self.step += 10
        name = str(CheckpointName(self.step, self.attempt, self.launch))
        facts = {"step": self.step, "checkpoint": name, "reason": reason}
        self.of_rank(EventKind.STAGED, blocked_s=blocked_s, **facts)
        self.of_rank(EventKind.COMMITTED, **facts)
        self.names.append(name)

    def roll_back(self, count: int) -> None:
        excluded, self.names = self.names[-count:], self.names[:-count]
        if excluded:
            to = self.names[-1] if self.names else ""
            parsed = CheckpointName.parse(to)
            self.step = parsed.step if parsed else 0
            self.of_rank(EventKind.NUMERICS, action="rollback", reason="loss is NaN")
            self.of_rank(EventKind.ROLLED_BACK, to=to, excluded=excluded)

    def end(self, cause: Cause) -> None:
        self.of_node(EventKind.SIGNAL, node=1, cause=cause.value)
        self.of_node(EventKind.LAUNCH_ENDED, launch=self.launch, last_step=self.step)
        state = AttemptState.PREEMPTED if cause is Cause.PREEMPTION else AttemptState.FAILED
        facts = {"attempt": self.attempt, "state": state.value, "cause": cause.value}
        self.tell(EventKind.ATTEMPT_ENDED, **facts, ended_at=self.now, last_step=self.step)
        self.tell(EventKind.GOODPUT, attempt=self.attempt, ettr=0.5)
        self.tell(EventKind.DECISION, after_attempt=self.attempt, action="relaunch", gpus=2)


def says(history: RunHistory, now: float) -> dict[str, Any]:
    """What a supervisor and its helpers make of a history."""
    findings = [replace(one, value=round(one.value, 6)) for one in new_findings(history, now)]
    return {
        "attempts": history.attempts,
        "state": history.state,
        "state_name": state_name(history),
        "request": history.pending_request,
        "order": history.newest_order,
        "decision": history.last_decision,
        "next": decide(history, 4, now=now),
        "progress": recorded_progress(history),
        "findings": [(one.limit, one.passed, one.value) for one in findings],
        "excluded": excluded_checkpoints(history.events),
        "pins": pinned_checkpoints(history.events),
        "in use": checkpoints_in_use(history),
        "grow": grow_delay(history),
        "safe step": safe_step_of(history),
        "goodput": {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in asdict(goodput_of(history, until=now)).items()
        },
        "recent": history.tally.recent,
        "commits": history.tally.commits,
        "lines": history.tally.lines,
        "committed": history.tally.committed,
        "listed": history.tally.listed,
    }


ACTS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from([0.0, 0.25, 0.75])),
    st.tuples(st.just("save"), st.just(0.5)),
    st.tuples(st.just("final"), st.none()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("roll back"), st.integers(1, 5)),
    st.tuples(st.just("end"), st.sampled_from(ENDINGS)),
    st.tuples(st.just("limit"), st.booleans()),
    st.tuples(st.just("ask"), st.sampled_from(["pause", "resume", "relaunch"])),
    st.tuples(st.just("pin"), st.booleans()),
    st.tuples(st.just("pending"), st.sampled_from(["Priority", "Resources"])),
    st.tuples(st.just("note"), st.none()),
    st.tuples(st.just("read"), st.none()),
)


def play(story: Story, act: str, value: Any) -> None:
    if act == "save":
        story.save(value)
    elif act == "final":
        # A final save is the last one of its launch.
        story.save(0.5, "final")
        story.restart()
    elif act == "restart":
        story.restart()
    elif act == "roll back":
        story.roll_back(value)
    elif act == "end":
        story.end(value)
        story.start()
    elif act == "limit":
        story.tell(EventKind.LIMIT_PASSED, limit="ettr_min", passed=value, text="low")
    elif act == "ask":
        facts = {"action": value, "by": "ann", "after_attempt": story.attempt}
        story.tell(EventKind.OPERATOR_REQUEST, **facts)
    elif act == "pin" and story.names:
        kind = EventKind.PINNED if value else EventKind.UNPINNED
        story.tell(kind, checkpoint=story.names[-1], by="ann")
    elif act == "pending":
        facts = {"attempt": story.attempt, "state": "pending", "detail": value}
        story.tell(EventKind.ATTEMPT_STATE, **facts)
    elif act == "note":
        story.of_node(EventKind.NOTE, node=1, text="here")


def check_commits(history: RunHistory, events: Sequence[Event]) -> None:
    """The commits of each attempt are those in its lines, without the rolled back ones."""
    excluded = excluded_checkpoints(events)
    lines = [event for event in events if event.kind is EventKind.COMMITTED]
    assert history.tally.commits.keys() == {event.data["attempt"] for event in lines}
    for number, found in history.tally.commits.items():
        own = [event for event in lines if event.data["attempt"] == number]
        steps = [e.data["step"] for e in own if e.data["checkpoint"] not in excluded]
        assert found.branch_step == max(steps, default=None)
        assert found.newest_step == max(event.data["step"] for event in own)
        assert found.newest_at == max(event.time for event in own)


@pytest.mark.more
@settings(max_examples=60, deadline=None)
@given(acts=st.lists(ACTS, max_size=60))
def test_a_tallied_history_says_what_the_whole_one_says(acts: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        story = Story(Path(root))
        story.start()
        paths = story.folder.paths
        reader = HistoryReader(paths)
        for act, value in [*acts, ("read", None)]:
            play(story, act, value)
            if act == "read":
                now = story.now + 2.0
                whole = says(load_history(paths, load_events(paths)), now)
                assert says(reader.load(), now) == whole
        assert says(HistoryReader(paths).load(), now) == whole
        check_commits(reader.load(), load_events(paths))
        assert says(load_tallied(paths), now) == whole


@pytest.mark.parametrize("saves", [30, 600])
def test_memory_does_not_grow_with_the_saves(tmp_path: Path, saves: int) -> None:
    story = Story(tmp_path)
    story.start()
    for _ in range(saves):
        story.save()
    history = HistoryReader(story.folder.paths).load()
    kinds = {event.kind for event in history.events}
    assert kinds == {EventKind.LAUNCH_STARTED, EventKind.RESUMED}
    assert len(history.tally.recent) == RECENT_MAX
    assert (len(history.tally.commits), len(history.tally.blocked)) == (1, 1)
    assert history.tally.committed == saves
    assert history.tally.newest_step == 10 * saves


def test_a_rollback_reads_only_the_journals_that_it_concerns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path)
    for _ in range(3):
        story.start()
        for _ in range(100):
            story.save()
        story.end(Cause.PREEMPTION)
    story.start()
    story.save()
    reader = HistoryReader(story.folder.paths)
    reader.load()
    story.roll_back(1)
    parsed: list[bytes] = []
    real = journal._parse

    def parse(line: bytes) -> Iterator[Event]:
        parsed.append(line)
        return real(line)

    monkeypatch.setattr(journal, "_parse", parse)
    history = reader.load()
    assert len(parsed) < 20, "the journals of former attempts are as before"
    assert history.tally.commits[4].branch_step is None
    assert history.tally.commits[3].branch_step == 3000
    monkeypatch.undo()
    assert says(history, story.now) == says(load_history(story.folder.paths), story.now)
