"""`holdfast simulate`: played runs against sums by hand, and every wrong input."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call

from holdfast.contracts.account.goodput import PARTS
from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.decisions.attempt_costs import Costs, Saves
from holdfast.workers.runs.simulation import Simulated, simulate
from holdfast.workers.schedulers.cluster_history import Trace, _Use, read_history, read_trace

# No failures, and whole numbers.
COSTS = Costs(
    step_s=2.0,
    start_s=20.0,
    load_s=10.0,
    blocked_s=4.0,
    flush_s=30.0,
    notice_s=120.0,
    mean_failure_s=math.inf,
)
GAP_S = 100.0


def spec_of(**parts: Any) -> RunSpec:
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 8}
    checkpoint = {"interval": "100s"}
    fields = {"resources": resources, "checkpoint": checkpoint, **parts}
    return RunSpec.model_validate({"name": "r", "command": ["t.py"], **fields})


def play(spec: RunSpec, steps: int, gpus: list[int], costs: Costs = COSTS) -> Simulated:
    return simulate(spec, steps, costs, Trace(tuple(gpus), GAP_S))


def check_parts(done: Simulated) -> None:
    kept = done.goodput
    assert sum(getattr(kept, f"{part}_s") for part in PARTS) == pytest.approx(kept.total_s)
    assert kept.total_s == pytest.approx(done.ends_s)


def test_run_without_preemptions_takes_the_sum_of_its_costs() -> None:
    done = play(spec_of(), 500, [16])
    # 1000 s of steps, a save after every 100 s but the last, a start and the last flush.
    assert done.ends_s == 20.0 + 1000.0 + 9 * 4.0 + 30.0
    assert (done.is_complete, done.reason, done.steps) == (True, "completed", 500)
    assert (done.goodput.training_s, done.goodput.blocked_s) == (1000.0, 36.0)
    check_parts(done)


def test_preemption_with_enough_notice_loses_no_step() -> None:
    # The GPUs are gone from 400 s to 600 s.
    done = play(spec_of(), 300, [16, 16, 16, 16, 0, 0, 16, 16, 16, 16])
    first, second = done.spans
    assert first.launches[0].trained_until == 400.0
    # 380 s after the start, three saves had blocked for 4 s each, so 184 steps were done.
    assert (first.last_step, second.resumed_step) == (184, 184)
    assert first.ended_at == 430.0
    # The next attempt is in the queue until the GPUs are back.
    assert second.started_at == 600.0
    assert done.goodput.steps_lost == 0
    assert done.preemptions == 1
    check_parts(done)


def test_preemption_without_enough_notice_loses_the_steps_since_the_last_durable_save() -> None:
    costs = dataclasses.replace(COSTS, notice_s=10.0)
    done = play(spec_of(), 300, [16, 16, 16, 16, 0, 0, 16, 16, 16, 16], costs)
    # Saves are staged at 120, 224 and 328 s, and the last of them is durable at 358 s.
    assert done.spans[1].resumed_step == 150
    assert done.spans[0].last_step == 184
    assert done.goodput.steps_lost == 34
    assert done.is_complete
    check_parts(done)


def test_run_continues_at_the_size_that_is_free_and_grows_again() -> None:
    trace = [16] * 5 + [8] * 5 + [16] * 90
    elastic = {"min_gpus": 8, "max_gpus": 16}
    small = play(spec_of(elastic=elastic), 2000, trace)
    assert [span.gpus for span in small.spans] == [16, 8]
    grow = {**elastic, "grow": True, "grow_after_s": 500.0}
    grown = play(spec_of(elastic=grow), 2000, trace)
    assert [span.gpus for span in grown.spans] == [16, 8, 16]
    # They are free from 1000 s on.
    assert grown.spans[1].launches[0].trained_until == 1500.0
    assert grown.goodput.steps_lost == 0
    assert grown.ends_s < small.ends_s
    check_parts(grown)


def test_a_single_choice_below_the_asked_count_is_used() -> None:
    trace = [16, 16, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    one, both = (play(spec_of(elastic={"choices": c}), 500, trace) for c in ([8], [8, 16]))
    assert [span.gpus for span in one.spans] == [span.gpus for span in both.spans] == [16, 8]
    assert one.ends_s == both.ends_s


def test_the_limit_of_attempts_holds_for_fallbacks_too() -> None:
    fallbacks = [{"partition": "prod", "after_min": 2}]
    for attempts, places in ((2, [0, 1]), (3, [0, 1, 0])):
        spec = with_fallbacks(*fallbacks)
        spec = spec.model_copy(
            update={"supervision": spec.supervision.model_copy(update={"attempts_max": attempts})}
        )
        # The first choice is full at first, and has room for good a while later.
        done = play(spec, 500, [0, 0, 0, 0, *[16] * 60])
        assert [span.place for span in done.spans] == places


def test_failures_follow_the_budgets_of_the_spec() -> None:
    costs = dataclasses.replace(COSTS, mean_failure_s=400.0)
    few = play(spec_of(supervision={"budgets": {"node_failure": 1}}), 5000, [16], costs)
    assert not few.is_complete
    assert few.reason.startswith("node_failure (2 times, 1 allowed)")
    assert few.failures == 2
    many = play(spec_of(supervision={"budgets": {"node_failure": 999}}), 5000, [16], costs)
    assert many.is_complete
    assert many.goodput.steps_lost > 0
    assert many.goodput.hung_s == 0
    check_parts(many)
    again = play(spec_of(supervision={"budgets": {"node_failure": 999}}), 5000, [16], costs)
    assert again == many, "the same seed gives the same failures"


def test_time_limit_ends_attempts_without_a_loss() -> None:
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 8, "time_limit_min": 10}
    done = play(spec_of(resources=resources), 500, [16])
    assert len(done.spans) == 2
    assert done.spans[0].ended_at == 600.0
    assert (done.goodput.steps_lost, done.is_complete) == (0, True)


def test_auto_interval_is_that_of_a_real_run() -> None:
    costs = dataclasses.replace(COSTS, mean_failure_s=None)
    done = play(spec_of(checkpoint={"interval": "auto"}), 2000, [16], costs)
    # 6000 hours for a node, two nodes, and a save that blocks 4 s: half an hour and more, so the
    # run of 4000 s has one save besides the last.
    assert len(done.spans[0].launches[0].held) == 1


def test_cost_and_what_on_demand_alone_would_cost() -> None:
    prices = {"gpu_hour": 1.0, "on_demand_per_gpu_hour": 3.0}
    done = play(spec_of(cost=prices), 500, [16])
    assert done.goodput.cost == pytest.approx(16 * 1086 / 3600)
    assert done.on_demand_alone == pytest.approx(16 * 1050 / 3600 * 3)
    assert done.as_json()["cost"] == done.goodput.cost


def with_fallbacks(*fallbacks: dict[str, Any]) -> RunSpec:
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 8, "partition": "spot"}
    resources |= {"fallbacks": list(fallbacks), "return_after_min": 5}
    return spec_of(resources=resources, cost={"gpu_hour": 1.0, "on_demand_per_gpu_hour": 3.0})


def test_run_moves_to_its_fallback_and_returns_to_spot() -> None:
    spec = with_fallbacks({"partition": "prod", "after_min": 10, "gpu_hour": 3.0})
    done = play(spec, 3000, [16] * 10 + [0] * 30 + [16] * 60)
    spot, waits, away, back = done.spans
    assert [span.place for span in done.spans] == [0, 0, 1, 0]
    # The GPUs are gone from 1000 s to 4000 s.
    assert (spot.stop_requested_at, spot.ended_at) == (1000.0, 1030.0)
    assert waits.started_at is None
    assert waits.submitted_at is not None
    assert waits.ended_at == away.submitted_at == away.started_at == waits.submitted_at + 600.0
    # They are free again for 5 min, then the run saves first.
    assert (away.stop_requested_at, away.ended_at) == (4300.0, 4330.0)
    assert back.started_at == 4330.0
    assert (done.goodput.steps_lost, done.is_complete) == (0, True)
    assert [(one.name, one.first, one.last) for one in done.stretches] == [
        ("spot", 1, 2),
        ("prod", 3, 3),
        ("spot", 4, 4),
    ]
    hours = [1030.0, 4330.0 - (1036.0 + 600.0), done.ends_s - 4330.0]
    costs = [16 * s / 3600 * price for s, price in zip(hours, (1.0, 3.0, 1.0), strict=True)]
    assert [one.costs["cost"] for one in done.stretches] == pytest.approx(costs)
    for key, total in (
        ("cost", done.goodput.cost),
        ("on_demand_cost", done.goodput.on_demand_cost),
    ):
        assert sum(one.costs[key] for one in done.stretches) == pytest.approx(total)
    check_parts(done)


def test_a_fallback_with_a_trace_of_its_own_waits_for_it() -> None:
    spec = with_fallbacks({"partition": "other", "after_min": 10}, {"qos": "high", "after_min": 20})
    none, free = Trace((0,), GAP_S), Trace((16,), GAP_S)
    done = simulate(spec, 100, COSTS, none, fallbacks=[none, free])
    assert [span.place for span in done.spans] == [0, 1, 2]
    assert done.spans[-1].started_at == 600.0 + 1200.0
    assert [one.name for one in done.stretches] == ["spot", "other", "QOS high"]
    with pytest.raises(SpecError, match="has 0 GPUs at most"):
        simulate(spec, 100, COSTS, none, fallbacks=[none, none])


def test_trace_that_never_has_enough_is_refused() -> None:
    with pytest.raises(SpecError, match="has 8 GPUs at most, and the run needs 16"):
        play(spec_of(), 10, [8, 0, 8])


@pytest.mark.parametrize("at", [0.0, 99.0, 100.0, 103.9, 104.0, 204.0, 238.0, 1040.0, 1234.5])
def test_saves_agree_with_their_periods(at: float) -> None:
    saves = Saves(100.0, COSTS, 0.0)
    held_s = sum(end - begin for begin, end in saves.held(at))
    assert saves.trained_s(at) == pytest.approx(at - held_s)
    assert saves.durable_s(at) <= saves.trained_s(at)
    assert saves.reached(saves.trained_s(at)) <= at + 1e-9


def test_trace_repeats_and_finds_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 100}, "data": [2, 0, 1]}))
    trace = read_trace(path, 8)
    assert [trace.free(at) for at in (0, 99, 100, 250, 300, 400)] == [16, 16, 0, 8, 16, 0]
    assert trace.first(150.0, 8, has=True) == 200.0
    assert trace.first(150.0, 16, has=True) == 300.0
    assert trace.first(310.0, 16, has=False) == 400.0
    assert trace.first(0.0, 24, has=True) == math.inf


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "expected JSON with metadata.gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ('{"metadata": {"gap_seconds": 60}, "data": []}', "data is empty"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, null, 1]}', "data[1] is None; a gap"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, -1]}', "data[1] is -1"),
        ('{"metadata": {"gap_seconds": 1e308}, "data": [1]}', "gap_seconds is 1e+308"),
        ('{"metadata": {"gap_seconds": 1e-9}, "data": [1]}', "gap_seconds is 1e-09"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [1]}', "gap_seconds is nan"),
        ('{"metadata": {"gap_seconds": 1%s}, "data": [1]}' % ("0" * 400), "too large"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1%s]}' % ("0" * 400), "data[0] is 1000"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_trace(path, 8)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("interval", "steps", "costs", "words"),
    [
        (1, 100_000_000, COSTS, "checkpoints or more, expected at most"),
        ("100s", 10**15, COSTS, "give fewer --steps"),
        ("100s", 10, dataclasses.replace(COSTS, step_s=1e300), "a smaller --cost step_s"),
    ],
)
def test_a_run_that_would_take_too_long_to_play_is_refused(
    interval: Any, steps: int, costs: Costs, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        play(spec_of(checkpoint={"interval": interval}), steps, [16], costs)


@pytest.mark.more
def test_a_run_that_looks_for_larger_sizes_too_often_is_refused() -> None:
    elastic = {"min_gpus": 8, "max_gpus": 32, "grow": True}
    trace = Trace((16, 16), 1.0)
    with pytest.raises(SpecError, match="give a trace with a longer gap"):
        simulate(spec_of(elastic=elastic), 10_000_000, COSTS, trace)


NODES = """
NodeName=n1 Gres=gpu:a100:4 State=IDLE Partitions=spot,all
NodeName=n2 Gres=gpu:a100:4 State=IDLE Partitions=spot
NodeName=n3 Gres=gpu:h100:8 State=IDLE Partitions=prod
"""
# Times are those of the machine's time zone, as Slurm prints them.
NOW = 1_700_000_000.0


def slurm_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat()


def test_history_of_a_cluster_becomes_a_trace() -> None:
    began = NOW - 3600.0
    jobs = [
        (began, began + 600, "cpu=8,gres/gpu=4,gres/gpu:a100=4", "n1"),
        (began + 600, None, "gres/gpu=4", "n[2-3]"),
        (None, None, "gres/gpu=8", "None assigned"),
        (began, began + 900, "cpu=2", "n2"),
    ]
    times = [("Unknown" if at is None else slurm_time(at) for at in job[:2]) for job in jobs]
    lines = ["|".join((*when, *job[2:])) for when, job in zip(times, jobs, strict=True)]
    down = f"n1|{slurm_time(began + 1200)}|{slurm_time(began + 1500)}\n|{slurm_time(began)}|Unknown"
    asked = []

    def answer(words: Sequence[str]) -> str:
        asked.append(words)
        if words[0] == "sacct":
            return "\n".join(lines)
        if words[0] == "sacctmgr":
            return down
        if "config" in words:
            return "AccountingStorageTRES   = cpu,gres/gpu"
        return NODES if "node" in words else "PartitionName=spot Default=NO\nPartitionName=prod"

    resources = Resources(executor="slurm", partition="spot")
    trace = read_history(resources, 1 / 24, now=NOW, ask=answer)
    # Of 8 GPUs, 4 of n1 are in use for 10 min, then 2 of n2; n1 is down for 5 min.
    assert trace.gap_s == 4.0
    assert len(trace.gpus) == 900
    assert [len(list(same)) for _, same in groupby(trace.gpus)] == [150, 150, 75, 525]
    assert [free for free, _ in groupby(trace.gpus)] == [4, 6, 2, 6]
    assert next(words for words in asked if words[0] == "sacct")[-3].startswith("-E")
    with pytest.raises(SpecError, match="no node with GPUs of the spec"):
        read_history(Resources(executor="slurm", partition="none"), 1.0, now=NOW, ask=answer)


def test_history_counts_the_most_gpus_in_use_at_one_moment() -> None:
    """Short jobs that follow each other on a GPU use one, also within one number of the trace."""
    use = _Use({"n1": 4, "n2": 4}, 1000.0, 2000.0)
    for began in range(1000, 1090, 10):
        use.add(began, began + 10, {"n1": 2.0, "elsewhere": 8.0})
    # n1 is drained while a job still runs on it, and is taken for 4 GPUs and no more.
    use.add(1210.0, 1250.0, {"n1": 3.0, "n2": 1.0})
    use.add(1220.0, 1240.0, {"n1": 4.0})
    use.add(1900.0, None, {"n2": 4.0})
    use.add(500.0, 900.0, {"n2": 4.0})
    assert use.most(100.0) == [2, 0, 5, 0, 0, 0, 0, 0, 0, 4]


SPEC = """
name = "big"
command = ["train.py"]
[config]
steps = 2000
[resources]
executor = "slurm"
nodes = 4
gpus_per_node = 8
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "big.toml").write_text(SPEC)
    document = {"metadata": {"gap_seconds": 300}, "data": [4, 4, 4, 2, 4, 4]}
    (tmp_path / "trace.json").write_text(json.dumps(document))
    return str(tmp_path / "big.toml"), str(tmp_path / "trace.json")


