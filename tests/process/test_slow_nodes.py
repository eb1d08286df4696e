"""A node becomes slow while an attempt trains, which leaves it with `health.slowdown = "act"`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.test_lost_nodes import events, launches
from tests.support.played_nodes import PlayedJob

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

STEPS = 4000
SLOW_AFTER_S = 25.0
# The windows of the comparison and the time between two tests are shorter than usual, in the agents
# only. Noise of the machine may name n1 earlier, and a test then refutes that.
CUSTOMIZE = """
import sys
if "holdfast.workers.agent.main" in sys.orig_argv:
    from holdfast.workers.agent.stops import departure
    from holdfast.workers.agent.watch import hangs, paired_test
    hangs.STRAGGLER_WINDOW_S = 1.0
    paired_test.GAP_S = 3.0
    departure.LOOK_EVERY_S = 1.0
"""
# Another process takes half of the processor of node n1 from some time on. Its replacement has a
# processor that nobody else uses as much, so all ends soon after.
PROGRAM = f"""
import os, subprocess, sys, time, torch, torch.distributed as dist
from holdfast.trainer import Session

host, is_first = os.environ["SLURMD_NODENAME"], os.environ["HOLDFAST_LAUNCH"] == "1"
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cpus[-1:] if host == "n1" else cpus[:1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model, optimizer)

def work(count):
    began = time.monotonic()
    for number in range(count):
        pass
    return time.monotonic() - began

# Steps last as long on every machine, so that no fast one ends before its node is slow.
a_millisecond = int(100_000 / min(work(100_000) for _ in range(50)) / 1000)
# All nodes of this machine share its processors, so the others work less.
own_ms = (11 if host == "n1" else 4) if is_first else 0
began, other = time.monotonic(), None
for step in session.steps({STEPS}):
    if host == "n1" and other is None and time.monotonic() - began > {SLOW_AFTER_S}:
        busy = f"import os\\nwhile os.getppid() == {{os.getpid()}}: pass"
        other = subprocess.Popen([sys.executable, "-c", busy])
    work(own_ms * a_millisecond)
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
session.close()
dist.destroy_process_group()
"""


def test_a_spare_node_takes_the_place_of_a_slow_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    customized = tmp_path / "customized"
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(CUSTOMIZE)
    with PlayedJob(
        tmp_path,
        nodes=2,
        spares=1,
        enter=lambda node: ["env", f"PYTHONPATH={customized}"],
        program=tmp_path / "program.py",
        health={"slowdown": "act"},
        checkpoint={"interval": 200, "snapshots": "off"},
    ) as job:
        assert job.wait(1, 300) == 0, "its agent ends before the attempt"
        assert (job.wait(0, 200), job.wait(2, 200)) == (0, 0)
        outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    first, second = outcome.launches
    assert (first.ending, second.ending) == ("drained", "completed")
    assert second.first_step == (first.last_step or 0) + 1, "steps were lost"
    started = launches(job)[1]
    assert {key: started[key] for key in ("drained", "slow", "joined")} == {
        "drained": ["n1"],
        "slow": ["n1"],
        "joined": ["n2"],
    }
    assert str(started["reason"]).startswith("n1 (slow: the others wait ")
    assert outcome.unhealthy_hosts == ("n1",), "later attempts exclude it"
    # With such short windows, noise may name n0 as well. It leads, so it stays.
    assert "n1" in [one.data["host"] for one in events(job, EventKind.NODE_SLOW)]
    notes = [str(one.data["text"]) for one in events(job, EventKind.NOTE)]
    assert sum(note.startswith("leaves n1: a step is ") for note in notes) == 1
    assert sum(note.startswith("spare after a slowdown: slow nodes: n1 ") for note in notes) == 1
    assert events(job, EventKind.SLOWDOWN_TESTED)[0].data["pair_rates"][0] > 0.0
    texts = [str(one.data["text"]) for one in events(job, EventKind.NODE_SLOW)]
    # Which of its two suspicions comes first, of the node or of long steps, depends on the load.
    assert any("s that n1 is slow: the same work takes" in text for text in texts)
