"""What the routes work with, made once for each server and handed to them by the app."""

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
from holdfast.api.sessions import LoginThrottle, Sessions
from holdfast.api.store import Store
from holdfast.api.tokens import TokenStore
from holdfast.api.watch import Watch
from holdfast.contracts.paths import RunPaths

# Starts a flow for a run that is to go on, unless one is there; returns what was started.
Start = Callable[[RunPaths], Mapping[str, Any]]
# Raises when a run that is to go on could not, before anything is asked for.
Check = Callable[[RunPaths], None]
# (parent, directory's name, new name, overrides, by) → the new run and what was started.
Fork = Callable[[RunPaths, str, str, Sequence[str], str], Mapping[str, Any]]


@dataclass(kw_only=True)
class Services:
    """One server's parts."""

    store: Store
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
    jobs: Jobs = field(default_factory=Jobs)
    measures: Measures = field(default_factory=Measures)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.tokens)


def services_of(request: Request) -> Services:
    """The parts of the server that answers `request`."""
    return cast(Services, request.app.state.services)
