"""Metrics that the server keeps about itself, for Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Histogram

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


class Measures:
    """A histogram of response times since the server started."""

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
