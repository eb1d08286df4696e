"""`holdfast bench`: measure this machine's limits, stock DCP and Holdfast in one run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast.cli.shared.output import AsJson, answer, check_plot, print_facts, print_table
from holdfast.contracts.version import require_bench_package

END_S: Final = 60.0
# The titles of the keys in the benchmark's JSON.
TITLES: Final = {
    "save_blocked": "training blocked ÷ memcpy",
    "save_overlapped": "blocked, copy beside a step ÷ memcpy",
    "save_committed": "save until committed ÷ raw write",
    "first_save": "first save ÷ steady save",
    "load": "load ÷ raw cold read",
    "load_bytes_same": "bytes read ÷ unique, same ranks",
    "load_bytes_resharded": "bytes read ÷ unique, resharded",
    "signal_to_commit": "signal → commit ÷ (step + copy + write)",
    "commit_tail": "commit tail ÷ (3 creates + 10 ms)",
    "step_overhead_us": "overhead of a step without a save, µs",
    "memory_growth": "memory growth over all saves",
}
SETUP_TITLES: Final = {
    "prepare_s": "session creation, s",
    "prepare": "session creation ÷ memcpy",
}
TRAINING_TITLES: Final = {
    "step_time_during_copy": "step time beside a copy ÷ alone",
    "throughput_during_write": "throughput during the write ÷ without",
    "throughput_during_limited_write": "the same with `write_limit`",
}
STAGING_TITLES: Final = {
    "save_blocked": TITLES["save_blocked"],
    "save_committed": TITLES["save_committed"],
    "throughput_during_write": TRAINING_TITLES["throughput_during_write"],
}
STAGING_HEADINGS: Final = ("staging", *STAGING_TITLES.values())
NEIGHBOUR_TITLES: Final = {
    "step_time": "steps that compute on all cores",
    "step_time_waiting": "steps that wait, as for an accelerator",
}
NEIGHBOUR_HEADINGS: Final = (
    "copies at a neighbour",
    "step time with them ÷ without",
    "smallest",
    "largest",
    "n",
)
PEER: Final = "torch_checkpointing"
STOCK_RATIOS: Final = ("save_blocked", "save_committed", "first_save", "load", "load_bytes_same")
FREE_CORE_TITLES: Final = dict(itertools.islice(TRAINING_TITLES.items(), 2))
FREE_CORE_HEADINGS: Final = ("one rank, with a free core", *FREE_CORE_TITLES.values())
PEER_HEADINGS: Final = ("copy beside a step", TITLES["save_blocked"], *TRAINING_TITLES.values())


def bench(
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to write. Default: $HOLDFAST_ROOT, else /var/tmp.", metavar="DIR"),
    ] = None,
    megabytes: Annotated[
        int | None,
        typer.Option(min=1, help="The total state of all ranks, in MB. Default: 1250."),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(min=1, help="How often each measurement is repeated. Default: 7."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="The number of ranks that save together.")] = 2,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure less: by default 4 MB, and each pair once."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also write a plot, as SVG, PNG or PDF.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare saves and loads with this machine's limits. It takes about twelve minutes."""
    require_bench_package("the benchmark")
    if plot is not None:
        check_plot(plot)
    command = [sys.executable, "-m", "holdfast_bench.limits", "--ranks", str(ranks)]
    given = {"--megabytes": megabytes, "--pairs": pairs, "--directory": directory}
    for option, value in given.items():
        command += [] if value is None else [option, str(value)]
    command += ["--quick"] if quick else []
    found = _measure(command)
    if plot is not None:
        from holdfast_bench.limits.plot import draw

        draw(found, plot)
    answer(found, as_json, _render)


def _measure(command: list[str]) -> dict[str, Any]:
    """Run the benchmark and return its JSON. If it fails, exit with its exit status."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate()
    finally:
        # After an interrupt, the benchmark stops its processes and deletes its files.
        process.terminate()
        process.wait(END_S)
    if process.returncode != 0:
        raise typer.Exit(process.returncode if process.returncode in (1, 2) else 1)
    found: dict[str, Any] = json.loads(printed)
    return found


def _render(found: dict[str, Any]) -> None:
    facts = found["machine"] | found["versions"] | found["conditions"]
    print_facts({name.replace("_", " "): value for name, value in facts.items()})
    print_table(("ratio", "median", "smallest", "largest", "n", "target", ""), rows_of(found))
    print_table(("set-up", "median", "smallest", "largest", "n"), setup_rows_of(found))
    headings = ("stock DCP", *(TITLES[name] for name in STOCK_RATIOS))
    print_table(headings, stock_rows_of(found))
    print_table(PEER_HEADINGS, peer_rows_of(found))
    print_table(FREE_CORE_HEADINGS, free_core_rows_of(found))
    print_table(STAGING_HEADINGS, staging_rows_of(found))
    print_table(NEIGHBOUR_HEADINGS, neighbour_rows_of(found))


def rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row for each ratio: its spread, its target and whether it meets the target."""
    rows = []
    for name, value in found["ratios"].items():
        spread, target = found["spread"][name], found["targets"][name]
        result = "kept" if value <= target else "missed"
        numbers = (value, spread["min"], spread["max"])
        texts = (number_text(number) for number in numbers)
        rows.append((TITLES[name], *texts, str(spread["n"]), f"≤ {target:g}", result))
    return rows


def setup_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row, with its spread, for each measurement of the time before the first step."""
    return [
        (
            SETUP_TITLES[name],
            *(number_text(spread[key]) for key in ("median", "min", "max")),
            str(spread["n"]),
        )
        for name, spread in found["setup"].items()
    ]


def stock_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row for each mode of stock DCP, and one for its load."""
    return [
        (mode, *(number_text(figures.get(name)) for name in STOCK_RATIOS))
        for mode, figures in found["stock"].items()
        if mode != PEER
    ]


def peer_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return how far overlapped saves slow training: of Holdfast, and of torch_checkpointing."""
    ours = found["training"] | {"save_blocked": found["ratios"]["save_overlapped"]}
    peer = found["stock"][PEER]
    rows = {"Holdfast": ours, f"{PEER} {peer.get('version', '(not measured)')}": peer}
    names = ("save_blocked", *TRAINING_TITLES)
    return [(who, *(number_text(row.get(name)) for name in names)) for who, row in rows.items()]


def staging_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row for each staging mode."""
    return [
        (mode, *(number_text(figures[name]) for name in STAGING_TITLES))
        for mode, figures in found["staging"].items()
    ]


def free_core_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return how far overlapped saves slow a rank that leaves a core free, by who saves."""
    ours = found["free_core"]
    rows = {"Holdfast": ours, PEER: ours.get(PEER, {})}
    return [
        (who, *(number_text(row.get(name)) for name in FREE_CORE_TITLES))
        for who, row in rows.items()
    ]


def neighbour_rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return how copies at a neighbour change the time of a step, by kind of step."""
    return [
        (
            NEIGHBOUR_TITLES[name],
            *(number_text(spread[key]) for key in ("median", "min", "max")),
            str(spread["n"]),
        )
        for name, spread in found["neighbours"]["spread"].items()
    ]


def number_text(value: float | None) -> str:
    """Return a number with two decimals, or with three below 0.1."""
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
