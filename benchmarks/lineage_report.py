"""Writes the index benchmark's section of a page: each figure, its limit, and what missed it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
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
- Each time is a median, with the 95th percentile in brackets. *API* is a request to the server's
  routes in this process, with the creation and compression of its JSON, without a network. A run's
  page requests the run, its checkpoints, its events and its curves, timed separately and one after
  another. *index* is a query without the API.
- Both databases are new and on the machine's disk. PostgreSQL runs on the same machine with its
  usual durability (`fsync` and `synchronous_commit` on, 256 MB of shared buffers).
- One run has a chain of 10,000 checkpoints, each of the others about a hundred. Every checkpoint
  has a file and two journal lines.
- *ingest* reads run folders of 500 manifests each into an empty database. *reindex* rebuilds all
  rows with one process, in an empty database or over the existing rows. *raw read* reads the same
  files and does nothing else. For *cold*, the files were dropped from the page cache before. Each
  figure is the median of {repeats} runs.
"""
# The page has these queries only as requests of the API.
ONLY_BY_API: Final = ("runs", "run", "ancestry")
# Only the JSON has these figures.
LEFT_OUT: Final = (
    *("runs, a later page", "runs, last changed first", "manifests", "manifests/s of computing"),
    *("raw read, warm, s", "manifests/s, one process, again"),
)
BEGIN: Final = "<!-- begin of the index -->"
END: Final = "<!-- end of the index -->"


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


def write_section(page: Path, result: dict[str, Any]) -> None:
    """Write the figures between the markers of `page`."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{render(result)}\n{END}{after}")


def render(result: dict[str, Any]) -> str:
    """Return the figures of both databases as a section of a page."""
    kinds = [kind for kind in NAMES if kind in result]
    first = result[kinds[0]]
    rows, answers, ingest = first["rows"], _answers(result, kinds), _ingest(result, kinds)
    missed = [f"{row[0]} ({names})" for row in (*answers, *ingest) if (names := _missed(row))]
    verdict = f"Missed: {'; '.join(missed)}." if missed else "Every limit is kept."
    busiest = max(max(result[kind]["load"].values()) for kind in kinds)
    if busiest > 1.5 * first["cores"]:
        verdict = f"{BUSY} {verdict}"
    databases = ", ".join(
        f"{result[kind]['version']} (made in {result[kind]['fill_s']:.0f} s)" for kind in kinds
    )
    headings = tuple(NAMES[kind] for kind in kinds)
    measured = (
        f"Measured on {result['measured_at']} by `{result['command']}`: {result['machine']}. "
        f"{rows['checkpoints']:,} checkpoints in {rows['runs']:,} runs; {databases}. The load "
        f"average was at most {busiest} on {first['cores']} cores. {verdict}"
    )
    parts = [
        measured,
        _table(("answer", *(f"{name}, ms" for name in headings), "limit of the p95"), answers),
        _table(("ingest from disk", *headings, "limit"), ingest),
        METHOD.format(repeats=result["repeats"]),
    ]
    return "\n\n".join(parts)


def _answers(result: dict[str, Any], kinds: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for where, key in (("API", "api_ms"), ("index", "pages_ms")):
        for name in result[kinds[0]][key]:
            group = name.split(",")[0].split(" of ")[0]
            if name in LEFT_OUT or (where == "index" and group in ONLY_BY_API):
                continue
            limit = LIMITS_MS.get(group) if where == "API" else None
            times = [result[kind][key][name] for kind in kinds]
            cells = [_time(took, limit) for took in times]
            rows.append((f"{where}: {name}", *cells, f"{limit:.0f}" if limit else ""))
    return rows


def _time(took: dict[str, float], limit: float | None) -> str:
    mark = f", {MISSED}" if limit and took["p95"] > limit else ""
    return f"{took['p50']:.1f} ({took['p95']:.1f}){mark}"


def _ingest(result: dict[str, Any], kinds: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for name in result[kinds[0]]["ingest"]:
        if name in LEFT_OUT:
            continue
        values = {kind: result[kind]["ingest"][name] for kind in kinds}
        limit = mark = ""
        server = result.get("postgresql")
        if server and name == max(WAYS_IN, key=lambda way: float(server["ingest"][way])):
            limit = f"≥ {INGEST_PER_S_MIN:,} on PostgreSQL"
            mark = "" if values["postgresql"] >= INGEST_PER_S_MIN else f", {MISSED}"
        cells = [f"{values[k]:,}{mark if k == 'postgresql' else ''}" for k in kinds]
        rows.append((name, *cells, limit))
    return rows


def _missed(row: tuple[str, ...]) -> str:
    """The databases that missed the limit of this row."""
    return ", ".join(
        name for name, cell in zip(NAMES.values(), row[1:], strict=False) if MISSED in cell
    )


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join([head, "|---" * len(headings) + "|", *body])
