"""Figures that pages name are those of the code.

Each row has a page, a sentence's part with the figure taken from the code, and nothing else. A row
fails when the page or the constant changes alone.
"""

from __future__ import annotations

import re
from typing import Final

import pytest
from tests.docs.blocks import ROOT

from holdfast.api import connections, security, sessions
from holdfast.contracts.disk import journal, manifest, reading
from holdfast.contracts.spec.sections import Numerics, Supervision
from holdfast.contracts.states import Cause
from holdfast.flows.supervisor import limits, summary
from holdfast.trainer import importing, metrics
from holdfast.trainer.export import __main__ as export
from holdfast.trainer.mirror import transfer, worker
from holdfast.trainer.numerics import detector
from holdfast.trainer.trackers import sink
from holdfast.workers import health
from holdfast.workers.agent.watch import hangs, heartbeat, rank_watch, silence
from holdfast.workers.agent.watch.silence import LIMITS
from holdfast.workers.decisions import exclusions, grace, policy
from holdfast.workers.nodes import calibration, heartbeats
from holdfast.workers.runs import request
from holdfast.workers.schedulers import slurm_client

WORDS: Final = {
    2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight", 10: "ten", 12: "twelve",
}  # fmt: skip
MIB: Final = 1 << 20


def word(number: float) -> str:
    return WORDS[int(number)]


def default(model: type, key: str) -> float:
    return float(model.model_fields[key].default)  # type: ignore[attr-defined]


def phase_rows() -> list[str]:
    """The table of the limits of phases. `start` and its equals share a row."""
    shared = "`start`, `rendezvous`, `load`, `compile`"
    equal = {LIMITS[one] for one in re.findall(r"`(\w+)`", shared)}
    assert len(equal) == 1
    rows = {shared: equal.pop(), **{f"`{one}`": LIMITS[one] for one in ("train", "eval", "save")}}
    rows |= {f"`{one}`": LIMITS[one] for one in ("stop", "done")}
    return [f"| {name} | {one.default_s:g} s | {one.floor_s:g} s |" for name, one in rows.items()]


