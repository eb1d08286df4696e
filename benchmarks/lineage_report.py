"""The index benchmark's figures as a page: each beside its limit, and whether it is kept."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

import psutil

# What must hold at the API, milliseconds at the 95th percentile, by how a name begins.
LIMITS_MS: Final = {"runs": 50.0, "run": 50.0, "ancestry": 100.0}
INGEST_PER_S_MIN: Final = 5000
NAMES: Final = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
# The best of these counts.
WAYS_IN: Final = ("manifests/s, one process", "manifests/s, two processes", "manifests/s, reindex")
MISSED: Final = "missed"
BUSY: Final = (
    "Other programs had the processors meanwhile, so the times by the clock are several times "
    "those of a machine to itself; what was computed says more."
)
METHOD: Final = """\
## How it is measured

- Both databases are new, on the machine's disk. PostgreSQL runs beside the program, with its usual
  durability (`fsync` and `synchronous_commit` on, 256 MB of shared buffers); only the rows of the
  large site are made without waiting for the disk.
- *API* is a request to the server's routes in this process, its JSON made, compressed, unpacked;
  the network is left out. A run's page asks for the run, its checkpoints, its events and its
  curves: timed one by one, and all four after each other. Runs are drawn at random among those
  that have curves. *index* is the same question asked of the index alone.
- *computed* is the mean of the processor time that an answer takes, in this process and in the
  database's server. What other programs on the machine do changes it less than the time by the
  clock, but they share cores and caches: beside them it is up to twice what it is alone.
  *manifests/s of computing* is the same of ingest.
- One run has a chain of 10,000 checkpoints, each of the others about a hundred; every checkpoint
  has a file and two journal lines.
- *ingest* reads run folders of 500 manifests each into an empty database; *again* is the same when
  nothing has changed. Each figure is the median of {repeats} runs.
- *reindex* builds all rows again, by one process, into an empty database or over what is there.
  *raw read* reads the same files and does nothing with them; *cold* means that their contents were
  let go before (`posix_fadvise`), *warm* that they were in memory.
"""


@dataclass(frozen=True)
class Took:
    """Milliseconds of some answers by the clock, and what one took of processors on average."""

    by_clock: list[float]
    computed: float

    def cuts(self) -> dict[str, float]:
        """Median, 95th percentile, and what was computed."""
        parts = statistics.quantiles(self.by_clock, n=20, method="inclusive")
        cuts = {"p50": parts[9], "p95": parts[18], "cpu": self.computed}
        return {name: round(value, 2) for name, value in cuts.items()}


def computed_s() -> float:
    """Seconds that this process and those it started, a server among them, have computed."""
    here = psutil.Process()
    times = [one.cpu_times() for one in (here, *here.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def render(told: dict[str, Any]) -> str:
    """The figures of both databases as a page."""
    parts = [
        "# The index at a million checkpoints",
        f"Measured on {told['measured_at']} by `{told['command']}`: {told['machine']}.",
    ]
    for kind in NAMES:
        if kind in told:
            parts += _database(kind, told[kind])
    return "\n\n".join([*parts, METHOD.format(repeats=told["repeats"])])


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
