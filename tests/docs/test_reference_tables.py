"""The tables behind the reference documentation match what the code writes and reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from holdfast.cli.shared import exit_status as statuses
from holdfast.cli.shared.exit_status import exit_status
from holdfast.contracts import errors
from holdfast.contracts.disk.journal import EventKind, needed_facts, problem_with_facts
from holdfast_docs import event_book
from holdfast_docs.event_book import EVENTS
from holdfast_docs.exit_statuses import EXIT_STATUSES
from holdfast_docs.schema import bounds, unit
from holdfast_docs.variables import VARIABLES

CHECKOUT = Path(__file__).resolve().parents[2]
CODE = ("src/holdfast", "workers", "trainer", "flows")
# A value of each type in the event book.
EXAMPLES = {
    event_book.INTEGER: 1,
    event_book.NUMBER: 1.5,
    event_book.STRING: "text",
    event_book.BOOLEAN: True,
    event_book.STRINGS: ["text"],
    event_book.TABLE: {"key": {"value": 1, "source": "spec"}},
    event_book.NUMBERS: [1.5],
    event_book.PAIRS: [[1, 2]],
    event_book.TABLES: [{}],
}


@cache
def sources() -> tuple[Path, ...]:
    paths = (path for folder in CODE for path in (CHECKOUT / folder).rglob("*.py"))
    own = {path.resolve() for path in paths if "__pycache__" not in path.parts}
    return tuple(sorted(own))


def kinds_in(node: ast.Call) -> list[EventKind]:
    named = [
        one.attr
        for one in node.args
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "EventKind"
    ]
    return [EventKind[name] for name in named]


def written_facts() -> Iterator[tuple[str, EventKind, str]]:
    """(place, kind, field) of every field that a call names for a kind of event."""
    # Arguments for the journal itself, which are not fields of the line.
    not_facts = {"durable", "since"}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for kind in kinds_in(node):
                    place = f"{path.relative_to(CHECKOUT)}:{node.lineno}"
                    names = [one.arg for one in node.keywords if one.arg]
                    yield from ((place, kind, name) for name in names if name not in not_facts)


def test_every_event_kind_is_described() -> None:
    assert set(EVENTS) == set(EventKind)
    assert all(entry.meaning and entry.writer and entry.described for entry in EVENTS.values())


def test_the_code_writes_only_described_event_fields() -> None:
    written = list(written_facts())
    assert len(written) > 100
    unknown = [
        f"{place}: {kind} has no field {name!r}"
        for place, kind, name in written
        if name not in EVENTS[kind].fields
    ]
    assert not unknown, "\n".join([f"describe them in {event_book.__name__}:", *unknown])


def test_readers_accept_fields_of_the_described_types() -> None:
    wrong = []
    for kind, entry in EVENTS.items():
        facts = {name: EXAMPLES[one.type] for name, one in entry.described.items()}
        if "state" in facts:
            facts["state"] = "running"
        if problem := problem_with_facts(kind, facts):
            wrong.append(f"{kind}: {problem}")
        wrong += [f"{kind}: {name}" for name in needed_facts(kind) if name not in facts]
    assert not wrong


def test_the_code_reads_only_described_environment_variables() -> None:
    known = {one.name for one in VARIABLES}
    # Used only in the tests of the test cluster.
    known |= {"HOLDFAST_TEST_NODE"}
    places = [*sources(), CHECKOUT / "hatch_build.py", CHECKOUT / "Makefile"]
    places += [*CHECKOUT.glob("infra/slurm/**/*.py"), *CHECKOUT.glob("infra/**/*.sh")]
    places += [*CHECKOUT.glob("tests/gpu/*.py"), CHECKOUT / "web" / "vite.config.ts"]
    unknown = {
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in places
        for name in re.findall(r"\bHOLDFAST_[A-Z0-9]+(?:_[A-Z0-9]+)*\b", path.read_text())
        if name not in known
    }
    assert not unknown
    text = "\n".join(path.read_text() for path in places)
    assert {name for name in known if name not in text} == set()


def test_the_exit_status_table_matches_the_programs() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    raised = [one for one in kinds if issubclass(one, errors.HoldfastError)]
    known = set(EXIT_STATUSES["holdfast"])
    of_errors = {exit_status(kind.__new__(kind)) for kind in raised}
    assert of_errors == {
        *(statuses.FAILED, statuses.MISUSE, statuses.NOT_FOUND),
        *(statuses.UNAVAILABLE, statuses.REFUSED),
    }
    assert {0, statuses.INTERRUPTED, *of_errors} <= known


def test_bounds_have_all_their_digits_and_ratios_no_unit() -> None:
    assert bounds({"minimum": 1, "maximum": 2**62}) == ["at least 1", f"at most {2**62}"]
    assert bounds({"exclusiveMaximum": 0.5, "minItems": 1}) == ["less than 0.5", "at least 1 item"]
    assert bounds({"minItems": 2, "maxItems": 12}) == ["at least 2 items", "at most 12 items"]
    assert [unit(one) for one in ("after_min", "alerts.ettr_min", "gb")] == ["minutes", "", ""]
