"""Writes the index benchmark's page: each figure, its limit, and whether it is kept."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

import psutil

# Limits of the API in milliseconds at the 95th percentile, by the first part of a name.
LIMITS_MS: Final = {"runs": 50.0, "run": 50.0, "ancestry": 100.0}
INGEST_PER_S_MIN: Final = 5000
NAMES: Final = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
# The best of these counts.
WAYS_IN: Final = ("manifests/s, one process", "manifests/s, two processes", "manifests/s, reindex")
MISSED: Final = "missed"
BUSY: Final = (
    "Other programs used the processors during the measurement, so the wall-clock times are several"
    " times those of an idle machine. The CPU times are more reliable."
)
METHOD: Final = """\
## How it is measured

- Both databases are new and on the machine's disk. PostgreSQL runs on the same machine with its
  usual durability (`fsync` and `synchronous_commit` on, 256 MB of shared buffers). Only the rows of
  the large site are created without waiting for the disk.
- *API* is a request to the server's routes in this process, including the creation, compression and
  decompression of its JSON. The network is not included. A run's page requests the run, its
  checkpoints, its events and its curves. They are timed separately, and all four one after
  another. Runs are drawn at random from those with curves. *index* is the same query without the
  API.
- *computed* is the mean CPU time of an answer, in this process and in the database server. Other
  programs on the machine change it less than the wall-clock time. But they share cores and caches,
  so it can be up to twice its value on an idle machine. *manifests/s of computing* is the same for
  ingest.
- One run has a chain of 10,000 checkpoints. Each of the others has about a hundred. Every
  checkpoint has a file and two journal lines.
- *ingest* reads run folders of 500 manifests each into an empty database. *again* repeats it when
  nothing has changed. Each figure is the median of {repeats} runs.
- *reindex* rebuilds all rows with one process, in an empty database or over the existing rows.
  *raw read* reads the same files and does nothing else. For *cold*, the files were dropped from the
  page cache before (`posix_fadvise`). For *warm*, they were in memory.
"""


@dataclass(frozen=True)
class Took:
    """The wall-clock milliseconds of several answers, and the mean CPU milliseconds of one."""

    by_clock: list[float]
    computed: float

    def cuts(self) -> dict[str, float]:
        """Return the median, the 95th percentile and the CPU time."""
        parts = statistics.quantiles(self.by_clock, n=20, method="inclusive")
        cuts = {"p50": parts[9], "p95": parts[18], "cpu": self.computed}
        return {name: round(value, 2) for name, value in cuts.items()}


def computed_s() -> float:
    """Return the CPU seconds of this process and its children, such as a database server."""
    here = psutil.Process()
    times = [one.cpu_times() for one in (here, *here.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def render(result: dict[str, Any]) -> str:
    """Return the figures of both databases as a page."""
    parts = [
        "# The index at a million checkpoints",
        f"Measured on {result['measured_at']} by `{result['command']}`: {result['machine']}.",
    ]
    for kind in NAMES:
        if kind in result:
            parts += _database(kind, result[kind])
    return "\n\n".join([*parts, METHOD.format(repeats=result["repeats"])])


def _database(kind: str, figures: dict[str, Any]) -> list[str]:
    rows, loads = figures["rows"], figures["load"]
    size = f"{rows['checkpoints']:,} checkpoints in {rows['runs']:,} runs"
    answers = [
        _answer(where, name, took)
        for where, key in (("API", "api_ms"), ("index", "pages_ms"))
        for name, took in figures[key].items()
    ]
    ingest = _ingest(kind, figures["ingest"])
    missed = [row[0] for row in (*answers, *ingest) if MISSED in row]
    verdict = f"Missed: {'; '.join(missed)}." if missed else "Every limit is kept."
    if max(loads.values()) > 1.5 * figures["cores"]:
        verdict = f"{BUSY} {verdict}"
    beside = ", ".join(f"{load} before {stage}" for stage, load in loads.items())
    return [
        f"## {NAMES[kind]}",
        f"{figures['version']}; {size}, made in {figures['fill_s']:.0f} s.",
        f"Load average of the machine, which has {figures['cores']} cores: {beside}. {verdict}",
        _table(("answer", "median ms", "p95 ms", "limit", "", "computed ms"), answers),
        _table(("ingest from disk", "", "limit", ""), ingest),
    ]


def _answer(where: str, name: str, took: dict[str, float]) -> tuple[str, ...]:
    limit = LIMITS_MS.get(name.split(",")[0]) if where == "API" else None
    verdict = "" if limit is None else "kept" if took["p95"] <= limit else MISSED
    shown = f"{limit:.0f}" if limit else ""
    times = (f"{took['p50']:.1f}", f"{took['p95']:.1f}")
    return (f"{where}: {name}", *times, shown, verdict, f"{took['cpu']:.1f}")


def _ingest(kind: str, figures: dict[str, float]) -> list[tuple[str, ...]]:
    rows = []
    best = max(WAYS_IN, key=lambda name: figures[name])
    for name, value in figures.items():
        limit = verdict = ""
        if kind == "postgresql" and name == best:
            limit = f"≥ {INGEST_PER_S_MIN:,}"
            verdict = "kept" if value >= INGEST_PER_S_MIN else MISSED
        rows.append((name, f"{value:,}", limit, verdict))
    return rows


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
