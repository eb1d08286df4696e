"""Turns seconds into ratios: medians and spreads of quotients that are computed pair by pair.

All functions are pure. `Seconds` are a program's series by name. Values of one pair have the same
index.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Seconds = Mapping[str, Sequence[float]]

# Before the series of a session with `write_limit`.
LIMITED: Final = "limited."
# The name of the peer whose saves return before their copy is complete, here and in the result.
PEER: Final = "torch_checkpointing"

# After the series of steps that wait, as for an accelerator.
WAITING: Final = "_waiting"
# The values of `checkpoint.staging`.
STAGING_MODES: Final = ("memory", "single", "disk")

COMMIT_ALLOWANCE_S: Final = 0.010
STOCK_MODES: Final = ("sync", "thread", "process")
# The target maximum of each ratio: microseconds for the step, a fraction for the memory.
TARGETS: Final = {
    "save_blocked": 1.1,
    "save_overlapped": 0.1,
    "save_committed": 1.25,
    "first_save": 1.25,
    "load": 1.25,
    "load_bytes_same": 1.02,
    "load_bytes_resharded": 1.05,
    "signal_to_commit": 1.25,
    "commit_tail": 1.0,
    "step_overhead_us": 20.0,
    "memory_growth": 0.01,
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of the programs: all once, and `starts` once for each start.

    `staging` has series of each staging mode. `neighbours` are the seconds of a step without and
    with copies at a neighbour: `off` and `on`, of steps that compute and of steps that wait.
    `overlap` has the series of `PEER` too, if it is installed, and so has `free_core`, where one
    core is free. `narrowed` is 2 ranks → 1, `widened` 1 → 2. `signals` are the quotients of the
    starts. `peer_problem` says why rank 0 cannot save with the peer, if it is installed.
    """

    pairs: Seconds
    overlap: Seconds
    free_core: Seconds
    peer_version: str | None
    starts: Sequence[Seconds]
    narrowed: Seconds
    widened: Seconds
    endurance: Seconds
    staging: Seconds
    neighbours: Seconds
    unique_bytes: int
    signals: Sequence[float] = field(default_factory=tuple)
    peer_problem: str = ""


def answer(found: Found) -> dict[str, Any]:
    """Return `ratios`, `stock`, `spread` and `seconds` of the benchmark's result."""
    series = ratio_series(found)
    ratios = {name: round(statistics.median(series[name]), 4) for name in series if name in TARGETS}
    blocked, committed = series["first_save_blocked"], series["first_save_committed"]
    worse = max((blocked, committed), key=statistics.median)
    series["first_save"] = worse
    ratios["first_save"] = round(statistics.median(worse), 4)
    narrowed, widened = series["load_bytes_2_to_1"], series["load_bytes_1_to_2"]
    series["load_bytes_resharded"] = max((narrowed, widened), key=statistics.median)
    ratios["load_bytes_resharded"] = round(statistics.median(series["load_bytes_resharded"]), 4)
    return {
        "ratios": {name: ratios[name] for name in TARGETS},
        "setup": {name: spread(values) for name, values in setup_series(found).items()},
        "stock": {mode: stock_of(found.pairs, mode) for mode in STOCK_MODES}
        | {"load": stock_load(found), PEER: peer_of(found)},
        "training": training(found.overlap) | limited(found.overlap),
        "free_core": free_core_of(found),
        "staging": {mode: staging_of(found.staging, mode) for mode in STAGING_MODES},
        "neighbours": neighbours_of(found.neighbours),
        "targets": dict(TARGETS),
        "spread": {name: spread(values) for name, values in series.items()},
        "seconds": {name: spread(values) for name, values in all_seconds(found).items()},
    }


def setup_series(found: Found) -> dict[str, Sequence[float]]:
    """Return the cost of a start before the first step, one value for each start.

    `prepare_s` is the seconds to create the session. `prepare` is that ÷ a memcpy of the state.
    """
    starts = found.starts
    return {
        "prepare_s": [start["prepare"][0] for start in starts],
        "prepare": [start["prepare"][0] / statistics.median(start["memcpy"]) for start in starts],
    }


