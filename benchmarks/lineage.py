"""The index with a million checkpoints in ten thousand runs: pages, ancestry, ingest, reindex.

Run `python benchmarks/lineage.py [--database sqlite|postgresql] [--page FILE]`. It creates the rows
of a large site inside the database, times the queries of the web pages, and then ingests run
folders that it writes to disk. PostgreSQL is a temporary server of this program, with its usual
durability. The program prints JSON at the end, and each stage's JSON to standard error. `--page`
also writes the result into its section of `docs/measurements.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.lineage_api import took_ms
from benchmarks.lineage_fill import CHAIN, RUNS_WITH_METRICS, T0, checkpoint_name, fill, run_uid
from benchmarks.lineage_folders import make_folders
from benchmarks.lineage_report import Took, computed_s, write_section
from tests.support.postgres import postgres_server

from holdfast.cli.shared.collector import return_free_memory
from holdfast.contracts.disk.paths import RunPaths, list_runs
from holdfast.contracts.states import RunState
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import cursors, pages, run_queries
from holdfast.lineage.queries.comparison import compare
from holdfast.lineage.queries.totals import list_nodes, metric_series

SAMPLES: Final = 100
SAMPLES_LARGE: Final = 20
REPEATS: Final = 3
MANIFESTS: Final = 500
PROCESSES: Final = 2
SERVER: Final = {
    "fsync": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "work_mem": "16MB",
}
SEED: Final = 7
PACKAGES: Final = ("sqlalchemy", "psycopg", "fastapi", "pydantic")


def main() -> None:
    """Measure both databases, or the one given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"))
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=20, help="number of run folders to ingest")
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "measured_at": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"python benchmarks/lineage.py {shlex.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "repeats": REPEATS,
    }
    for kind in ("sqlite", "postgresql"):
        if chosen.database in (None, kind):
            with database_url(kind) as url:
                result[kind] = measure(url, chosen.runs, chosen.checkpoints, chosen.folders)
    print(json.dumps(result, indent=1))
    if chosen.page:
        write_section(chosen.page, result)


@contextlib.contextmanager
def database_url(kind: str) -> Iterator[str]:
    """Create an empty database with its schema in a temporary folder, and yield its URL."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            url = f"sqlite:///{folder}/index.db"
            upgrade(url)
            yield url
        return
    with postgres_server(SERVER) as server, server.database() as url:
        upgrade(url)
        yield url


def measure(url: str, runs: int, checkpoints: int, folders: int) -> dict[str, Any]:
    """Measure ingest first, while the database is empty, then the pages of the large one."""
    figures: dict[str, Any] = {
        "cores": os.cpu_count(),
        "rows": {"runs": runs, "checkpoints": checkpoints},
        "load": {},
    }
    return_free_memory()
    with open_database(url) as database:
        figures["version"] = version_of(database)
        stages: dict[str, Callable[[], Any]] = {
            "ingest": lambda: measure_ingest(database, url, folders),
            "fill_s": lambda: round(stopwatch(lambda: fill(database, runs, checkpoints)), 1),
            "pages_ms": lambda: measure_pages(database, runs),
            "api_ms": lambda: measure_api(url, runs),
        }
        for name, stage in stages.items():
            figures["load"][name.partition("_")[0]] = round(os.getloadavg()[0], 1)
            figures[name] = stage()
            # If the program is interrupted, the finished stages have been printed.
            print(json.dumps({name: figures[name]}), file=sys.stderr, flush=True)
    return figures


def machine() -> str:
    """Describe the machine of the measurement."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    kernel = platform.release().partition("-")[0]
    return (
        f"{os.cpu_count()} cores ({processor}), {memory:.0f} GiB, Linux {kernel}; "
        f"Python {platform.python_version()}, {versions}"
    )


