"""Fills the database with the rows of a large site, with one SQL statement per table.

The same SQL works on SQLite and PostgreSQL. Run 0 has a chain of `CHAIN` checkpoints. The other
runs share the rest evenly. Every checkpoint has one file and two journal lines. The statements
create consistent rows, so foreign keys are not checked: that would be four million look-ups.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import Connection, text

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.lineage.database.schema_changes import connect_for_migration
from holdfast.lineage.database.transactions import Database

CHAIN: Final = 10_000
T0: Final = 1_600_000_000.0
STEP: Final = 100
BUCKETS: Final = 256
RUNS_WITH_METRICS: Final = 1000


def run_uid(number: int) -> str:
    """Return the identity of a run by its number."""
    return f"{number:032d}"


def checkpoint_name(number: int) -> str:
    """Return the name of a run's checkpoint by its number, from 0."""
    return f"step-{(number + 1) * STEP:08d}.a0001.l01"


def fill(database: Database, runs: int, checkpoints: int) -> None:
    """Insert `runs` runs with `checkpoints` checkpoints in total, and update the statistics."""
    each = max(1, (checkpoints - CHAIN) // max(1, runs - 1))
    spec = RunSpec(name="bench", command=("train.py", "--config", "large.toml"))
    values = {
        "runs": runs,
        "each": each,
        # `json.dumps` puts a space after each colon. Without it, SQL would read a parameter.
        "spec": json.dumps(spec.model_dump(mode="json")).replace("'", "''"),
        "json": "jsonb" if database.is_postgresql else "text",
        # Each digest differs, so that an answer with ten thousand of them does not compress well.
        "digest": "md5(r.uid || n.i) || md5(n.i || r.uid)"
        if database.is_postgresql
        else "lower(hex(randomblob(32)))",
    }
    for statement in STATEMENTS:
        began = time.perf_counter()
        with _unchecked(database) as connection:
            made = connection.execute(text(expand(statement, values))).rowcount
            connection.commit()
        table, took = statement.split()[2], time.perf_counter() - began
        print(f"{made} {table} in {took:.1f} s", file=sys.stderr, flush=True)
    engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE")


@contextlib.contextmanager
def _unchecked(database: Database) -> Iterator[Connection]:
    """Yield a connection that checks no foreign keys and does not wait for durable commits."""
    if not database.is_postgresql:
        with connect_for_migration(database.engine.url.render_as_string()) as connection:
            yield connection
        return
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SET session_replication_role = replica")
        connection.exec_driver_sql("SET synchronous_commit = off")
        yield connection
        # Otherwise the pool would reuse the connection.
        connection.invalidate()


def expand(statement: str, values: dict[str, Any]) -> str:
    """Return a statement with its placeholders replaced."""
    for name, value in values.items():
        statement = statement.replace("{" + name + "}", str(value))
    return statement


def _pad(expression: str, width: int) -> str:
    filled = f"('{'0' * width}' || {expression})"
    return f"substr({filled}, length({filled}) - {width - 1})"


_N = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {last})"
_NAME = f"'step-' || {_pad(f'((n.i + 1) * {STEP})', 8)} || '.a0001.l01'"
_PARENT = f"'step-' || {_pad(f'(n.i * {STEP})', 8)} || '.a0001.l01'"
_EMPTY = "CAST('{}' AS {json})"
_DIGEST = "'d41d8cd98f00b204e9800998ecf8427ed41d8cd98f00b204e9800998ecf8427e'"

_RUNS = (
    "INSERT INTO runs (uid, run, name, root, directory, state, spec, spec_digest, created_at, "
    f"created_by, step, updated_at, committed_at, goodput, fingerprint) {_N} "
    f"SELECT {_pad('i', 32)}, 'run-' || {_pad('i', 6)}, 'run-' || {_pad('i', 6)}, '/runs', "
    f"'/runs/run-' || {_pad('i', 6)}, CASE i % 20 WHEN 0 THEN 'running' WHEN 1 THEN 'failed' ELSE "
    f"'completed' END, CAST('{{spec}}' AS {{json}}), {_DIGEST}, {T0} + i, 'bench', {{each}} * "
    f'{STEP}, {T0} + 2 * i, {T0} + 2 * i, CAST(\'{{"ettr": 0.9, "total_s": 1000.0}}\' AS '
    "{json}), 'filled' FROM n"
).replace("{last}", "{runs} - 1")