def test_command_compares_sizes_and_intervals(
    call: Call, files: tuple[str, str], tmp_path: Path
) -> None:
    spec, trace = files
    words = ["simulate", spec, "--trace", trace, "--cost", "step_s=1", "--gpus", "16,32"]
    words += ["--interval", "5m,100", "--plot", str(tmp_path / "plot.svg")]
    found = call(*words, "--json").json
    sizes = [(row["gpus"], row["interval"]) for row in found["rows"]]
    assert sizes == [(16, "5m"), (16, 100), (32, "5m"), (32, 100)]
    assert found["steps"] == 2000
    assert found["trace_s"] == 1800
    small, _, large, _ = found["rows"]
    assert small["preemptions"] == 0
    assert large["preemptions"] > 0
    assert (tmp_path / "plot.svg").read_text().lstrip().startswith("<?xml")
    table = call(*words).out
    assert "ends after" in table
    assert "the trace lasts 30 min" in table


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give --cost step_s=SECONDS"),
        (["--cost", "step_s"], "expected KEY=SECONDS"),
        (["--cost", "step=1"], "expected KEY=SECONDS"),
        (["--cost", "step_s=0"], "must be above 0"),
        (["--cost", "step_s=1", "--cost", "flush_s=-1"], "expected KEY=SECONDS"),
        (["--cost", "step_s=1", "--gpus", "12"], "expected multiples of the 8 GPUs"),
        (["--cost", "step_s=1", "--interval", "soon"], "'soon'"),
        (["--cost", "step_s=1", "--set", "config.steps=0"], "give --steps"),
        (["--costs-of", "none"], "none"),
        (["--cost", "step_s=1", "--history-days", "3"], "and not both"),
        (["--cost", "step_s=1", "--fallback-trace", "x.json"], "the spec has 0"),
    ],
)
def test_wrong_options_are_refused(
    call: Call, files: tuple[str, str], words: list[str], problem: str
) -> None:
    spec, trace = files
    done = call("simulate", spec, "--trace", trace, *words)
    assert done.status != 0
    assert problem in done.err
