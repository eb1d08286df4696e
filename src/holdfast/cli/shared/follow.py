"""The option `--wait`: follow a run on disk until it has ended."""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from holdfast.cli.shared import index, output
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.supervision import is_supervised
from holdfast.flows.start import Started, log_tail
from holdfast.flows.supervisor.summary import describe_progress, end_reason, summarize

FOLLOW_S_MAX: Final = 366 * 24 * 3600.0
POLL_S: Final = 1.0
ASK_FLOW_S: Final = 10.0
ORPHAN_S: Final = 15.0
# A supervisor that still deletes large checkpoints needs longer than the usual second.
LAST_TURN_S: Final = 60.0


def follow_run(paths: RunPaths, started: Started, *, show: bool) -> dict[str, Any]:
    """Wait until the run has ended and return its summary. Ctrl-C does not stop the run.

    Raises `ServiceError` if a live run has lost its supervisor, and after `FOLLOW_S_MAX` seconds.
    """
    ends_at = time.monotonic() + FOLLOW_S_MAX
    watch = _FlowWatch(paths, started)
    with _Display(show) as display:
        while time.monotonic() < ends_at:
            history = index.look_at(paths)
            display.update(history)
            if not history.state.is_live:
                _wait_for_last_turn(paths)
                return _summary(index.look_at(paths))
            watch.check()
            time.sleep(POLL_S)
    raise ServiceError(
        f"{paths.name} has not ended within {FOLLOW_S_MAX:.0f} s, the limit of --wait. Submit the "
        "same spec with --wait again."
    )


def _wait_for_last_turn(paths: RunPaths) -> None:
    """Wait until the supervisor exits: after the run's end, it still prunes checkpoints."""
    ends_at = time.monotonic() + LAST_TURN_S
    while is_supervised(paths.flow_lock) and time.monotonic() < ends_at:
        time.sleep(POLL_S)


def _summary(history: RunHistory) -> dict[str, Any]:
    return summarize(history, end_reason(history))


class _FlowWatch:
    """Detects that the supervisor has exited while the run is still live."""

    def __init__(self, paths: RunPaths, started: Started) -> None:
        self._paths = paths
        self._started = started
        self._asked_at = time.monotonic()
        self._gone_since: float | None = None

    def check(self) -> None:
        """Raise `ServiceError` if the supervisor has been gone for `ORPHAN_S` seconds."""
        gone = self._why_gone()
        now = time.monotonic()
        if gone is None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since > ORPHAN_S:
            raise ServiceError(
                f"{self._paths.name} is live, but its supervisor has ended: {gone}\nSubmit the "
                "same spec again to start a new supervisor for this run."
            )

    def _why_gone(self) -> str | None:
        process = self._started.process
        if process is not None and process.poll() is not None:
            if is_supervised(self._paths.flow_lock) is not False:
                return None
            log = self._started.log
            return f"exit status {process.returncode}\n{log_tail(log) if log else ''}"
        if self._started.service is not None:
            # It takes up the run within a second.
            is_watched = is_supervised(self._paths.flow_lock) is not False
            return None if is_watched else f"the supervisor, {self._started.service}, has ended"
        if self._started.flow_run is None or process is not None:
            return None
        return self._flow_run_ended()

    def _flow_run_ended(self) -> str | None:
        """Return how Prefect's flow run ended, or None if it has not, or if unknown.

        Asks the API at most every `ASK_FLOW_S` seconds.
        """
        from holdfast.flows.deployments import flow_run_state

        now = time.monotonic()
        if self._gone_since is None and now - self._asked_at < ASK_FLOW_S:
            return None
        self._asked_at = now
        assert self._started.flow_run is not None
        try:
            name, is_final = flow_run_state(self._started.flow_run)
        except ServiceError:
            return None
        if not is_final or is_supervised(self._paths.flow_lock) is not False:
            return None
        return f"Prefect's flow run {self._started.flow_run} is {name}"


class _Display:
    """The progress display: one changing line on a terminal, else a new line for each change."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._last: object = None
        self._on_terminal = sys.stderr.isatty()
        self._status: Any = None

    def __enter__(self) -> _Display:
        if self._show and self._on_terminal:
            from rich.console import Console

            self._status = Console(stderr=True).status("waiting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, history: RunHistory) -> None:
        if not self._show:
            return
        progress = describe_progress(history)
        if self._status is not None:
            self._status.update(progress.text)
        elif progress.key != self._last:
            output.warn(progress.text)
        self._last = progress.key