_ATTEMPTS = (
    "INSERT INTO attempts (run_uid, number, state, cause, evidence, executor, job_id, hosts, "
    "nodes, world_size, submitted_at, started_at, ended_at, last_step) SELECT r.uid, k.k, "
    "CASE k.k WHEN 1 THEN 'preempted' ELSE 'completed' END, CASE k.k WHEN 1 THEN 'preemption' "
    "END, CAST('[]' AS {json}), 'slurm', r.uid || k.k, CAST('[]' AS {json}), 1, 8, "
    "r.created_at, r.created_at + 10, r.created_at + 500 * k.k, 100 FROM runs r CROSS JOIN "
    "(SELECT 1 AS k UNION ALL SELECT 2) k"
)
_NODES = (
    "INSERT INTO attempt_nodes (run_uid, attempt, host, fault, started_at, ended_at) SELECT "
    f"run_uid, number, 'node-' || {_pad('(CAST(run_uid AS numeric) % 1250)', 4)}, CASE WHEN "
    "CAST(run_uid AS numeric) % 50 = number THEN 'node_failure' END, started_at, ended_at "
    "FROM attempts"
)
_LAUNCHES = (
    "INSERT INTO launches (run_uid, attempt, number, started_at, trained_from, ended_at) "
    "SELECT run_uid, number, 1, started_at, started_at + 5, ended_at FROM attempts"
)


def _checkpoints(last: str, which: str) -> str:
    return (
        "INSERT INTO checkpoints (run_uid, name, step, attempt, launch, state, path, "
        "reason, world_size, parent, parent_uid, parent_name, parent_step, bytes, files, checksum, "
        "blocked_s, flush_s, committed_at, metrics, versions, topology, pinned, rolled_back, "
        "stamp) "
        f"{_N.replace('{last}', last)} SELECT r.uid, {_NAME}, (n.i + 1) * {STEP}, 1, 1, "
        f"'committed', r.directory || '/checkpoints/' || {_NAME}, 'interval', 8, "
        f"CASE WHEN n.i > 0 THEN r.run || ':' || {_PARENT} END, CASE WHEN n.i > 0 THEN r.uid END, "
        f"CASE WHEN n.i > 0 THEN {_PARENT} END, CASE WHEN n.i > 0 THEN n.i * {STEP} END, "
        f"1000000000, 1, {{digest}}, 0.1, 2.5, r.created_at + 10 + n.i, "
        f"CAST('{{\"loss\": 2.5}}' AS {{json}}), {_EMPTY}, {_EMPTY}, false, false, '' "
        f"FROM runs r CROSS JOIN n WHERE r.uid {which} '{run_uid(0)}'"
    )


_FILES = (
    "INSERT INTO checkpoint_files (run_uid, checkpoint, number, path, bytes, checksum) SELECT "
    "run_uid, name, 0, '__0_0.distcp', 1000000000, 'd41d8cd98f00b204e9800998ecf8427e' "
    "FROM checkpoints"
)
_JOURNALS = (
    "INSERT INTO journals (run_uid, journal, lines) SELECT uid, "
    "'attempts/0001/journal/rank0.jsonl', 0 FROM runs"
)
_EVENTS = (
    "INSERT INTO events (run_uid, journal, opening, sequence, attempt, time, kind, data) "
    f"SELECT run_uid, 'attempts/0001/journal/rank0.jsonl', 1, 2 * (step / {STEP}) + k.k, 1, "
    "committed_at - 1 + k.k, CASE k.k WHEN 0 THEN 'staged' ELSE 'committed' END, "
    'CAST(\'{"attempt": 1, "launch": 1, "blocked_s": 0.1}\' AS {json}) FROM checkpoints '
    "CROSS JOIN (SELECT 0 AS k UNION ALL SELECT 1) k"
)
_METRIC_FILES = (
    'INSERT INTO metric_files (run_uid, attempt, launch, "offset", stride, spark) SELECT uid, '
    f"1, 1, 1000, 64, CAST('[{', '.join(['2.25'] * 32)}]' AS {{json}}) FROM runs"
)
_METRICS = (
    "INSERT INTO metrics (run_uid, attempt, launch, bucket, step, time, data) "
    f"{_N.replace('{last}', str(BUCKETS - 1))} SELECT r.uid, 1, 1, n.i * 64, n.i * 64 + 63, "
    'r.created_at + n.i, CAST(\'{"loss": [1, 2.5, 2.25, 3.5], "lr": [1, 0.1, 0.1, 0.1]}\' AS '
    f"{{json}}) FROM runs r CROSS JOIN n WHERE CAST(r.uid AS numeric) < {RUNS_WITH_METRICS}"
)
STATEMENTS: Final = (
    *(_RUNS, _ATTEMPTS, _NODES, _LAUNCHES),
    *(_checkpoints(str(CHAIN - 1), "="), _checkpoints("{each} - 1", "<>")),
    *(_FILES, _JOURNALS, _EVENTS, _METRIC_FILES, _METRICS),
)
