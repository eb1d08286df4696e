"""Comparison of two checkpoints or of runs, and the list of a checkpoint's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select

from holdfast.lineage.database.tables import ATTEMPTS, CHECKPOINTS, FILES
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import ancestry, reports, views
from holdfast.lineage.queries.find import Row, checkpoint_row, rows_of, run_row

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
            for fact in _beside(*map(flat_settings, (side[0]["spec"] for side in sides)))
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


# Comparison of runs.


FACTS_MAX: Final = 2000
_CODE: Final = ("code_commit", "code_digest", "command_digest", "config_digest", "data_digest")
_OUTCOME: Final = ("state", "step", "attempts", "world_size", "created_by")
_GOODPUT: Final = ("ettr", "total_s", "training_s", "steps_lost", "gpu_hours", "cost")
_OPTION: Final = re.compile(r"(--?[A-Za-z][^=\s]*)(?:=(.*))?", re.DOTALL)

Facts = Mapping[str, Any]


def compare_runs(database: Database, names: Sequence[str]) -> reports.RunsComparison:
    """Compare runs fact by fact, those that differ first in each group.

    Code and environment are those of the newest attempt and the newest checkpoint. Raises
    `NotFoundError` for an unknown run.
    """
    with database.reading() as connection:
        runs = [run_row(connection, name) for name in names]
        attempts = [_newest_attempt(connection, run) for run in runs]
        saved = [_newest_saved(connection, run) for run in runs]
    specs = [run["spec"] for run in runs]
    facts = [
        *_group("arguments", map(flat_arguments, specs), _equal),
        *_group("settings", map(flat_settings, specs), _equal),
        *_group("code", ({name: one.get(name) for name in _CODE} for one in attempts), _known),
        *_group("environment", map(_environment, attempts, saved), _known),
        *_group("outcome", map(_outcome, runs, saved), _known),
    ]
    shown = facts if len(facts) <= FACTS_MAX else [one for one in facts if not one["is_same"]]
    return reports.RunsComparison(
        runs=[run["run"] for run in runs],
        facts=shown[:FACTS_MAX],
        left_out=len(facts) - len(shown[:FACTS_MAX]),
    )


def flat_settings(spec: Facts) -> dict[str, Any]:
    """Return the settings of a spec by dotted key, without its command."""
    return dict(_flat({key: value for key, value in spec.items() if key != "command"}))


def flat_arguments(spec: Facts) -> dict[str, Any]:
    """Return the arguments of a spec's command by option, other words by their position."""
    given = spec.get("command")
    command = [str(word) for word in given] if isinstance(given, list | tuple) else []
    found: dict[str, Any] = {}
    position = 0
    for number, word in enumerate(command):
        option = _OPTION.fullmatch(word)
        before = command[number - 1] if number else ""
        if option:
            found[option[1]] = True if option[2] is None else option[2]
        elif found.get(before) is True:
            # The word after an option is its value. An option without one stays true.
            found[before] = word
        else:
            position += 1
            found[f"word {position}"] = word
    return found


def _flat(settings: Facts, at: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in sorted(settings.items()):
        name = f"{at}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value


def _group(
    group: str, each: Iterable[Facts], is_same: Callable[[list[Any]], bool | None]
) -> list[reports.RunsFact]:
    sides = list(each)
    names = dict.fromkeys(name for side in sides for name in side)
    found = []
    for name in names:
        values = [side.get(name) for side in sides]
        found.append(
            reports.RunsFact(group=group, name=name, values=values, is_same=is_same(values))
        )
    return sorted(found, key=lambda one: one["is_same"] is not False)


def _equal(values: list[Any]) -> bool:
    return all(one == values[0] for one in values)


def _known(values: list[Any]) -> bool | None:
    """Return whether the values are equal, or None if one of them is unknown."""
    return None if any(one is None for one in values) else _equal(values)


def _environment(attempt: Facts, saved: Facts) -> dict[str, Any]:
    versions = {f"versions.{k}": v for k, v in sorted((saved.get("versions") or {}).items())}
    topology = {f"topology.{k}": v for k, v in sorted((saved.get("topology") or {}).items())}
    return {"environment_digest": attempt.get("environment_digest"), **versions, **topology}


def _outcome(run: Facts, saved: Facts) -> dict[str, Any]:
    account = run["goodput"] if isinstance(run["goodput"], dict) else {}
    metrics = {f"newest {k}": v for k, v in sorted((saved.get("metrics") or {}).items())}
    own = {name: run.get(name) for name in _OUTCOME}
    return {**own, **{name: account.get(name) for name in _GOODPUT}, **metrics}


def _newest_attempt(connection: Connection, run: Row) -> Row:
    query = select(ATTEMPTS).where(ATTEMPTS.c.run_uid == run["uid"])
    found = rows_of(connection, query.order_by(ATTEMPTS.c.number.desc()).limit(1))
    return found[0] if found else {}


def _newest_saved(connection: Connection, run: Row) -> Row:
    """Return the newest checkpoint on the run's branch, deleted or not; empty if there is none."""
    columns = CHECKPOINTS.c
    query = select(columns.versions, columns.topology, columns.metrics).where(
        columns.run_uid == run["uid"], columns.rolled_back.is_(False)
    )
    newest = (columns.step.desc(), columns.attempt.desc(), columns.launch.desc())
    found = rows_of(connection, query.order_by(*newest).limit(1))
    return found[0] if found else {}
