"""`holdfast simulate`: what a run would do on a trace of spot capacity, by size and interval."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.shared import index, output
from holdfast.cli.shared.arguments import Overrides, refuse_unused
from holdfast.cli.views import print_stretches
from holdfast.contracts.errors import SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec, steps_total

if TYPE_CHECKING:
    from holdfast.workers.decisions.attempt_costs import Costs
    from holdfast.workers.runs.simulation import Simulated
    from holdfast.workers.schedulers.cluster_history import Trace

SCENARIOS_MAX: Final = 200

HistoryDays = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=3660,
        help="Instead of --trace: this cluster's free GPUs of so many days, from sacct.",
    ),
]
FallbackTraces = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="The trace of the next of resources.fallbacks. Repeatable. Without one, a fallback "
        "always has free GPUs.",
    ),
]


def simulate(
    context: typer.Context,
    spec: Annotated[str, typer.Argument(help="The spec: a TOML or YAML file.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="The trace: JSON with the available instances at each time."),
    ] = None,
    history_days: HistoryDays = None,
    fallback_trace: FallbackTraces = None,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="The steps of the run. Default: from `config`.")
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="Sizes to compare, such as 256,512. Default: the spec's.")
    ] = "",
    interval: Annotated[
        str, typer.Option(help="Checkpoint intervals to compare, such as auto,10m,1h.")
    ] = "",
    costs_of: Annotated[
        str | None, typer.Option("--costs-of", help="A run whose measured costs are used.")
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SECONDS",
            help="A cost: step_s, relaunch_s, queue_s, start_s, load_s, blocked_s, flush_s, "
            "notice_s or mean_failure_s. Repeatable.",
        ),
    ] = None,
    instance_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of an instance. Default: those of a node.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the failures.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the first row, as SVG or PNG.", metavar="FILE")
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Play a run on a trace of free GPUs; print its end, ETTR and cost for each size and interval.

    The relaunches, the sizes and the `auto` interval are decided as for a real run.
    """
    from holdfast.flows.parameters import load_spec
    from holdfast.workers.runs.simulation import simulate as play

    _check_options(context, history_days, costs_of)
    if plot is not None:
        output.check_plot(plot)
    base = load_spec(spec, overrides or ())
    costs = _costs(costs_of, root, cost or ())
    seen, *others = _traces(base, trace, history_days, fallback_trace or (), instance_gpus)
    count = _steps(base, steps)
    rows, first = [], None
    for chosen in _scenarios(base, spec, overrides or (), gpus, interval):
        # Costs are those at the given spec's size.
        scaled = replace(costs, step_s=costs.step_s * base.gpus / chosen.gpus)
        done = play(chosen, count, scaled, seen, fallbacks=others, seed=seed)
        first = first or done
        rows.append({"gpus": chosen.gpus, "interval": chosen.checkpoint.interval, **done.as_json()})
    if plot is not None and first is not None:
        _draw(first, seen, plot)
    facts = {"trace_s": seen.length_s, "steps": count, "costs": vars(costs), "rows": rows}
    output.answer(facts, as_json, _render)


def _check_options(context: typer.Context, days: float | None, costs_of: str | None) -> None:
    """Raise `SpecError` for options that this simulation does not use."""
    if days is not None:
        why = "the history counts GPUs, and instances only matter in a --trace"
        refuse_unused(context, why, "instance_gpus")
    if costs_of is None:
        refuse_unused(context, "it is for the run of --costs-of, which is not given", "root")


def _traces(
    spec: RunSpec,
    trace: Path | None,
    days: float | None,
    others: Sequence[Path],
    instance_gpus: int | None,
) -> list[Trace]:
    """Return the traces of the first choice and of fallbacks. Raises `SpecError`."""
    from holdfast.workers.schedulers.cluster_history import read_trace

    fallbacks = spec.resources.fallbacks
    if len(others) > len(fallbacks):
        raise SpecError(
            f"--fallback-trace was given {len(others)} times, and the spec has {len(fallbacks)} "
            "resources.fallbacks"
        )
    if days is None and trace is not None:
        size = instance_gpus or spec.resources.size_per_node
        return [read_trace(path, size) for path in (trace, *others)]
    if days is None or trace is not None or others:
        raise SpecError("expected --trace FILE or --history-days DAYS, and not both")
    from holdfast.workers.schedulers.cluster_history import read_history

    now = time.time()
    places = range(len(fallbacks) + 1)
    return [read_history(spec.resources.at(place), days, now=now) for place in places]