def version_of(database: Database) -> str:
    """Return the database's own version."""
    if not database.is_postgresql:
        return f"SQLite {sqlite3.sqlite_version}"
    with database.reading() as connection:
        shown = connection.exec_driver_sql("SHOW server_version").scalar()
    return f"PostgreSQL {str(shown).split()[0]}"


def measure_pages(database: Database, runs: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each page's queries, over random runs and places."""
    draw = random.Random(SEED)
    uids = [run_uid(draw.randrange(1, runs)) for _ in range(SAMPLES)]
    large, newest = run_uid(0), checkpoint_name(CHAIN - 1)
    order = replace(pages.RUN_ORDERS["created"], name="created desc")
    places = [
        cursors.write_cursor(order, {"created_at": 1.6e9 + draw.randrange(runs), "uid": uid})
        for uid in uids
    ]
    listing: dict[str, Callable[[int], object]] = {
        "runs": lambda i: pages.list_runs(database),
        "runs, a later page": lambda i: pages.list_runs(database, after=places[i]),
        "runs, by state": lambda i: pages.list_runs(
            database, pages.RunFilter(states=(RunState.RUNNING,)), after=places[i]
        ),
        "runs, by a text in the name": lambda i: pages.list_runs(
            database, pages.RunFilter(search=f"-{i * 97:06d}")
        ),
        "runs, last changed first": lambda i: pages.list_runs(database, sort="updated"),
        "run": lambda i: run_page(database, uids[i]),
        "run of 10,000 checkpoints": lambda i: run_page(database, large),
        "storage": lambda i: pages.list_storage(database, after=places[i]),
        "nodes": lambda i: list_nodes(database),
    }
    heavy: dict[str, Callable[[int], object]] = {
        "ancestry, 10,000 deep": lambda i: run_queries.ancestry(database, f"{large}:{newest}"),
        "comparison over 10,000 ancestors": lambda i: compare(
            database, f"{large}:{newest}", f"{large}:{checkpoint_name(CHAIN - 2)}"
        ),
        "graph of 10,000 checkpoints": lambda i: run_queries.lineage_graph(database, large),
    }
    return {
        **{name: timed(ask, SAMPLES) for name, ask in listing.items()},
        **{name: timed(ask, SAMPLES_LARGE) for name, ask in heavy.items()},
    }


def measure_api(url: str, runs: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the server's routes, like `measure_pages`."""
    draw = random.Random(SEED)
    uids = [run_uid(draw.randrange(1, min(runs, RUNS_WITH_METRICS))) for _ in range(SAMPLES)]
    newest = f"{run_uid(0)}:{checkpoint_name(CHAIN - 1)}"
    order = replace(pages.RUN_ORDERS["created"], name="created desc")
    places = [
        cursors.write_cursor(order, {"created_at": T0 + draw.randrange(runs), "uid": uid})
        for uid in uids
    ]
    parts = {"": "", ", checkpoints": "/checkpoints", ", events": "/events", ", curves": "/metrics"}
    asks = {
        "runs": [["/runs"]] * SAMPLES,
        "runs, a later page": [[f"/runs?after={place}"] for place in places],
        "runs, last changed first": [["/runs?sort=updated"]] * SAMPLES,
        "runs, by state": [["/runs?state=running"]] * SAMPLES,
        "runs, by a text in the name": [[f"/runs?search=-{i * 97:06d}"] for i in range(SAMPLES)],
        **{f"run{name}": [[f"/runs/{uid}{part}"] for uid in uids] for name, part in parts.items()},
        "run, all four": [[f"/runs/{uid}{part}" for part in parts.values()] for uid in uids],
        "run, of 10,000 checkpoints": [[f"/runs/{run_uid(0)}"]] * SAMPLES_LARGE,
        "ancestry, 10,000 deep": [[f"/checkpoints/{newest}/ancestry"]] * SAMPLES_LARGE,
    }
    return {name: took.cuts() for name, took in took_ms(url, asks).items()}


def run_page(database: Database, uid: str) -> None:
    """Run all queries that the page of one run makes when it opens."""
    run_queries.show_run(database, uid)
    pages.list_checkpoints(database, uid)
    pages.list_events(database, uid)
    metric_series(database, uid)


def timed(ask: Callable[[int], object], samples: int) -> dict[str, float]:
    """Return median and 95th percentile in milliseconds, after one call that does not count."""
    ask(0)
    by_clock, before_s = [], computed_s()
    for index in range(samples):
        by_clock.append(1000 * stopwatch(partial(ask, index)))
    return Took(by_clock, 1000 * (computed_s() - before_s) / samples).cuts()


def measure_ingest(database: Database, url: str, count: int) -> dict[str, float]:
    """Measure manifests per second from disk with one and two processes, and reindex and a read."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        root = Path(folder)
        make_folders(root, count, MANIFESTS)
        os.sync()
        folders = [str(paths.directory) for paths in list_runs(root)]
        halves = [folders[index::PROCESSES] for index in range(PROCESSES)]

        def rate(act: Callable[[], object], before: Callable[[], object]) -> int:
            return round(count * MANIFESTS / seconds(act, before))

        def empty() -> None:
            clear(database)

        def empty_and_drop_caches() -> None:
            clear(database)
            drop_caches(root)

        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            list(pool.map(ingest_all, [url] * PROCESSES, [[]] * PROCESSES))
            rates = {
                "manifests": float(count * MANIFESTS),
                "manifests/s, one process": rate(lambda: ingest_all(url, folders), empty),
                "manifests/s of computing": round(
                    count * MANIFESTS / computing(lambda: ingest_all(url, folders), empty)
                ),
                "manifests/s, one process, again": rate(
                    lambda: ingest_all(url, folders), lambda: None
                ),
                "manifests/s, two processes": rate(
                    lambda: list(pool.map(ingest_all, [url] * PROCESSES, halves)), empty
                ),
            }
        rates |= {
            "manifests/s, reindex": rate(lambda: reindex(database, root), empty),
            "reindex over the same rows, s": seconds(lambda: reindex(database, root), lambda: None),
            "reindex, cold, s": seconds(lambda: reindex(database, root), empty_and_drop_caches),
            "raw read, cold, s": seconds(lambda: read_all(root), lambda: drop_caches(root)),
            "raw read, warm, s": seconds(lambda: read_all(root), lambda: None),
        }
        empty()
    return {name: round(value, 2) if value < 100 else round(value) for name, value in rates.items()}


def seconds(act: Callable[[], object], before: Callable[[], object]) -> float:
    """Return the median seconds of several runs of `act`, each after `before`."""
    took = []
    for _ in range(REPEATS):
        before()
        took.append(stopwatch(act))
    return statistics.median(took)


def computing(act: Callable[[], object], before: Callable[[], object]) -> float:
    """Return the CPU seconds of `act`, in this process and in the database server."""
    before()
    began_s = computed_s()
    act()
    return computed_s() - began_s


def clear(database: Database) -> None:
    """Empty the index."""
    statement = "TRUNCATE runs CASCADE" if database.is_postgresql else "DELETE FROM runs"
    with database.writing() as connection:
        connection.exec_driver_sql(statement)


def drop_caches(root: Path) -> None:
    """Drop the contents of every file under `root` from the page cache."""
    for place, _, names in os.walk(root):
        for name in names:
            handle = os.open(f"{place}/{name}", os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def stopwatch(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def ingest_all(url: str, folders: list[str]) -> None:
    """Ingest runs one after another, as a flow or a server does."""
    return_free_memory()
    with open_database(url) as database:
        for folder in folders:
            ingest_run(database, RunPaths(Path(folder)))


def read_all(root: Path) -> int:
    """Read every file under `root`, do nothing else, and return the bytes."""
    return sum(
        len((Path(place) / name).read_bytes())
        for place, _, names in os.walk(root)
        for name in names
    )


if __name__ == "__main__":
    main()
