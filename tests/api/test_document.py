"""The OpenAPI document: every operation is called with valid and invalid generated input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance
from tests.api.conftest import Served, serving
from tests.support.runs import RunFolder

CHECKOUT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 120
REAL = {"run": "gpt-b", "checkpoint": "gpt-b:step-00000150.a0001.l01", "rank": 0, "host": "node-a"}
# The event stream never ends by itself.
ENDLESS = "/api/v1/events"
CHECKS = [not_a_server_error, response_schema_conformance]


@pytest.fixture(scope="module")
def tried(home: Path, sample_runs: dict[str, RunFolder]) -> Iterator[Served]:
    """A server that starts no flows: the tests relaunch runs hundreds of times."""
    with serving(home, sample_runs, start=lambda *_: {}) as one:
        yield one


def operations(served: Served) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{served.url}/api/v1/openapi.json")
    results: list[Any] = list(schema.get_all_operations())
    found = [result.ok() for result in results]
    return [one for one in found if one.path != ENDLESS]


def call_all(served: Served, found: list[Any], examples: int) -> int:
    """Call each operation `examples` times with valid and as often with invalid input.

    Each answer must be as documented. Returns the number of calls.
    """
    calls = 0
    for operation in found:
        names = {one.name for one in operation.path_parameters}
        real = {name: REAL[name] for name in names if name in REAL} or None
        valid = operation.as_strategy(GenerationMode.POSITIVE, path_parameters=real)
        calls += _call(valid, examples, served)
        # An operation without parameters has no invalid input.
        if operation.query or operation.body:
            wrong = operation.as_strategy(GenerationMode.NEGATIVE, path_parameters=real)
            calls += _call(wrong, examples, served)
    return calls


def _call(strategy: Any, examples: int, served: Served) -> int:
    made = []

    @seed(0)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def call(case: Any) -> None:
        token = {"Authorization": f"Bearer {served.token}"}
        case.call_and_validate(checks=CHECKS, headers=token, timeout=LIMIT_S)
        made.append(case)

    call()
    return len(made)


@pytest.mark.more
def test_no_operation_fails_on_valid_or_invalid_input(tried: Served) -> None:
    found = operations(tried)
    assert len(found) >= 30
    assert call_all(tried, found[::5], examples=1) >= len(found[::5])


@pytest.mark.more
def test_web_page_types_match_the_openapi_document() -> None:
    script = CHECKOUT / "infra" / "setup" / "page_types.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=LIMIT_S)
    assert done.returncode == 0, f"out of date; run: python {script}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_operation_fails_on_many_generated_inputs(tried: Served) -> None:
    found = operations(tried)
    assert call_all(tried, found, examples=40) >= 2_000
