"""Writes docs/benchmarks.md and its plot from the output of `holdfast bench --json`.

    .venv/bin/holdfast bench --json >bench.json
    .venv/bin/python benchmarks/report.py bench.json

Run the benchmark on a quiet machine. Figures measured beside other work are meaningless.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from holdfast.cli.bench import (
    FREE_CORE_HEADINGS,
    NEIGHBOUR_HEADINGS,
    PEER_HEADINGS,
    STAGING_HEADINGS,
    STOCK_RATIOS,
    TITLES,
    free_core_rows_of,
    neighbour_rows_of,
    peer_rows_of,
    rows_of,
    setup_rows_of,
    staging_rows_of,
    stock_rows_of,
)
from holdfast_bench.limits.plot import draw

CHECKOUT = Path(__file__).resolve().parents[1]
METHOD = """\
`holdfast bench` prints ratios, because absolute times depend more on the disk than on the program.
One pair consists of:

- a raw write: as many files of the same sizes as a checkpoint has, in large writes with one fsync
  each, on both ranks at the same time;
- a save through `Session`, with a memcpy of the state before and after it (torch's `copy_` and
  libc's, into an existing memory file; the mean of the faster one counts);
- a save by stock DCP in each of its three modes with its defaults;
- a raw cold read, and a load by Holdfast and by stock DCP.

Before each read, `posix_fadvise(DONTNEED)` drops the pages of every file, and `mincore` checks that
they are gone. Before each operation that needs memory, as many pages are touched and freed, because
a virtual machine may first have to get them from its host. The order changes from pair to pair, so
each operation follows each other one equally often. Ratios are computed pair by pair. The slowest
rank counts.

- The raw write and the raw read go through the page cache, as in any program. Holdfast bypasses it
  on a file system of this machine, so a ratio may be below 1.
- *committed* is the moment when the manifest and its name are durable.
- *first save* and *signal* are measured in fresh programs, after ten seconds of steps. The first
  save is divided by the median of three later ones, blocked or committed, whichever ratio is worse.
  Then every rank gets SIGTERM in the middle of a step. The time until the final checkpoint is
  committed is divided by the rest of that step, a copy and a raw write in the same program.
- *session creation* starts the flusher and plans the saves. The memory of the slots, two images of
  the state, is allocated during the first steps. These steps only sleep here, because CPUs are idle
  while an accelerator works. An earlier save waits for the pages that it touches.
- *copy beside a step*: two steps with a copy each, twice as long as a memcpy. One waits, as for an
  accelerator; *blocked* is the time of the save and of the wait before the update. In the other,
  each rank computes with its threads, and then until the checkpoint is written. With
  `checkpoint.write_limit`, that is at a quarter of the speed before. Three saves come first and
  do not count, because the first copy into a slot touches new pages. torch_checkpointing gets
  the same steps. Its class for resharding needs CUDA, so it saves without; its direct writes
  fail on ext4, so they are off; it does not call `fsync`.
- *staging*: in each pair a raw write, and for each mode a separate session with three saves. The
  second is timed. During the third, each rank computes. The images of `disk` are on the same disk.
- *one rank, with a free core* is the same for one rank with one thread and half of the state.
- *neighbours*: jobs of two nodes on this machine, with a snapshot in every second step of 60. All
  bytes of 128 MB change in each step. Copies go over loopback, and share the cores with the ranks.
  The steps of one pair compute all the time. Those of the other wait for 0.2 s, as for an
  accelerator, and then update their parameters.
- *bytes read* is the kernel's count of what read calls returned, for all ranks, ÷ the bytes of the
  state. *resharded* is the worse of two loads: a checkpoint of 2 ranks on 1 rank, and the reverse.
- *commit tail* is the time from the last data fsync until committed ÷ (three small files created
  and fsynced here + 10 ms).
- *memory* is that of all ranks, the flusher and the staging slots, after ten saves and after a
  hundred more of a state of 64 MB.
"""
# The page has the seconds of these; the output of the benchmark has those of all operations.
SECONDS = re.compile(r"pairs\.(?!first)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answer", type=Path, help="output of `holdfast bench --json`")
    parser.add_argument("--docs", type=Path, default=CHECKOUT / "docs", help="output folder")
    options = parser.parse_args()
    found = json.loads(options.answer.read_text())
    measured_on = time.strftime("%Y-%m-%d", time.gmtime(options.answer.stat().st_mtime))
    draw(found, options.docs / "benchmarks.svg")
    (options.docs / "benchmarks.md").write_text(page(found, measured_on))


def page(found: dict[str, Any], measured_on: str) -> str:
    """Return the page: conditions, ratios with targets, stock DCP, seconds, and the method."""
    headings = ("ratio", "median", "smallest", "largest", "n", "target", "")
    stock_headings = ("stock DCP", *(TITLES[name] for name in STOCK_RATIOS))
    seconds = [
        (f"`{name}`", *(f"{values[key]:.4f}" for key in ("median", "min", "max")), str(values["n"]))
        for name, values in found["seconds"].items()
        if SECONDS.match(name)
    ]
    parts = [
        "# Benchmarks",
        conditions(found, measured_on),
        table(headings, rows_of(found)),
        "![Ratios of Holdfast and stock DCP, with the targets](benchmarks.svg)",
        "Before the first step:",
        table(("set-up", "median", "smallest", "largest", "n"), setup_rows_of(found)),
        "Stock DCP on the same machine, in the same pairs:",
        table(stock_headings, stock_rows_of(found)),
        "Saves whose copies continue during the next step, on the CPU:",
        table(PEER_HEADINGS, peer_rows_of(found)),
        table(FREE_CORE_HEADINGS, free_core_rows_of(found)),
        "Saves by `checkpoint.staging`, and steps with `checkpoint.neighbour`:",
        table(STAGING_HEADINGS, staging_rows_of(found)),
        table(NEIGHBOUR_HEADINGS, neighbour_rows_of(found)),
        "## How it is measured",
        METHOD.strip(),
        "## Seconds",
        "The times of the pairs, on this machine. `--json` has those of all operations.",
        table(("operation", "median", "smallest", "largest", "n"), seconds),
    ]
    return "\n\n".join(parts) + "\n"


def conditions(found: dict[str, Any], measured_on: str) -> str:
    """Return machine, versions and command as sentences."""
    machine, versions, given = found["machine"], found["versions"], found["conditions"]
    return (
        f"Measured on {measured_on} by `make bench` in {given['seconds_in_all']:.0f} s: "
        f"{machine['cores']} cores ({machine['processor'] or machine['architecture']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['file_system']}, Linux "
        f"{machine['kernel']}; Python {versions['python']}, torch {versions['torch']}, Holdfast "
        f"{versions['holdfast']}. {given['ranks']} ranks under torchrun, FSDP2 and AdamW, "
        f"{given['state_bytes'] / 1e6:.0f} MB of state in {given['checkpoint_files']} files; of "
        f"the pages to read cold, {given['resident_after_drop']:.1%} were still in memory."
    )


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    head, *body = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join([head, "|---" * len(headings) + "|", *body])


if __name__ == "__main__":
    main()