def ratio_series(found: Found) -> dict[str, Sequence[float]]:
    """Return for each of Holdfast's ratios the values whose median it is."""
    pairs = found.pairs
    first = [first_to_steady(start, "blocked") for start in found.starts]
    first_committed = [first_to_steady(start, "committed") for start in found.starts]
    unique = float(found.unique_bytes)
    return {
        "save_blocked": quotients(pairs["save.blocked"], pairs["memcpy"]),
        "save_overlapped": quotients(found.overlap["blocked"], found.overlap["memcpy"]),
        "save_committed": quotients(pairs["save.committed"], pairs["raw_write"]),
        "first_save_blocked": first,
        "first_save_committed": first_committed,
        "load": quotients(pairs["load"], pairs["raw_read"]),
        "load_2_to_1": quotients(found.narrowed["load"], found.narrowed["raw_read"]),
        "load_1_to_2": quotients(found.widened["load"], found.widened["raw_read"]),
        "load_bytes_same": [count / unique for count in pairs["load_bytes"]],
        "load_bytes_2_to_1": [count / unique for count in found.narrowed["load_bytes"]],
        "load_bytes_1_to_2": [count / unique for count in found.widened["load_bytes"]],
        "signal_to_commit": found.signals,
        "commit_tail": [
            tail / (creates + COMMIT_ALLOWANCE_S)
            for tail, creates in zip(pairs["tail"], pairs["creates"], strict=True)
        ],
        "step_overhead_us": found.endurance["step_overhead_us"],
        "memory_growth": found.endurance["memory_growth"],
    }


def stock_of(pairs: Seconds, mode: str) -> dict[str, Any]:
    """Return one stock mode's blocked time, save time, and first save ÷ steady saves."""
    blocked = quotients(pairs[f"stock.{mode}.blocked"], pairs["memcpy"])
    committed = quotients(pairs[f"stock.{mode}.committed"], pairs["raw_write"])
    first = {
        kind: pairs[f"first.stock.{mode}.{kind}"][0]
        / statistics.median(pairs[f"stock.{mode}.{kind}"])
        for kind in ("blocked", "committed")
    }
    return {
        "save_blocked": round(statistics.median(blocked), 4),
        "save_committed": round(statistics.median(committed), 4),
        "first_save": round(max(first.values()), 4),
        "spread": {"save_blocked": spread(blocked), "save_committed": spread(committed)},
    }


def staging_of(staging: Seconds, mode: str) -> dict[str, Any]:
    """Return what a save costs in one staging mode, by a copy and a raw write of the same pair.

    `throughput_during_write` is that of training while the checkpoint is written ÷ that without.
    """
    series = {
        "save_blocked": quotients(staging[f"{mode}.blocked"], staging[f"{mode}.memcpy"]),
        "save_committed": quotients(staging[f"{mode}.committed"], staging["raw_write"]),
        "throughput_during_write": quotients(
            staging[f"{mode}.product_alone"], staging[f"{mode}.product_during_write"]
        ),
    }
    return _medians(series)


def neighbours_of(neighbours: Seconds) -> dict[str, Any]:
    """Return the time of a step with copies at a neighbour ÷ that without, by kind of step.

    A step of `step_time` computes on the CPU, one of `step_time_waiting` waits.
    """
    return _medians(
        {
            f"step_time{kind}": quotients(neighbours[f"on{kind}"], neighbours[f"off{kind}"])
            for kind in ("", WAITING)
        }
    )


def _medians(series: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(values), 4) for name, values in series.items()}
    return medians | {"spread": {name: spread(values) for name, values in series.items()}}


def peer_of(found: Found) -> dict[str, Any]:
    """Return the ratios of torch_checkpointing in the pairs of overlapped saves, or why none."""
    if found.peer_version is None:
        is_absent = f"{PEER} is not installed; `make bench` installs it"
        return {"missing": found.peer_problem or is_absent}
    mark = f"{PEER}."
    own = {k.removeprefix(mark): v for k, v in found.overlap.items() if k.startswith(mark)}
    blocked, beside = quotients(own["blocked"], own["memcpy"]), training(own)
    return {
        "version": found.peer_version,
        "save_blocked": round(statistics.median(blocked), 4),
        **beside,
        "spread": {"save_blocked": spread(blocked), **beside["spread"]},
    }


def training(overlap: Seconds) -> dict[str, Any]:
    """Return how far overlapped saves slow training that computes on the CPU.

    `step_time_during_copy` is the time of a step beside a copy ÷ that of a step alone.
    `throughput_during_write` is the throughput while the checkpoint is written ÷ that without.
    """
    series = {
        "step_time_during_copy": quotients(overlap["step_during_copy"], overlap["step_alone"]),
        "throughput_during_write": quotients(
            overlap["product_alone"], overlap["product_during_write"]
        ),
    }
    return _medians(series)


