"""A row that no version should have written breaks no list, route, command or page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.api.conftest import Served, wait_for
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.plain_text import unix_time
from holdfast.lineage.queries.views import iso, iso_time

CHECKPOINT = "gpt:step-00000200.a0003.l01"
LESS_BAD = (3e11, 1_764_000_000_000.0, -1e9, math.inf)
TIMES = [1e300, *(pytest.param(time, marks=pytest.mark.more) for time in LESS_BAD)]
COMMANDS = (
    ("runs",),
    ("runs", "--json"),
    ("show", "gpt"),
    ("show", "gpt", "--json"),
    ("checkpoints", "gpt"),
    ("checkpoints", "gpt", "--json"),
    ("lineage", "gpt"),
    ("lineage", "gpt", "--json"),
    ("lineage", "gpt", "--format", "openlineage"),
    ("events", "gpt"),
)
ROUTES = (
    "/api/v1/runs",
    "/api/v1/runs?sort=checkpoint",
    "/api/v1/runs?sort=updated",
    "/api/v1/runs/gpt",
    "/api/v1/runs/gpt/checkpoints",
    "/api/v1/runs/gpt/lineage",
    "/api/v1/runs/gpt/timeline",
    "/api/v1/runs/gpt/attempts",
    "/api/v1/runs/gpt/events",
    "/api/v1/runs/gpt/openlineage",
    "/api/v1/runs/gpt/goodput",
    "/api/v1/runs/gpt/storage",
    f"/api/v1/checkpoints/{CHECKPOINT}",
    f"/api/v1/compare?a={CHECKPOINT}&b={CHECKPOINT}",
    "/api/v1/nodes",
    "/api/v1/storage",
    "/api/v1/storage/totals",
    "/api/v1/goodput",
    f"/api/v1/checkpoints/{CHECKPOINT}/ancestry",
    "/metrics",
    "/healthz",
)


def spoil(served: Served, time: float) -> None:
    """Write an impossible time into the index, as an earlier version did."""
    # Until the end of its first round, the server still writes the rows itself.
    wait_for(lambda: served.services.watch.lag_s() is not None)
    with served.services.store.index.open().engine.begin() as connection:
        connection.execute(
            text("UPDATE checkpoints SET committed_at = :t, staged_at = :t"), {"t": time}
        )
        connection.execute(text("UPDATE runs SET committed_at = :t"), {"t": time})
        connection.execute(text("UPDATE attempts SET ended_at = :t, started_at = :t"), {"t": time})
        connection.execute(text("UPDATE launches SET started_at = :t"), {"t": time})


@pytest.mark.more
@pytest.mark.parametrize("time", TIMES, ids=str)
def test_no_route_fails_for_an_impossible_time_in_the_index(served: Served, time: float) -> None:
    spoil(served, time)
    for route in ROUTES:
        answer = served.client().get(route)
        assert answer.status_code == 200, f"{route}: {answer.text[:500]}"
    rows = {row["run"]: row for row in served.client().get("/api/v1/runs").json()["items"]}
    assert rows["gpt"]["committed_at"] == f"not a time: {time:.6g}"


@pytest.mark.parametrize("time", TIMES, ids=str)
def test_no_command_fails_for_an_impossible_time_in_the_index(served: Served, time: float) -> None:
    for command in COMMANDS:
        spoil(served, time)
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
        if "--json" in command:
            json.loads(done.stdout)


def test_an_impossible_time_is_shown_as_what_it_is() -> None:
    assert iso_time(1.7e9) == "2023-11-14T22:13:20.000Z"
    assert unix_time(iso_time(1.7e9)) == 1.7e9
    assert [iso(3e11), iso(math.nan)] == ["not a time: 3e+11", "not a time: nan"]
    assert [unix_time(iso(3e11)), unix_time(None)] == [None, None]


def test_a_manifest_with_an_impossible_time_hides_no_run(served: Served, tmp_path: Path) -> None:
    """It is a damaged checkpoint, and its run and all others are listed."""
    (directory, *_) = served.runs["gpt"].paths.list_checkpoints()
    before = (directory / "manifest.json").read_bytes()
    document: dict[str, Any] = {**json.loads(before), "committed_at": 3e11}
    document.pop("digest", None)
    (directory / "manifest.json").write_text(json.dumps(document))
    try:
        done = CliRunner().invoke(app, ["reindex", str(served.root), "--json"])
        assert done.exit_code == 0, done.output
        assert set(json.loads(done.stdout)["runs"]) == set(served.runs)
        listed = CliRunner().invoke(app, ["checkpoints", "gpt", "--json"])
        (row,) = [one for one in json.loads(listed.stdout) if one["path"] == str(directory)]
        assert row["state"] == "damaged"
        shown = CliRunner().invoke(app, ["runs", "--json"])
        assert {one["run"] for one in json.loads(shown.stdout)} >= set(served.runs)
    finally:
        (directory / "manifest.json").write_bytes(before)