def _costs(costs_of: str | None, root: str | None, words: Sequence[str]) -> Costs:
    """Return the costs: measured ones if a run is named, replaced by those that are given."""
    from holdfast.workers.decisions.attempt_costs import Costs, measured_costs

    names = [one.name for one in fields(Costs)]
    given = {}
    for word in words:
        key, _, value = word.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            given[key] = math.nan
        if key not in names or not given[key] >= 0.0 or math.isinf(given[key]):
            raise SpecError(f"--cost {word!r}: expected KEY=SECONDS with one of {', '.join(names)}")
    if not given.get("step_s", 1.0) or not given.get("mean_failure_s", 1.0):
        raise SpecError("--cost: step_s and mean_failure_s must be above 0")
    if costs_of is not None:
        return replace(measured_costs(load_history(index.locate_run(costs_of, root))), **given)
    if "step_s" not in given:
        raise SpecError(
            "give --cost step_s=SECONDS, or --costs-of RUN for the costs that a run has measured"
        )
    return Costs(**given)


def _steps(spec: RunSpec, steps: int | None) -> int:
    found = steps or steps_total(spec.config)
    if not found:
        raise SpecError("the spec does not say how many steps the run has; give --steps")
    return found


def _scenarios(
    base: RunSpec, spec: str, overrides: Sequence[str], gpus: str, interval: str
) -> list[RunSpec]:
    """Return the spec in every combination of the given sizes and intervals."""
    from holdfast.flows.parameters import load_spec

    per_node = base.resources.size_per_node
    sizes = [_size(word, per_node) for word in gpus.split(",") if word.strip()]
    changes = product(
        [[f"resources.nodes={size // per_node}"] for size in sizes] or [[]],
        [[f"checkpoint.interval={one.strip()}"] for one in interval.split(",") if one.strip()]
        or [[]],
    )
    found = [load_spec(spec, [*overrides, *size, *every]) for size, every in changes]
    if len(found) > SCENARIOS_MAX:
        raise SpecError(f"{len(found)} combinations: expected {SCENARIOS_MAX} or fewer")
    return found


def _size(word: str, per_node: int) -> int:
    if not word.strip().isdecimal() or not int(word) or int(word) % per_node:
        raise SpecError(
            f"--gpus {word.strip()!r}: expected multiples of the {per_node} GPUs of a node"
        )
    return int(word)


def _draw(done: Simulated, trace: Trace, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    hour = 3600.0
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 5), layout="constrained")
    ends = max(1, int(done.ends_s // trace.gap_s) + 1)
    ticks = [number * trace.gap_s / hour for number in range(ends)]
    free = [trace.free(number * trace.gap_s) for number in range(ends)]
    above.fill_between(ticks, free, step="post", alpha=0.25, label="free GPUs")
    for span in done.spans:
        if span.started_at is not None and span.ended_at is not None:
            label = "GPUs of the run" if span is done.spans[0] else None
            times = span.started_at / hour, span.ended_at / hour
            above.hlines(span.gpus, *times, linewidth=3, label=label)
            first, last = span.resumed_step or 0, span.last_step or span.resumed_step or 0
            trained_from = span.launches[0].trained_from or span.started_at
            below.plot([trained_from / hour, span.ended_at / hour], [first, last], color="C0")
    above.set_ylabel("GPUs")
    above.set_ylim(bottom=0)
    above.legend(loc="lower right")
    below.set_ylabel("step")
    below.set_ylim(bottom=0)
    below.set_xlabel("hours")
    figure.savefig(path)


def _render(facts: dict[str, Any]) -> None:
    has_prices = any(row["cost"] is not None for row in facts["rows"])
    head = ["gpus", "interval", "ends after", "ETTR", "attempts", "preempted", "failed", "lost"]
    head += ["cost", "on demand alone"] * has_prices
    output.print_table(
        head,
        [
            [
                str(row["gpus"]),
                str(row["interval"]),
                output.seconds_text(row["ends_s"])
                if row["is_complete"]
                else f"never: {row['reason']}",
                f"{row['ettr']:.1%}",
                *(str(row[key]) for key in ("attempts", "preemptions", "failures", "steps_lost")),
                *([_price(row, "cost"), _price(row, "on_demand_alone")] if has_prices else []),
            ]
            for row in facts["rows"]
        ],
    )
    for row in facts["rows"]:
        if len(row["stretches"]) > 1:
            output.say(f"{counted(row['gpus'], 'GPU')}, interval {row['interval']}, by place:")
            print_stretches(row["stretches"])
    output.say(f"the trace lasts {output.seconds_text(facts['trace_s'])} and repeats")


def _price(row: dict[str, Any], key: str) -> str:
    return "" if row[key] is None else f"{row[key]:,.2f} {row['currency']}"
