"""Comparison of runs: their arguments, settings, code, environment and outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select

from holdfast.lineage.database.tables import ATTEMPTS, CHECKPOINTS
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import reports
from holdfast.lineage.queries.find import Row, rows_of, run_row

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
