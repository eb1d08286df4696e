"""Metrics that the spec names: reports one that the program does not log.

The name refers to something that only the program knows, so it cannot be checked at submission. A
misspelt one would switch off the detection of bad losses, or leave `checkpoint.keep.best` without
anything to compare.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.attempt import RunRecord
from holdfast.contracts.spec.run_spec import RunSpec

KEEP_BEST: Final = "checkpoint.keep.best"
NUMERICS: Final = "supervision.numerics.metric"
BEST: Final = "Session(best=…)"
NAMES_MAX: Final = 8
# What does not happen until the program logs the metric.
_UNTIL: Final = {
    KEEP_BEST: "Until then, no checkpoint is deleted",
    NUMERICS: "Until then, bad losses are noticed only on other ranks that log or observe it",
    BEST: "Until then, session.best is empty",
}


class _Journal(Protocol):
    def __call__(self, kind: EventKind, **data: Any) -> None: ...


def named_metrics(record: RunRecord | None) -> dict[str, str]:
    """Return the metrics that the person named in the run's spec, by key.

    A person who set `supervision.numerics` relies on its metric even if it is the default one.
    """
    given = record.given if record is not None else None
    if record is None or given is None:
        return {}
    spec, found = RunSpec.read(record.spec), {}
    if spec.checkpoint.keep.best is not None:
        found[KEEP_BEST] = spec.checkpoint.keep.best.metric
    if given.get("supervision", {}).get("numerics"):
        found[NUMERICS] = spec.supervision.numerics.metric
    return found


class MetricWatch:
    """Knows which of the `wanted` metrics the program has logged in this launch or before.

    A step may have several lines. So a metric is missing when the next step is logged, a checkpoint
    is saved or the program ends without it. `wanted` has those that were not logged yet, by key.
    """

    def __init__(self, wanted: Mapping[str, str], journal: _Journal) -> None:
        self._journal = journal
        self.wanted = dict(wanted)
        self._missing: set[str] = set()
        self._logged: dict[str, None] = {}
        self._step: int | None = None

    def want(self, key: str, metric: str) -> None:
        """Watch another metric, which the program itself names."""
        self.wanted[key] = metric

    def look(self, step: int, names: Iterable[str]) -> None:
        """Take the names of one logged line."""
        if not self.wanted:
            return
        if self._step is not None and step != self._step:
            self.look_back()
        self._step = step
        self._logged.update(dict.fromkeys(names))
        self.meet(names)

    def meet(self, names: Iterable[str]) -> None:
        """Take the names of metrics that the program has given, now or before a resume."""
        known = {*names}
        for key, metric in list(self.wanted.items()):
            if metric in known:
                del self.wanted[key]
                if key in self._missing:
                    self._write(key, metric, f"the program logs {metric!r} now", is_missing=False)

    def look_back(self) -> None:
        """Report, once, every metric that has not been logged."""
        for key, metric in self.wanted.items():
            if key in self._missing:
                continue
            self._missing.add(key)
            near = difflib.get_close_matches(metric, self._logged, n=1)
            logged = ", ".join(list(self._logged)[:NAMES_MAX]) or "nothing"
            text = (
                f"{key} names the metric {metric!r}, which rank 0 has not logged yet. It logs "
                f"{logged}{f'; did you mean {near[0]}?' if near else '.'} {_UNTIL[key]}"
            )
            self._write(key, metric, text, is_missing=True)

    def _write(self, key: str, metric: str, text: str, *, is_missing: bool) -> None:
        report(f"holdfast: {text}", is_error=is_missing)
        self._journal(
            EventKind.METRIC_MISSING, key=key, metric=metric, missing=is_missing, text=text
        )
