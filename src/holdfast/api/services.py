"""The objects that the routes use. Each server creates them once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fastapi import Request

from holdfast.api.hub import Hub
from holdfast.api.jobs import Jobs
from holdfast.api.measures import Measures
from holdfast.api.security import AccessPolicy
from holdfast.api.session_audit import SessionAudit
from holdfast.api.sessions import LoginThrottle, Sessions
from holdfast.api.store import IndexStore
from holdfast.api.tokens import TokenStore
from holdfast.api.watch import Watch
from holdfast.contracts.disk.paths import RunPaths

# Starts what a request to a run needs; the second argument says whether the run continues. Returns
# facts about the supervisor.
Start = Callable[[RunPaths, bool], Mapping[str, Any]]
# Raises if a run could not continue. It is called before the request is recorded.
Check = Callable[[RunPaths], None]
# (parent run, checkpoint's directory, new name, overrides, by) -> facts about the new run.
Fork = Callable[[RunPaths, str, str, Sequence[str], str], Mapping[str, Any]]


@dataclass(kw_only=True)
class Services:
    """The parts of one server."""

    store: IndexStore
    watch: Watch
    hub: Hub
    access_policy: AccessPolicy
    tokens: TokenStore
    roots: tuple[Path, ...]
    start: Start
    fork: Fork
    check: Check
    sessions: Sessions = field(init=False)
    login_throttle: LoginThrottle = field(default_factory=LoginThrottle)
    session_audit: SessionAudit = field(default_factory=SessionAudit)
    jobs: Jobs = field(default_factory=Jobs)
    measures: Measures = field(default_factory=Measures)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.tokens)


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)
