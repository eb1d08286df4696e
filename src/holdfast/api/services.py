"""The objects that the routes use. Each server creates them once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from fastapi import Request
from prometheus_client import CollectorRegistry, Histogram

from holdfast.api.attention import Attention
from holdfast.api.capacity import FreeGpus
from holdfast.api.hub import Hub
from holdfast.api.jobs import Jobs
from holdfast.api.security import AccessPolicy
from holdfast.api.sessions import LoginThrottle, SessionAudit, Sessions
from holdfast.api.store import IndexStore
from holdfast.api.tokens import TokenStore
from holdfast.api.watch import Watch
from holdfast.contracts.disk.paths import RunPaths

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LOG_TURNS: Final = 2
METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


class Measures:
    """Metrics that the server keeps about itself: response times since it started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Histogram(
            "holdfast_http_answer_seconds",
            "seconds until the response started, by method and status class",
            ["method", "status"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def answered(self, method: str, status: int, seconds: float) -> None:
        """Record one response. Unknown methods share one label, which bounds their number."""
        # A label for each method that a client invents would grow without limit.
        known = method if method in METHODS else "other"
        self._answers.labels(known, f"{status // 100}xx").observe(seconds)


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
    attention: Attention = field(init=False)
    free_gpus: FreeGpus = field(default_factory=FreeGpus)
    # Searches and downloads of logs need the CPU, so few of them run at a time.
    log_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOG_TURNS))

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.tokens)
        self.attention = Attention(self.store, self.watch, self.roots, self.tokens.path.parent)


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)
