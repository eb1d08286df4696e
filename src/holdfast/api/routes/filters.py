"""The filters that all lists of runs and all totals have."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Depends, Query, Request

from holdfast.api.services import services_of
from holdfast.contracts.errors import QueryError
from holdfast.contracts.plain_text import exact
from holdfast.contracts.spec.tags import TAG, TAGS_MAX
from holdfast.contracts.states import Cause, RunState
from holdfast.lineage.queries.pages import RunFilter, SortOrder

NO_NUL = r"^[^\x00]*$"

States = Annotated[list[RunState] | None, Query(description="Any of these states")]
Search = Annotated[
    str | None,
    Query(max_length=200, pattern=NO_NUL, description="Text in the name or folder, or the uid"),
]
Name = Annotated[str, Query(min_length=1, max_length=200, pattern=NO_NUL)]
Users = Annotated[
    list[Name] | None, Query(description="Submitted by any of these users", max_length=50)
]
Causes = Annotated[
    list[Cause] | None, Query(description="The newest attempt ended for any of these causes")
]
Partitions = Annotated[
    list[Name] | None,
    Query(description="The spec asks for any of these Slurm partitions", max_length=50),
]
Accounts = Annotated[
    list[Name] | None,
    Query(description="The spec asks for any of these Slurm accounts", max_length=50),
]
Tags = Annotated[
    list[Annotated[str, Query(pattern=f"^{TAG.pattern}$")]] | None,
    Query(description="The run has all of these tags", max_length=TAGS_MAX),
]
Attention = Annotated[
    bool | None, Query(description="True: only runs in the list of what needs attention")
]
Moment = Annotated[float | None, Query(ge=0, le=1e12, description="Unix seconds")]
Within = Annotated[
    float | None, Query(gt=0, le=1e12, description="Submitted within the last so many seconds")
]
SortAs = Annotated[
    SortOrder | None,
    Query(description="By default ascending for `name` and `state`, descending for all others"),
]


def run_filter(
    request: Request,
    state: States = None,
    search: Search = None,
    user: Users = None,
    cause: Causes = None,
    partition: Partitions = None,
    account: Accounts = None,
    tag: Tags = None,
    attention: Attention = None,
    created_from: Moment = None,
    created_to: Moment = None,
    created_within: Within = None,
) -> RunFilter:
    """Return the filter that a request asks for."""
    refuse_reversed("created", created_from, created_to)
    if created_within is not None:
        created_from = max(created_from or 0.0, time.time() - created_within)
    uids = None
    if attention:
        items = services_of(request).attention.items()
        uids = tuple({item.uid for item in items if item.uid is not None})
    return RunFilter(
        states=tuple(state or ()),
        search=search,
        users=tuple(user or ()),
        causes=tuple(cause or ()),
        partitions=tuple(partition or ()),
        accounts=tuple(account or ()),
        tags=tuple(tag or ()),
        uids=uids,
        created_from=created_from,
        created_to=created_to,
    )


Where = Annotated[RunFilter, Depends(run_filter)]


def refuse_reversed(name: str, first: float | None, last: float | None) -> None:
    """Raise `QueryError` for a range that contains nothing."""
    if first is not None and last is not None and first > last:
        raise QueryError(
            f"{name}_from {exact(first)} is after {name}_to {exact(last)}, so nothing can match; "
            "swap them"
        )
