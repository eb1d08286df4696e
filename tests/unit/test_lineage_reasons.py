"""Why a checkpoint is kept, and which run's checkpoint an id means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.lineage.ingest.clean import clean
from holdfast.lineage.ingest.reasons import explain
from holdfast.lineage.ingest.rows import Origins
from holdfast.lineage.queries.views import iso


def row(step: int, state: str = "committed", **fields: Any) -> dict[str, Any]:
    blank: dict[str, Any] = {"pinned": False, "rolled_back": False, "detail": None}
    blank |= {"deleted_reason": None, "committed_at": 1000.0 * step, "metrics": {}}
    return {"name": f"s{step}", "step": step, "state": state, **blank, **fields}


ROWS = [
    row(10, "deleted", deleted_reason="keep.last 2"),
    row(20, pinned=True),
    row(30),
    row(40, "damaged", detail="manifest.json: torn"),
    row(50),
    row(60),
    row(70, rolled_back=True),
]


def test_every_reason_that_applies_is_given() -> None:
    assert explain(ROWS, {"s30": ["in use as the parent of run b"]}, Keep(last=2)) == [
        "deleted: keep.last 2",
        "pinned",
        "in use as the parent of run b",
        "damaged: manifest.json: torn",
        "kept by rule: last 2",
        "newest, kept by rule: last 2",
        "rolled back",
    ]


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (Keep(), "no keep rule set"),
        (Keep(last=1, every_steps=15), "kept by rule: every 15 steps"),
        (Keep(last=1, every_steps=40), "no rule keeps it; the next prune deletes it"),
        (Keep(ttl="10m"), "no rule keeps it; the next prune deletes it"),
        (Keep(ttl="1h", every_hours=5), "kept by rule: every 5 h, younger than 1h"),
        (Keep(last=3), "kept by rule: last 3"),
    ],
)
def test_the_reason_names_the_keep_rules(keep: Keep, reason: str) -> None:
    assert explain([row(30), row(50), row(60)], {}, keep, now=32_000)[0] == reason


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ("gpt:step-1", ("own", "gpt", "step-1")),
        ("step-1", ("own", "gpt", "step-1")),
        ("base:step-9", ("origin", "base", "step-9")),
        ("base:step-8", (None, "base", "step-8")),
        (None, (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_checkpoint_ids_are_resolved_to_runs(
    identity: str | None, found: tuple[str | None, ...]
) -> None:
    assert (
        Origins(record("base:step-9"), {"step-1": CheckpointName(1, 1, 1)}).find(identity) == found
    )


def test_a_fork_of_a_run_with_the_same_name_in_another_root() -> None:
    origins = Origins(record("gpt:step-9"), {"step-1": CheckpointName(1, 1, 1)})
    assert origins.find("gpt:step-9") == ("origin", "gpt", "step-9")
    assert origins.find("gpt:step-1") == ("own", "gpt", "step-1")


def record(forked_from: str) -> RunRecord:
    return RunRecord(
        uid="own",
        run="gpt",
        name="gpt",
        root=str(Path("/")),
        created_at=0,
        spec={},
        spec_digest="",
        forked_from=forked_from,
        forked_uid="origin",
    )


def test_clean_keeps_plain_json_and_replaces_invalid_values() -> None:
    plain = {"a": [1, 2.5, None, True, "text"], "b": {"c": 10**30}}
    assert clean(plain) == plain
    assert clean({"x\0": (float("-inf"), "\0")}) == {"x\ufffd": ["-inf", "\ufffd"]}


def test_times_are_iso_in_utc() -> None:
    assert iso(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
    assert iso(None) is None
