"""Refuses query parameters that a route would ignore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args, get_origin

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError


def _refuse_ignored(request: Request) -> None:
    """Raise `RequestValidationError` for unknown and for repeated query parameters."""
    known = dict(_parameters(request.scope["route"].dependant))
    given = [name for name, _ in request.query_params.multi_items()]
    problems = []
    for name in dict.fromkeys(given):
        if name not in known:
            expected = f"expected {', '.join(known)}" if known else "this endpoint has none"
            problems.append(_problem(name, f"Unknown query parameter; {expected}"))
        elif given.count(name) > 1 and not _takes_several(known[name].field_info.annotation):
            problems.append(_problem(name, f"Given {given.count(name)} times; expected one value"))
    if problems:
        raise RequestValidationError(problems)


def _parameters(dependant: Dependant) -> Iterator[tuple[str, Any]]:
    """Yield the query parameters of a route and of its dependencies, by name."""
    for one in dependant.query_params:
        yield one.alias, one
    for other in dependant.dependencies:
        yield from _parameters(other)


def _problem(name: str, message: str) -> dict[str, Any]:
    return {"type": "query", "loc": ("query", name[:100]), "msg": message, "input": None}


def _takes_several(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


KNOWN_QUERY: Final[Any] = Depends(_refuse_ignored)
