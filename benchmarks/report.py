"""Writes docs/benchmarks.md and the plot beside it from what `holdfast bench --json` printed.

    .venv/bin/holdfast bench --json >bench.json
    .venv/bin/python benchmarks/report.py bench.json

On a quiet machine: figures measured beside other work say nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from holdfast.cli.bench import STOCK_RATIOS, TITLES, rows_of, setup_rows_of, stock_rows_of
from holdfast.cli.bench_plot import draw

CHECKOUT = Path(__file__).resolve().parents[1]
METHOD = """\
`holdfast bench` measures everything in one run and prints ratios, because absolute times say more
about the disk than about the program. One pair is: a raw write (as many files of the same sizes
as a checkpoint has, in large writes with one fsync each, both ranks at once), a save through
`Session` with a memcpy of the state right before it and one right after it (torch's `copy_` and
libc's, into a memory file that is there already; the mean of the faster), a save by stock DCP in
each of its three modes with its own defaults, a raw cold read, and a load by both. Before each
read the pages of every file are let go by `posix_fadvise(DONTNEED)`, and `mincore` says whether
they went. Before each act that takes pages of memory as many are touched and let go, because a
virtual machine's free pages may first have to come back from its host. The order changes from pair
to pair, so that each act comes after each other one equally often: a write right after a long one
meets a slower disk. Ratios are taken pair by pair; the table has their median, smallest, largest.
The slowest rank counts.

- The raw write and the raw read go through the page cache, as those of any program do. Holdfast's
  go past it where the file system is this machine's own, so that a ratio may be below 1.
- *committed* is the moment when the manifest and its name are durable.
- *first save* and *signal* are measured in programs started afresh, once for each pair: the first
  save, after ten seconds of steps, ÷ the median of three that follow, blocked or committed,
  whichever is worse, each of them between two plain copies of the tensors; then SIGTERM to every
  rank in the middle of a step, and the time until the final checkpoint is committed ÷ (the rest
  of that step + a copy + a raw write, measured in the same program).
- Before the first step `Session` starts its flusher and plans the saves: *session creation*.
  The memory of its slots, two images of the state, comes beside the first steps, which only
  sleep here, as the processors do while an accelerator works. A save that is wanted sooner waits
  for the pages that it touches.
- *bytes read* are the kernel's count of what read calls returned, all ranks together, ÷ the bytes
  of the state, each counted once. Resharded: what 2 ranks saved on 1, and the other way round;
  the worse.
- *commit tail* is the time from the last data fsync until committed ÷ (three small files created
  and fsynced here + 10 ms).
- *memory* is that of all ranks, the flusher and the staging slots, after ten saves and after a
  hundred more of a state of 64 MB.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answer", type=Path, help="what `holdfast bench --json` printed")
    parser.add_argument("--docs", type=Path, default=CHECKOUT / "docs", help="where to write")
    options = parser.parse_args()
    found = json.loads(options.answer.read_text())
    measured_on = time.strftime("%Y-%m-%d", time.gmtime(options.answer.stat().st_mtime))
    draw(found, options.docs / "benchmarks.svg")
    (options.docs / "benchmarks.md").write_text(page(found, measured_on))


def page(found: dict[str, Any], measured_on: str) -> str:
    """The page: conditions, ratios with their targets, stock DCP, seconds, and the method."""
    headings = ("ratio", "median", "smallest", "largest", "n", "target", "")
    stock_headings = ("stock DCP", *(TITLES[name] for name in STOCK_RATIOS))
    seconds = [
        (f"`{name}`", *(f"{values[key]:.4f}" for key in ("median", "min", "max")), str(values["n"]))
        for name, values in found["seconds"].items()
    ]
    parts = [
        "# Benchmarks",
        conditions(found, measured_on),
        table(headings, rows_of(found)),
        "![Ratios of Holdfast and stock DCP, with the targets](benchmarks.svg)",
        "Done before the first step:",
        table(("set-up", "median", "smallest", "largest", "n"), setup_rows_of(found)),
        "Stock DCP on the same machine, in the same pairs:",
        table(stock_headings, stock_rows_of(found)),
        "## How it is measured",
        METHOD.strip(),
        "## Seconds",
        "What the ratios were taken of, on this machine:",
        table(("act", "median", "smallest", "largest", "n"), seconds),
    ]
    return "\n\n".join(parts) + "\n"


def conditions(found: dict[str, Any], measured_on: str) -> str:
    """Machine, versions and command, as a sentence each."""
    machine, versions, given = found["machine"], found["versions"], found["conditions"]
    return (
        f"Measured on {measured_on} by `make bench` in {given['seconds_in_all']:.0f} s: "
        f"{machine['cores']} cores ({machine['processor'] or machine['architecture']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['file_system']}, Linux "
        f"{machine['kernel']}; Python {versions['python']}, torch {versions['torch']}, Holdfast "
        f"{versions['holdfast']}. {given['ranks']} ranks under torchrun, FSDP2 and AdamW, "
        f"{given['state_bytes'] / 1e6:.0f} MB of state in {given['checkpoint_files']} files; of "
        f"the pages to be read cold, {given['resident_after_drop']:.1%} had stayed in memory."
    )


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