HANGS: Final = (
    f"reads the rank status {word(1 / rank_watch.TICK_S)} times a second",
    f"`supervision.heartbeat_s` ({default(Supervision, 'heartbeat_s'):g} s)",
    f"With more than {default(Supervision, 'heartbeat_s') / heartbeats.BEAT_S_PER_NODE:g} nodes",
    f"{heartbeats.BEAT_S_PER_NODE * 1000:g} s for each thousand nodes",
    *phase_rows(),
    f"never below {silence.END_MULTIPLE:g} × the phase's p99",
    (
        f"{silence.END_MULTIPLE:g} × the longest silence that occurred more than once, but this "
        f"second bound stops at {silence.RECURRING_S_MAX:g} s"
    ),
    f"Training counts as known after {word(silence.STEPS_ENOUGH)} measured steps",
    f"silent for {silence.SUSPECT_MULTIPLE:g} × p99 + {silence.SUSPECT_MARGIN_S:g} s",
    f"the {word(hangs.GROUNDLESS_KEPT)} newest suspicions",
    f"in at least {word(hangs.STILL_SAMPLES_MIN)} samples in a row",
    f"at least {silence.PROGRESS_BYTES // 1024} KiB since",
    f"has been dead for {silence.DEAD_PEER_S:g} s",
    f"did not run for {hangs.PAUSE_S:g} s",
    f"no rank has reported for half of the limit of `start` ({LIMITS['start'].default_s / 2:g} s",
    f"takes {word(hangs.START_STILL_SAMPLES + 1)} samples",
    f"`supervision.restarts_in_place` ({default(Supervision, 'restarts_in_place'):g})",
    f"the budget of `hang` ({policy.BUDGETS[Cause.HANG]})",
    f"in three windows of {word(hangs.STRAGGLER_WINDOW_S)} seconds in a row",
    f"more than {calibration.SLOW_FACTOR} × the median of its peers",
    f"has not changed for {word(heartbeats.BEATS_MISSED_MAX)} heartbeats",
    f"more than {heartbeats.CLOCK_SKEW_S:g} s in the future",
    f"jumps by {heartbeat.CLOCK_JUMP_S:g} s or more",
    f"`supervision.poll_s` ({default(Supervision, 'poll_s'):g} s)",
    f"logs progress: every {summary.PROGRESS_S:g} s",
)
TROUBLES: Final = (
    f"`supervision.restarts_in_place` ({default(Supervision, 'restarts_in_place'):g}) times",
    f"after {word(policy.BREAKER_ATTEMPTS)} attempts in a row",
    f"`supervision.attempts_max` ({default(Supervision, 'attempts_max'):g})",
    (
        f"`supervision.backoff_s` ({default(Supervision, 'backoff_s'):g} s) and doubles up to "
        f"{policy.BACKOFF_S_MAX / 60:g} minutes"
    ),
    f"for {word(exclusions.EXCLUDE_S / 3600)} hours",
    f"failed first in {word(exclusions.SUSPICIONS_MAX)} attempts",
    f"At most {exclusions.EXCLUDED_MAX} hosts",
)
PAGES: Final[dict[str, tuple[str, ...]]] = {
    "hangs": HANGS,
    "troubleshooting": TROUBLES,
    "alerts": (
        f"looks every {limits.LOOK_S:g} s",
        f"`gpu_hours_max`: {limits.GPU_HOURS_SHARE:.0%} of these".replace("%", " %"),
    ),
    "numerics": (
        (
            f"`window` is {default(Numerics, 'window'):g} and `spike_mads` is "
            f"{default(Numerics, 'spike_mads'):g} by default"
        ),
        f"at least {'a quarter' if detector.WINDOW_SHARE_MIN == 0.25 else '?'} of a window",
        f"`margin_steps` ({default(Numerics, 'margin_steps'):g})",
        f"`skip_steps` ({default(Numerics, 'skip_steps'):g})",
    ),
    "node-health": (
        f"for {word(exclusions.EXCLUDE_S / 3600)} hours",
        f"{health.FREE_GB:g} GB in `/dev/shm`",
        f"at most {health.CLOCK_S_MAX:g} s from the clock",
    ),
    "slurm-preemption": (
        (f"{grace.FACTOR} × (blocked + flush) + 2 × duration of a step + {grace.MARGIN_S:g} s"),
        f"N = `grace_s` + {request.WARNING_MARGIN_S} s",
        f"does not answer within {slurm_client.ANSWER_TIMEOUT_S:g} s",
    ),
    "weights": (
        f"shards of at most {export.SHARD_BYTES / 1e9:g} GB",
        f"in pieces of {importing.PIECE_BYTES / MIB:g} MiB",
    ),
    "session": (
        f"more than {metrics.CHECKPOINT_BYTES_MAX / 1024:g} KiB",
        f"waits up to {sink.CLOSE_TIMEOUT_S:g} s",
    ),
    "opaque-programs": (f"after {word(policy.BREAKER_ATTEMPTS)} attempts in a row",),
    "object-stores": (
        (
            f"tried {word(transfer.TRIES_MAX)} times, and a checkpoint in "
            f"{word(worker.ROUNDS_MAX)} rounds "
            f"{'a minute' if worker.ROUND_PAUSE_S == 60 else '?'} apart"
        ),
    ),
    "security": (
        (
            f"{reading.DOCUMENT_BYTES_MAX / MIB:g} MiB for documents, "
            f"{manifest.MANIFEST_BYTES_MAX / MIB:g} MiB for manifests, "
            f"{journal.JOURNAL_BYTES_MAX / MIB:g} MiB for a journal"
        ),
    ),
    "serve": (
        f"a session of {word(sessions.SESSION_S_MAX / 3600)} hours",
        f"must arrive within {connections.REQUEST_S_MAX:g} s",
        f"at most {security.BODY_BYTES_MAX / 1024:g} KiB",
    ),
}


@pytest.mark.parametrize(("page", "part"), [(p, one) for p, rows in PAGES.items() for one in rows])
def test_a_figure_of_a_page_is_that_of_the_code(page: str, part: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert part in text
