"""Tables and messages on narrow terminals, and on those that have ASCII alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.unit.test_cli import ended_run, write_spec

from holdfast.cli.shared.output import print_table
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths

__all__ = ["ended_run"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_ids_in_tables_are_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", str(columns))
    identity = "pretrain-7b-long-name.r12:step-00123456.a0012.l03"
    row = [identity, 7, "committed", "kept by rule: last 3, newest, pinned", "/scratch/a/b/runs"]
    print_table(["checkpoint", "step", "state", "kept because", "root"], [row] * 2)
    assert shown.getvalue().count(identity) == 2
    assert shown.getvalue().count("/scratch/a/b/runs") == 2
    assert "…" not in shown.getvalue()


@pytest.mark.more
def test_ascii_output_has_no_traceback(home: Path, ended_run: RunPaths) -> None:
    with JournalWriter(ended_run.journal_of("tests")) as journal:
        journal.append(EventKind.NOTE, text="größer → später")
    out = ended_run.attempt(1).rank_log(0, 1, 0)
    out.parent.mkdir(parents=True)
    out.write_text("Verlust → 0,5 größer\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    program = """
import sys
from holdfast.cli.main import main
for line in sys.stdin.buffer.read().decode().splitlines():
    sys.argv = ["holdfast", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print("#", ended.code, flush=True)
"""
    calls = [
        *("runs", "show kelp", "checkpoints kelp", "lineage kelp", "logs kelp", "events kelp"),
        *("logs kelp --json", "events kelp --json", "prune kelp --dry-run", "submit größer.toml"),
        *("show größer", "--help", "runs --nonsense", "lineage kelp --format mermaid"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(calls),
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "UnicodeEncodeError" not in done.stderr
    assert done.stdout.count("\n# ") == len(calls), done.stderr[-2000:]
    assert "Verlust -> 0,5 gr\\xf6\\xdfer" in done.stdout
    parts = done.stdout.split("\n# 0\n")
    assert json.loads(parts[6])["logs"][0]["text"] == "Verlust → 0,5 größer\n"


def test_a_plot_in_an_unknown_format_names_the_formats(call: Call, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    trace = tmp_path / "trace.json"
    trace.write_text('{"metadata": {"gap_seconds": 60}, "data": [4, 4]}')
    base = ["simulate", spec, "--trace", trace, "--steps", "9", "--cost", "step_s=1", "--plot"]
    for name in ("x.xyz", "x"):
        refused = call(*base, tmp_path / name)
        assert refused.status == 2
        assert ".svg, .png" in refused.err
    assert call(*base, tmp_path / "none" / "x.svg").status == 3
    assert call(*base, tmp_path / "x.svg").status == 0
