"""Two processes ingest the same run, each twice and out of order, while the server restarts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.process.test_lineage_ingest import clear, dump
from tests.support.postgres import postgres_server
from tests.support.runs import build_sample_runs

from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.reindex import reindex

PROCESS_TIMEOUT_S: Final = 240
RESTARTS: Final = 2
IN_ITS_OWN_MOUNTS: Final = ("unshare", "--mount", "--propagation", "private")

# Ingests the states of a sample run in the given order, then the final one twice, and continues
# after outages of the database. Its first output line says that it has started. Each state is
# mounted over the root in a mount namespace of this process, as another node's cache may show it.
PROGRAM: Final = """
import subprocess, sys, time
from pathlib import Path
from holdfast.contracts.errors import LineageError
from holdfast.contracts.disk.paths import list_runs
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
url, root, *folders = sys.argv[1:]
away = 0
deadline = time.monotonic() + 200
database = open_database(url)
for number, folder in enumerate([*folders, "", ""]):
    if folder:
        subprocess.run(["mount", "--bind", folder, root], check=True)
    for paths in list_runs(Path(root)):
        while True:
            try:
                ingest_run(database, paths, fresh=number % 2 == 0)
                break
            except LineageError:
                away += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    if folder:
        subprocess.run(["umount", root], check=True)
    print(number, flush=True)
database.close()
print("away", away, flush=True)
"""


@pytest.mark.slow
def test_rows_after_outages_equal_rows_without_outages(tmp_path: Path) -> None:
    root, kept = tmp_path / "runs", tmp_path / "snapshots"
    for number, _ in enumerate(build_sample_runs(root)):
        shutil.copytree(root, kept / f"{number:02d}")
    snapshots = [str(path) for path in sorted(kept.iterdir())]
    with postgres_server() as server, server.database() as url:
        upgrade(url)
        orders = (snapshots[::-1], snapshots[1::2] + snapshots[::2])
        processes = [
            subprocess.Popen(
                [*IN_ITS_OWN_MOUNTS, sys.executable, "-c", PROGRAM, url, str(root), *order, *order],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for order in orders
        ]
        try:
            for _ in range(RESTARTS):
                lines = [p.stdout.readline() for p in processes if p.stdout]
                assert all(lines), [p.communicate() for p in processes if p.wait(1)]
                server.restart()
            said = [p.communicate(timeout=PROCESS_TIMEOUT_S) for p in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [p.returncode for p in processes] == [0, 0], said
        with open_database(url) as database:
            together = dump(database)
            clear(database)
            reindex(database, root)
            assert dump(database) == together
            assert all(together.values()), "every table has rows"
