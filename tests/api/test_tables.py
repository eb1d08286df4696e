"""Tables as files: what a spreadsheet does with them."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

from benchmarks.lineage_fill import CHAIN, fill

from holdfast.api.routes.runs import run_line
from holdfast.api.routes.tables import RUN_COLUMNS, run_facts, table_of
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.queries import pages


def test_a_table_without_rows_has_its_header() -> None:
    (header,) = csv.reader(io.StringIO(bytes(table_of("runs", [], "csv").body).decode()))
    assert header[: len(RUN_COLUMNS)] == list(RUN_COLUMNS)
    assert json.loads(bytes(table_of("runs", [], "json").body)) == []


def test_a_cell_of_a_spreadsheet_is_never_a_formula() -> None:
    texts = ["=HYPERLINK(1)", "+1", "-1", "@sum", "\tx", 'a "b", c', "line\nline", "ü"]
    rows = [{"text": text, "number": -1.5, "none": None} for text in texts]
    answer = table_of("runs", rows, "csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert 'filename="holdfast-runs.csv"' in answer.headers["content-disposition"]
    found = list(csv.DictReader(io.StringIO(bytes(answer.body).decode(), newline="")))
    assert [one["text"] for one in found] == [*(f"'{one}" for one in texts[:5]), *texts[5:]]
    assert {(one["number"], one["none"]) for one in found} == {("-1.5", "")}
    assert json.loads(bytes(table_of("runs", rows, "json").body)) == rows


def test_a_table_of_all_runs_costs_little_for_each(tmp_path: Path) -> None:
    runs = 2000
    with open_database(f"sqlite:///{tmp_path / 'index.db'}") as database:
        fill(database, runs, CHAIN + runs)
        began = time.process_time()
        rows = pages.list_runs(database, limit=None).items
        answer = table_of("runs", (run_facts(run_line(row, None)) for row in rows), "csv")
        took_s = time.process_time() - began
    assert bytes(answer.body).count(b"run-001999") == 3
    assert bytes(answer.body).count(b"\n") == runs + 1
    # Ten thousand runs take two seconds at most.
    assert took_s < 2.0 * runs / 10_000


def test_an_odd_account_has_empty_columns() -> None:
    line = {"run": "gpt", "goodput": "odd"}
    facts = run_facts(line)  # type: ignore[arg-type]
    assert (facts["run"], facts["goodput"], facts["gpu_hours"]) == ("gpt", None, None)
