"""Comparison of two checkpoints, and the list of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, select

from holdfast.lineage.database.tables import ATTEMPTS, FILES
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import ancestry, reports, run_comparison, views
from holdfast.lineage.queries.find import Row, checkpoint_row, rows_of

FILES_MAX: Final = 1000
_DIGESTS: Final = (
    *("code_commit", "code_digest", "config_digest", "data_digest", "environment_digest"),
    "command_digest",
)
_FACTS: Final = ("step", "world_size", "bytes", "files", "checksum", "reason")


def compare(database: Database, one: str, other: str) -> reports.Comparison:
    """Compare two checkpoints fact by fact, digests first.

    `common_ancestor` is the newest checkpoint in both ancestries. It is one of the two if that
    one is an ancestor of the other. Raises `NotFoundError` for an unknown checkpoint.
    """
    with database.reading() as connection:
        sides = [_side(connection, identity) for identity in (one, other)]
        line, other_line = (
            {
                (stretch.uid, row.name): f"{stretch.run}:{row.name}"
                for stretch in ancestry.descent(
                    connection, checkpoint["run_uid"], checkpoint["name"]
                )
                for row in stretch.rows
            }
            for _, checkpoint, _ in sides
        )
    left, right = (_facts(*side) for side in sides)
    return reports.Comparison(
        one=f"{sides[0][0]['run']}:{sides[0][1]['name']}",
        other=f"{sides[1][0]['run']}:{sides[1][1]['name']}",
        # In the order of the first ancestry, which is newest first, so the newest common one is
        # found.
        common_ancestor=next((line[key] for key in line if key in other_line), None),
        facts=_beside(left, right),
        config=[
            fact | {"is_same": fact["one"] == fact["other"]}
            for fact in _beside(
                *map(run_comparison.flat_settings, (side[0]["spec"] for side in sides))
            )
        ],
        metrics=_beside(*(dict(sorted(side[1]["metrics"].items())) for side in sides)),
    )


def list_files(database: Database, checkpoint: str) -> list[reports.FileView]:
    """Return the first `FILES_MAX` files of a checkpoint in the order of its manifest.

    Raises `NotFoundError` for an unknown checkpoint.
    """
    with database.reading() as connection:
        _, row = checkpoint_row(connection, checkpoint)
        columns = FILES.c
        query = (
            select(columns.path, columns.bytes, columns.checksum)
            .where(columns.run_uid == row["run_uid"], columns.checkpoint == row["name"])
            .order_by(columns.number)
            .limit(FILES_MAX)
        )
        return [
            reports.FileView(path=one["path"], bytes=one["bytes"], checksum=one["checksum"])
            for one in rows_of(connection, query)
        ]


def _side(connection: Connection, identity: str) -> tuple[Row, Row, Row]:
    """Return (run, checkpoint, attempt that wrote it); an unknown attempt is empty."""
    run, row = checkpoint_row(connection, identity)
    query = select(ATTEMPTS).where(
        ATTEMPTS.c.run_uid == run["uid"], ATTEMPTS.c.number == row["attempt"]
    )
    found = rows_of(connection, query)
    return run, row, found[0] if found else {}


def _facts(run: Row, checkpoint: Row, attempt: Mapping[str, Any]) -> dict[str, Any]:
    digests = {name: attempt.get(name) for name in _DIGESTS}
    digests["command_digest"] = checkpoint["command_digest"] or digests["command_digest"]
    return {
        **digests,
        "spec_digest": run["spec_digest"],
        **{name: checkpoint[name] for name in _FACTS},
        **{f"topology.{k}": v for k, v in sorted(checkpoint["topology"].items())},
        **{f"versions.{k}": v for k, v in sorted(checkpoint["versions"].items())},
        "committed_at": views.iso(checkpoint["committed_at"]),
    }


def _same(one: Any, other: Any) -> bool | None:
    """Return whether two values are equal, or None if one of them is unknown."""
    # An unknown digest is neither equal nor different.
    return None if one is None or other is None else bool(one == other)


def _beside(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[reports.Fact]:
    """Return the facts of both sides by name, those of the first one first."""
    return [
        reports.Fact(
            name=name,
            one=one.get(name),
            other=other.get(name),
            is_same=_same(one.get(name), other.get(name)),
        )
        for name in {**one, **other}
    ]