def free_core_of(found: Found) -> dict[str, Any]:
    """Return how far overlapped saves slow a rank beside which a core is free, by who saves."""
    own = training(found.free_core)
    if found.peer_version is None:
        return own
    mark = f"{PEER}."
    series = {k.removeprefix(mark): v for k, v in found.free_core.items() if k.startswith(mark)}
    return own | {PEER: training(series)}


def limited(overlap: Seconds) -> dict[str, float]:
    """Return the throughput while a session with `write_limit` writes ÷ that without."""
    series = quotients(
        overlap[f"{LIMITED}product_alone"], overlap[f"{LIMITED}product_during_write"]
    )
    return {"throughput_during_limited_write": round(statistics.median(series), 4)}


def gpu(program: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results on GPUs: `save_blocked` ÷ a pinned copy, steps in a flush ÷ others."""
    seconds: Seconds = program["seconds"]
    blocked = quotients(seconds["save.blocked"], seconds["pinned_copy"])
    steps = quotients(seconds["step_during_flush"], seconds["step_baseline"])
    return {
        "device": program["facts"]["device"],
        "state_bytes": program["facts"]["unique_bytes"],
        "device_bytes_of_a_save": program["facts"]["device_bytes_of_a_save"],
        "context_bytes": program["facts"]["context_bytes"],
        "save_blocked": round(statistics.median(blocked), 4),
        "step_during_flush": round(statistics.median(steps), 4),
        "spread": {"save_blocked": spread(blocked), "step_during_flush": spread(steps)},
        "seconds": {name: spread(values) for name, values in seconds.items()},
    }


def stock_load(found: Found) -> dict[str, Any]:
    """Return the ratios of stock DCP's load of its own checkpoint at the same shape."""
    times = quotients(found.pairs["stock.load"], found.pairs["raw_read"])
    counts = [count / found.unique_bytes for count in found.pairs["stock.load_bytes"]]
    return {
        "load": round(statistics.median(times), 4),
        "load_bytes_same": round(statistics.median(counts), 4),
        "spread": {"load": spread(times), "load_bytes_same": spread(counts)},
    }


def signal_ratio(
    *, signalled_at: float, committed_at: float, step_ends: Sequence[float], start: Seconds
) -> float:
    """Return signal until commit ÷ (rest of the step + a copy + a raw write, of the same run)."""
    rest_s = rest_of_step(step_ends, signalled_at)
    limits_s = statistics.median(start["memcpy"]) + statistics.median(start["raw_write"])
    return (committed_at - signalled_at) / (rest_s + limits_s)


def rest_of_step(ends: Sequence[float], signalled_at: float) -> float:
    """Return the seconds from a signal to the end of its step, 0 after the last step."""
    return next((end - signalled_at for end in ends if end >= signalled_at), 0.0)


def first_to_steady(start: Seconds, kind: str) -> float:
    """Return the first save of a fresh program ÷ the median of later saves."""
    return start[f"first.{kind}"][0] / statistics.median(start[f"save.{kind}"])


def quotients(values: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return value ÷ limit, pair by pair."""
    return [value / limit for value, limit in zip(values, limits, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the smallest, median and largest value, and their number."""
    middle = statistics.median(values)
    low, high = min(values), max(values)
    return {
        "min": round(low, 6),
        "median": round(middle, 6),
        "max": round(high, 6),
        "n": len(values),
    }


def all_seconds(found: Found) -> dict[str, Sequence[float]]:
    """Return all series in seconds, each with a unique name, without byte counts."""
    named = {f"pairs.{name}": values for name, values in found.pairs.items()}
    named |= {f"overlap.{name}": values for name, values in found.overlap.items()}
    named |= {f"free_core.{name}": values for name, values in found.free_core.items()}
    named |= {f"staging.{name}": values for name, values in found.staging.items()}
    named |= {f"neighbours.{name}": values for name, values in found.neighbours.items()}
    for part, series in (("load_2_to_1", found.narrowed), ("load_1_to_2", found.widened)):
        named |= {f"{part}.{name}": values for name, values in series.items()}
    for name in found.starts[0]:
        values = [statistics.median(start[name]) for start in found.starts]
        named[f"starts.{name}"] = values
    return {name: values for name, values in named.items() if not name.endswith("_bytes")}
