"""The distribution holdfast-bench: its version, and the errors of its commands without it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts import version
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.version import holdfast_version
from holdfast.flows import operations

CHECKOUT = Path(__file__).resolve().parents[2]


def test_both_distributions_have_the_same_version() -> None:
    projects = {
        place: tomllib.loads((CHECKOUT / place / "pyproject.toml").read_text())["project"]
        for place in (".", "benchmarks")
    }
    assert {one["version"] for one in projects.values()} == {holdfast_version()}
    (needed,) = projects["benchmarks"]["dependencies"]
    assert needed == f"holdfast[server,trainer]=={holdfast_version()}"


@pytest.mark.parametrize(
    "command",
    [["bench", "--quick"], ["drill", "--count", "1"], ["drill", "a-run"]],
)
def test_commands_without_the_package_are_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "BENCH", "holdfast_bench_that_is_not_installed")
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, PreflightError)
    assert "needs the package holdfast-bench, which is not" in str(done.exception)
    assert "Run `pip install ./benchmarks` in a checkout" in str(done.exception)
    assert done.stdout == ""


def test_the_flow_drill_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "BENCH", "holdfast_bench_that_is_not_installed")
    with pytest.raises(PreflightError, match="a drill needs the package holdfast-bench"):
        operations.drill.fn(run="a-run")
