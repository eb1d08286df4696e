"""The plot of a benchmark: Holdfast, stock DCP and the targets, as ratios on one axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

# The rows of the plot, from the top. Stock DCP has no counterpart of the last two.
ROWS: Final = {
    "save_blocked": "training blocked\n÷ memcpy",
    "save_committed": "save until committed\n÷ raw write",
    "first_save": "first save\n÷ steady save",
    "load": "load\n÷ raw cold read",
    "signal_to_commit": "signal until committed\n÷ (step + copy + write)",
    "commit_tail": "commit tail\n÷ (3 creates + 10 ms)",
}
STOCK: Final = {"sync": "#8a8f98", "thread": "#c98a2b", "process": "#a04a8f", "load": "#8a8f98"}
OURS: Final = "#1f6f8b"
TARGET: Final = "#b23a48"
SIZE_INCHES: Final = (8.0, 5.0)


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the plot of a benchmark's result to `path`, in the format of its suffix."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Keep text as text, and make the file reproducible.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        for place, name in enumerate(ROWS):
            _draw_row(axes, place, name, found)
        axes.set_yticks(range(len(ROWS)), list(ROWS.values()))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.grid(axis="x", which="both", alpha=0.25)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(
            "ratio to this machine's own limit, measured in the same run (lower is better)"
        )
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(
            once.values(), once.keys(), loc="outside upper center", ncols=5, frameon=False
        )
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def _draw_row(axes: Any, place: int, name: str, found: dict[str, Any]) -> None:
    """Draw one ratio: the median with its spread, the target, and stock DCP's medians below."""
    value, spread = found["ratios"][name], found["spread"][name]
    errors = [[max(0.0, value - spread["min"])], [max(0.0, spread["max"] - value)]]
    axes.errorbar(
        *([value], [place - 0.12]), xerr=errors, fmt="o", color=OURS, capsize=3, label="Holdfast"
    )
    target = found["targets"][name]
    axes.plot([target], [place - 0.12], "|", color=TARGET, markersize=18, label="target")
    for mode, color in STOCK.items():
        stock = found["stock"][mode].get(name)
        if stock is not None:
            label = "stock DCP sync" if mode == "load" else f"stock DCP {mode}"
            axes.plot([stock], [place + 0.18], "D", color=color, markersize=5, label=label)
