"""`holdfast bench` on a few megabytes: that it reports results, not how fast it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from math import isfinite
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from holdfast_bench.limits.figures import PEER, STAGING_MODES, STOCK_MODES, TARGETS
from holdfast_bench.limits.launch import Launch

CHECKOUT = Path(__file__).resolve().parents[2]
HOLDFAST = Path(sys.executable).with_name("holdfast")
LIMIT_S = 500.0


def numbers_of(value: Any) -> list[float]:
    """Every number in a JSON document."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers_of(inner)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.slow
def test_quick_benchmark_reports_every_measurement_and_removes_its_files(tmp_path: Path) -> None:
    place = tmp_path / "place"
    plot, answer = tmp_path / "plot.svg", tmp_path / "bench.json"
    command = [str(HOLDFAST), "bench", "--json", "--quick", "--directory", str(place)]
    # What is given counts, with --quick too.
    command += ["--megabytes", "6", "--pairs", "2", "--ranks", "2"]
    command += ["--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["ratios"]) == set(found["targets"]) == set(TARGETS)
    assert set(found["stock"]) == {*STOCK_MODES, "load", PEER}
    assert {"save_blocked", "missing"} & set(found["stock"][PEER])
    assert {"step_time_during_copy", "throughput_during_write"} <= set(found["training"])
    assert list(found["staging"]) == list(STAGING_MODES)
    for figures in (*found["staging"].values(), found["neighbours"]):
        assert all(spread["min"] > 0 for spread in figures["spread"].values())
    for mode in STOCK_MODES:
        assert {"save_blocked", "save_committed", "first_save"} <= set(found["stock"][mode])
    assert set(TARGETS) <= set(found["spread"])
    assert all(figures["n"] >= 1 for figures in found["seconds"].values())
    assert all(isfinite(number) for number in numbers_of(found))
    assert all(value > 0 for name, value in found["ratios"].items() if name != "memory_growth")
    assert found["conditions"]["pairs_wanted"] == 2
    assert found["conditions"]["state_bytes"] == pytest.approx(6e6, rel=0.1)
    assert found["conditions"]["ranks"] == 2
    assert found["ratios"]["load_bytes_same"] >= 1
    assert all(spread["min"] > 0 for spread in found["setup"].values())
    assert found["versions"]["torch"]
    assert list(place.iterdir()) == []
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")

    answer.write_text(done.stdout)
    report = [sys.executable, str(CHECKOUT / "benchmarks" / "report.py"), str(answer)]
    subprocess.run([*report, "--docs", str(tmp_path)], check=True, timeout=LIMIT_S)
    page = (tmp_path / "benchmarks.md").read_text()
    assert all(f"≤ {target:g}" in page for target in TARGETS.values())
    assert (tmp_path / "benchmarks.svg").read_bytes() == plot.read_bytes()


def test_terminated_benchmark_ends_its_child_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast_bench.limits", "--quick"]
    with subprocess.Popen([*command, "--directory", tmp_path], stderr=subprocess.PIPE) as process:
        began = time.monotonic()
        parent = psutil.Process(process.pid)
        while not (family := parent.children(recursive=True)):
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 1
    gone, alive = psutil.wait_procs(family, 60)
    assert gone
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_a_term_while_a_program_starts_ends_that_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with pytest.raises(SystemExit):
            Launch("pairs", 1, {"directory": str(tmp_path)}, end_by=time.time() + LIMIT_S)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--megabytes", "900000000"], "Use fewer --megabytes"),
    ],
)
def test_impossible_benchmark_options_are_refused(
    options: list[str], reason: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [HOLDFAST, "bench", "--json", "--directory", tmp_path, *options],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stdout == ""


@pytest.mark.more
def test_missing_torch_is_reported_with_the_install_command(tmp_path: Path) -> None:
    """The interpreter finds every library except torch."""
    program = (
        "import sys, runpy\n"
        "sys.modules['torch'] = None\n"
        "sys.argv[1:] = ['--quick', '--directory', %r]\n"
        "runpy.run_module('holdfast_bench.limits', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program % str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert "Install Holdfast with the extra `trainer`" in done.stderr
