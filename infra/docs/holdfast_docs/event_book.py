"""The meaning of each kind of journal line, the process that writes it and its fields.

The documentation is generated from this table. Tests compare it with the lines that the code writes
and with `holdfast.contracts.disk.journal`, which checks the lines that readers get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.contracts.account.goodput import Goodput
from holdfast.contracts.disk.journal import EventKind as Kind

INTEGER: Final = "integer"
NUMBER: Final = "number"
STRING: Final = "string"
BOOLEAN: Final = "boolean"
STRINGS: Final = "list of strings"
PAIRS: Final = "list of pairs of integers"
NUMBERS: Final = "list of numbers"
TABLES: Final = "list of tables"
TABLE: Final = "table"


@dataclass(frozen=True)
class Field:
    """One field. `meaning` is a description for the documentation."""

    type: str
    meaning: str


@dataclass(frozen=True)
class EventEntry:
    """One kind of line: its meaning, the process that writes it, and its possible fields."""

    meaning: str
    writer: str
    fields: tuple[str, ...]
    # Fields with another meaning here than in `FIELDS`.
    own: Mapping[str, Field] = field(default_factory=dict)

    @property
    def described(self) -> Mapping[str, Field]:
        """The fields by name."""
        return {name: self.own.get(name) or FIELDS[name] for name in self.fields}


# The meaning of each field, unless a kind of line has its own meaning for it.
FIELDS: Final[Mapping[str, Field]] = {
    "action": Field(STRING, "the action that was requested or decided"),
    "address": Field(STRING, "address that the request came from"),
    "after_attempt": Field(INTEGER, "newest attempt at that time; 0 before the first"),
    "argv": Field(STRINGS, "the program and its arguments"),
    "attempt": Field(INTEGER, "number of the attempt"),
    "blocked_s": Field(NUMBER, "seconds for which training was blocked"),
    "by": Field(STRING, "user, or rule, that acted"),
    "blamed": Field(NUMBERS, "ranks that the others wait for, by the flight records"),
    "bytes": Field(INTEGER, "size in bytes"),
    "cause": Field(STRING, "cause, as in troubleshooting by cause"),
    "changed_variables": Field(
        STRINGS, "variables that the program changed and that libraries read when they are loaded"
    ),
    "check": Field(STRING, "health check that failed, as in the spec"),
    "checkpoint": Field(STRING, "directory name of the checkpoint"),
    "cloud": Field(STRING, "`aws`, `gcp` or `azure`"),
    "command_digest": Field(STRING, "digest of the program's arguments and working directory"),
    "committed_step": Field(INTEGER, "step of the newest committed checkpoint"),
    "consumer": Field(STRING, "name in `on` of the spec"),
    "cost": Field(NUMBER, "price of all GPU hours, in `currency`"),
    "count": Field(INTEGER, "number of nodes; `nodes` may list fewer"),
    "counts_steps": Field(BOOLEAN, "false if only its saves show the program's steps"),
    "currency": Field(STRING, "currency of the prices"),
    "damaged": Field(STRINGS, "files whose bytes differ from the manifest"),
    "deadline": Field(NUMBER, "Unix seconds at which the scheduler or the cloud ends the job"),
    "delay_s": Field(NUMBER, "seconds to wait before the next attempt"),
    "detail": Field(STRING, "details from the source"),
    "digest": Field(STRING, "SHA-256 of all names, types, shapes and bytes of the tensors"),
    "drained": Field(STRINGS, "drained or slow nodes that the attempt has left"),
    "dumps": Field(STRINGS, "files with the stacks of ranks"),
    "ended_at": Field(NUMBER, "Unix seconds"),
    "ending": Field(STRING, "how the launch ended, such as `left`, `crashed` or `stopped`"),
    "error": Field(STRING, "error message"),
    "ettr": Field(NUMBER, "productive share of the time, from 0 to 1"),
    "evidence": Field(STRINGS, "sentences that explain the state"),
    "exclude": Field(STRINGS, "hosts that the next attempt does not use"),
    "excluded": Field(STRINGS, "checkpoints that a resume no longer uses"),
    "exit_code": Field(INTEGER, "exit status of torchrun"),
    "rank_exit_code": Field(
        INTEGER, "exit status of the rank that failed first; negative for the signal that killed it"
    ),
    "failed_host": Field(STRING, "host of the rank that failed first"),
    "failed_rank": Field(INTEGER, "rank that failed first"),
    "finding": Field(STRING, "which ranks wait, and which are missing"),
    "first_step": Field(INTEGER, "first step that was trained"),
    "flow_run": Field(STRING, "id of Prefect's flow run; empty without Prefect"),
    "flush_s": Field(NUMBER, "seconds from the staged step to the commit"),
    "flushing_s": Field(NUMBER, "seconds in which only the last checkpoint was written"),
    "format": Field(STRING, "format of the exported or imported files"),
    "good_step": Field(INTEGER, "step of the last good loss"),
    "gpu_hours": Field(NUMBER, "GPU hours held"),
    "gpus": Field(INTEGER, "number of GPUs"),
    "has_left": Field(BOOLEAN, "true when the program left its loop"),
    "host": Field(STRING, "host name"),
    "hosts": Field(STRINGS, "hosts of the attempt, node 0 first"),
    "hung_s": Field(NUMBER, "seconds in which ranks hung"),
    "is_spare": Field(BOOLEAN, "the node waited as a spare"),
    "joined": Field(STRINGS, "spare nodes that now take part"),
    "launch": Field(INTEGER, "number of the launch in its attempt"),
    "launches": Field(TABLES, "the launches of the attempt"),
    "interval_s": Field(NUMBER, "chosen seconds between checkpoints"),
    "into_run": Field(STRING, "name of the new run"),
    "into_uid": Field(STRING, "uid of the new run"),
    "is_declared": Field(BOOLEAN, "false when a framework ended the loop, not the program"),
    "is_whole": Field(BOOLEAN, "true when the program completed all that it promised"),
    "job_id": Field(STRING, "the scheduler's id of the job"),
    "last_step": Field(INTEGER, "last step that any rank finished"),
    "left_out": Field(STRINGS, "parts of the source that were not imported"),
    "limit": Field(NUMBER, "loss above which it counts as a spike"),
    "load_s": Field(NUMBER, "seconds that the load took"),
    "loading_s": Field(NUMBER, "seconds in which ranks loaded a checkpoint"),
    "loss": Field(NUMBER, "the loss; as text when it is not finite"),
    "lost": Field(STRINGS, "hosts without which the attempt continues"),
    "lost_hosts": Field(STRINGS, "hosts that were lost"),
    "lost_s": Field(NUMBER, "seconds of training that was done again"),
    "median": Field(NUMBER, "median of the losses before"),
    "name": Field(STRING, "name of the signal or of the request"),
    "newest_step": Field(INTEGER, "newest step that a rank has entered"),
    "node": Field(INTEGER, "number of the node, from 0"),
    "nodes": Field(INTEGER, "number of nodes"),
    "now": Field(BOOLEAN, "a run was cancelled without a last checkpoint"),
    "note": Field(STRING, "text from the user"),
    "notes": Field(STRINGS, "further messages of the resume"),
    "notice": Field(STRING, "what the cloud announces"),
    "noticed_at": Field(
        NUMBER, "Unix seconds at which the end was recorded, by the clock of that host"
    ),
    "order": Field(INTEGER, "number of the order; the first order of a run is 1"),
    "overtakes": Field(INTEGER, "number of the pending order that this one replaces"),
    "of_completed": Field(BOOLEAN, "true when the run had completed"),
    "ok": Field(BOOLEAN, "true if no byte has changed since the commit"),
    "on_demand_cost": Field(NUMBER, "price of the other GPU time without preemptions"),
    "outcome": Field(STRING, "`done`, or why it was refused or failed"),
    "own_s": Field(NUMBER, "seconds of the rank's own work in a step"),
    "passed": Field(BOOLEAN, "true when the limit was passed"),
    "path": Field(STRING, "path of the files"),
    "peers_s": Field(NUMBER, "the same, as the median of the other ranks"),
    "pid": Field(INTEGER, "process id"),
    "preemption_cost": Field(NUMBER, "price of `preemption_gpu_hours`"),
    "preemption_gpu_hours": Field(NUMBER, "GPU hours that preemptions cost"),
    "place": Field(INTEGER, "0 for the first choice, n for the n-th of `resources.fallbacks`"),
    "problem": Field(STRING, "what is wrong with the loss"),
    "promised": Field(BOOLEAN, "true when the text is what the program loops over"),
    "queued_s": Field(NUMBER, "seconds in the scheduler's queue"),
    "rank": Field(INTEGER, "number of the rank"),
    "reason": Field(STRING, "the reason, as text"),
    "restored": Field(STRINGS, "parts of the state that were restored"),
    "resumed_from": Field(STRING, "checkpoint that the first launch resumed from"),
    "role": Field(STRING, "`reader` or `operator`"),
    "rounds": Field(INTEGER, "number of proposals until all nodes agreed"),
    "saved": Field(NUMBER, "`on_demand_cost` minus `cost`"),
    "scheduler_state": Field(STRING, "the scheduler's name of the job's state"),
    "seconds": Field(NUMBER, "seconds that the copy took"),
    "sent_bytes": Field(INTEGER, "bytes that node 0 sent; the mirror copied the rest itself"),
    "settings": Field(TABLE, "`value` and `source` of each key that the program can give too"),
    "all_silent_s": Field(NUMBER, "seconds for which every rank has been silent"),
    "silent": Field(TABLES, "silent ranks, each with step, phase and seconds of silence"),
    "skip": Field(PAIRS, "data that is skipped from then on: first step and number of steps"),
    "skipped": Field(STRINGS, "newer checkpoints that were skipped, with the reason"),
    "snapshots_every": Field(INTEGER, "chosen steps between snapshots; 0 for none"),
    "source": Field(STRING, "what asked for the stop"),
    "started_at": Field(NUMBER, "Unix seconds"),
    "starts_at": Field(NUMBER, "Unix seconds at which the scheduler expects the job to start"),
    "starting_s": Field(NUMBER, "seconds until ranks began to load"),
    "state": Field(STRING, "state of the attempt or of the run"),
    "step": Field(INTEGER, "number of the optimizer step"),
    "step_s": Field(NUMBER, "seconds that a step takes"),
    "steps_lost": Field(INTEGER, "steps trained again"),
    "stop_committed_at": Field(NUMBER, "Unix seconds at which the last checkpoint was committed"),
    "stop_requested_at": Field(NUMBER, "Unix seconds at which the stop was requested"),
    "stopped_s": Field(NUMBER, "seconds without an attempt"),
    "tensors": Field(INTEGER, "number of tensors"),
    "successor": Field(INTEGER, "number of the job that waits to become the next attempt"),
    "restarts": Field(INTEGER, "how often Slurm has restarted the job, if it is a restart"),
    "text": Field(STRING, "a sentence for people"),
    "to": Field(STRING, "checkpoint that training goes back to"),
    "token": Field(STRING, "name of the token"),
    "total_s": Field(NUMBER, "seconds since the run was created"),
    "tries": Field(INTEGER, "how often it was started"),
    "traceback": Field(STRING, "traceback of the rank that failed first"),
    "tracker": Field(STRING, "`wandb`, `mlflow` or `tensorboard`, or a tracker of your own"),
    "tracker_id": Field(STRING, "the tracker's own id of its run"),
    "trained_until": Field(NUMBER, "Unix seconds of the last sign of training"),
    "hangs_from": Field(
        NUMBER, "Unix seconds of the last sign of life, if all ranks were silent at the end"
    ),
    "training_s": Field(NUMBER, "seconds of training that counts"),
    "unhealthy_hosts": Field(STRINGS, "hosts whose health checks failed"),
    "via": Field(STRING, "`cli`, `api` or `flow`: the part of Holdfast that took the order"),
    "url": Field(STRING, "location in the mirror"),
    "value": Field(NUMBER, "the measured value, in the unit of the limit"),
    "waited_s": Field(NUMBER, "seconds until all nodes agreed"),
    "way": Field(STRING, "how the attempt continues on other nodes: `spare` or `shrink`"),
    "window": Field(NUMBERS, "losses that the limit is computed from, oldest first"),
    "world_size": Field(INTEGER, "number of ranks"),
}
_COPY: Final = ("attempt", "checkpoint", "step", "url", "bytes", "seconds")
_LAUNCH: Final = ("attempt", "launch")
_HANG: Final = (*_LAUNCH, "silent", "finding", "dumps", "blamed")
_OUTCOME: Final = (
    *("hosts", "command_digest", "resumed_from", "first_step", "last_step", "committed_step"),
    *("started_at", "stop_requested_at", "stop_committed_at", "ended_at", "traceback"),
    *("failed_rank", "failed_host", "unhealthy_hosts", "launches"),
)

EVENTS: Final[Mapping[Kind, EventEntry]] = {
    Kind.SUPERVISED: EventEntry(
        "a supervisor took over the run", "supervisor", ("host", "pid", "flow_run")
    ),
    Kind.ATTEMPT_RESERVED: EventEntry(
        "the supervisor reserved the number of an attempt",
        "supervisor",
        ("attempt", "gpus", "nodes", "reason", "exclude", "place"),
    ),
    Kind.ATTEMPT_SUBMITTED: EventEntry(
        "the scheduler accepted the job of an attempt", "supervisor", ("attempt", "job_id")
    ),
    Kind.ATTEMPT_STATE: EventEntry(
        "a process that reconciles saw an attempt in a new state, or a new forecast of its start",
        "process that reconciles",
        ("attempt", "state", "detail", "starts_at"),
    ),
    Kind.ATTEMPT_ENDED: EventEntry(
        "an attempt ended. There is one such line for each attempt",
        "process that reconciles",
        (
            *("attempt", "state", "cause", "evidence", "job_id", "scheduler_state"),
            *("world_size", "lost_hosts", "noticed_at", *_OUTCOME),
        ),
    ),
    Kind.SUCCESSOR_SUBMITTED: EventEntry(
        "the scheduler accepted a successor, a job that waits in the queue while an attempt runs, "
        "or restarts the attempt's job",
        "supervisor",
        ("successor", "restarts", "attempt", "job_id", "gpus"),
        {"attempt": Field(INTEGER, "attempt after whose job the successor starts")},
    ),
    Kind.SUCCESSOR_ADOPTED: EventEntry(
        "a successor or a restarted job became the next attempt",
        "supervisor",
        ("successor", "restarts", "attempt", "job_id"),
    ),
    Kind.SUCCESSOR_WITHDRAWN: EventEntry(
        "a successor or a restarted job becomes no attempt, and the scheduler no longer has it",
        "supervisor",
        ("successor", "restarts", "attempt", "job_id", "reason"),
    ),
    Kind.DECISION: EventEntry(
        "the supervisor decided what comes next: relaunch, wait or stop",
        "supervisor",
        ("action", "after_attempt", "gpus", "exclude", "place", "delay_s", "reason"),
    ),
    Kind.OPERATOR_REQUEST: EventEntry(
        "an operator asked for a stop, pause, resume, cancel or relaunch, or Holdfast did: "
        "`by` is then `elastic.grow`, `resources.fallbacks` or `supervision.pending_timeout_min`",
        "command, server or supervisor",
        (
            *("order", "action", "by", "via", "after_attempt", "gpus", "of_completed"),
            *("overtakes", "reason", "place", "now"),
        ),
    ),
    Kind.ORDER_STATE: EventEntry(
        "why an order is still pending, or why it failed",
        "command, server or supervisor",
        ("order", "state", "detail"),
    ),
    Kind.RUN_ENDED: EventEntry("the run ended", "supervisor", ("state", "after_attempt", "reason")),
    Kind.PINNED: EventEntry(
        "an operator pinned a checkpoint",
        "command or server",
        ("order", "checkpoint", "by", "via", "note"),
    ),
    Kind.UNPINNED: EventEntry(
        "an operator removed a pin", "command or server", ("order", "checkpoint", "by", "via")
    ),
    Kind.CHECKPOINT_DELETED: EventEntry(
        "a checkpoint is about to be deleted, or an opaque program has deleted or replaced its own",
        "process that prunes, or the agent",
        ("checkpoint", "reason", "by"),
    ),
    Kind.FORKED: EventEntry(
        "a new run was forked from a checkpoint",
        "command or server",
        ("checkpoint", "into_uid", "into_run"),
    ),
    Kind.EXPORTED: EventEntry(
        "a checkpoint was exported", "command or server", ("checkpoint", "format", "path")
    ),
    Kind.IMPORTED: EventEntry(
        "weights of another program became the run's checkpoint",
        "command",
        ("checkpoint", "by", "format", "path", "bytes", "tensors", "digest", "left_out"),
    ),
    Kind.ROLLED_BACK: EventEntry(
        "after a bad loss, or because a checkpoint is blamed for crashes, training goes back to an "
        "older checkpoint",
        "rank 0, or for a blamed checkpoint the agent",
        (*_LAUNCH, "to", "excluded", "skip", "step", "crash", "launches", "reason"),
        {
            "crash": Field(STRING, "in which way the launches crashed"),
            "launches": Field(PAIRS, "attempt and launch of each crash"),
        },
    ),
    Kind.NUMERICS: EventEntry(
        "a loss was bad, and the policy chose this action",
        "rank 0",
        (
            *(*_LAUNCH, "problem", "step", "loss", "good_step", "window", "median", "limit"),
            *("rank", "action", "reason", "skip"),
        ),
    ),
    Kind.CLAIMED: EventEntry(
        "the agent of node 0 claimed the attempt",
        "agent",
        ("attempt", "job_id", "host", "pid"),
    ),
    Kind.LAUNCH_STARTED: EventEntry(
        "a launch started, after a loss or drain of nodes with `way`, `nodes`, `lost` and `joined`",
        "agent",
        (*_LAUNCH, "world_size", "way", "nodes", "lost", "joined", "drained", "slow", "reason"),
        {"slow": Field(STRINGS, "those of `drained` that were left because they are slow")},
    ),
    Kind.LAUNCH_ENDED: EventEntry(
        "a launch ended; after a crash, with the rank that failed first, and its host and exit "
        "code, which is negative for a signal",
        "agent",
        (
            *(*_LAUNCH, "ending", "exit_code", "last_step", "trained_until", "hangs_from"),
            *("rank", "host", "rank_exit_code", "cause", "crash"),
        ),
        {"crash": Field(STRING, "the error without its numbers, and the program's line")},
    ),
    Kind.SIGNAL: EventEntry(
        "a signal, a stop file or the time limit asked the attempt to stop",
        "agent",
        (*_LAUNCH, "source", "name", "cause", "deadline", "detail"),
    ),
    Kind.NOTICE: EventEntry(
        "a cloud announced an interruption",
        "agent",
        ("attempt", "cloud", "notice", "host", "deadline", "detail"),
    ),
    Kind.STOP_AGREED: EventEntry(
        "all nodes agreed on the step after which ranks stop",
        "agent",
        (*_LAUNCH, "step", "rounds", "waited_s"),
    ),
    Kind.STOP_FAILED: EventEntry(
        "the nodes found no step to stop after", "agent", (*_LAUNCH, "reason", "newest_step")
    ),
    Kind.LOADING: EventEntry(
        "the ranks begin to load a checkpoint", "rank 0", (*_LAUNCH, "checkpoint", "step")
    ),
    Kind.RESUMED: EventEntry(
        "the program resumed, or began at step 0",
        "rank 0, or for an opaque program the agent",
        (
            *(*_LAUNCH, "checkpoint", "step", "skipped", "command_digest", "argv", "world_size"),
            *("restored", "notes", "load_s", "changed_variables", "counts_steps"),
        ),
    ),
    Kind.STAGED: EventEntry(
        "all ranks copied a step into their staging slots",
        "rank 0",
        (*_LAUNCH, "checkpoint", "step", "bytes", "blocked_s", "reason"),
    ),
    Kind.COMMITTED: EventEntry(
        "a checkpoint is committed: its manifest is durable",
        "rank 0, or after a crash or for an opaque program the agent",
        (*_LAUNCH, "checkpoint", "step", "bytes", "flush_s", "reason"),
    ),
    Kind.SAVE_FAILED: EventEntry(
        "a save was not committed",
        "rank 0, or after a lost node the agent",
        (*_LAUNCH, "checkpoint", "step", "error"),
    ),
    Kind.MIRRORED: EventEntry("the mirror has a checkpoint", "flusher", (*_COPY, "sent_bytes")),
    Kind.MIRROR_FAILED: EventEntry(
        "a checkpoint was not copied to the mirror",
        "flusher",
        ("attempt", "checkpoint", "step", "url", "error"),
    ),
    Kind.FETCHED: EventEntry(
        "a resume fetched a checkpoint from the mirror", "rank 0", (*_LAUNCH, *_COPY[1:], "path")
    ),
    Kind.VERIFIED: EventEntry(
        "every byte of a checkpoint was read and compared with the manifest",
        "command or server",
        ("checkpoint", "ok", "by", "bytes", "damaged"),
    ),
    Kind.NODE_LOST: EventEntry(
        "a node of the attempt was lost",
        "agent, or process that reconciles",
        ("attempt", "node", "host", "detail", "is_spare"),
    ),
    Kind.GOODPUT: EventEntry(
        "where the run's time went, up to the end of an attempt",
        "process that reconciles",
        ("attempt", *(one.name for one in dataclasses.fields(Goodput))),
    ),
    Kind.HANG_SUSPECTED: EventEntry(
        "ranks are silent, and their stacks are taken", "agent", (*_HANG, "all_silent_s")
    ),
    Kind.HANG_CLEARED: EventEntry(
        "the ranks of the last suspicion are no longer silent", "agent", (*_LAUNCH, "dumps")
    ),
    Kind.HANG_CONFIRMED: EventEntry(
        "the launch hangs, and node 0 ends it", "agent", (*_HANG, "reason")
    ),
    Kind.STRAGGLER: EventEntry(
        "one rank is slower than the others",
        "agent",
        (*_LAUNCH, "rank", "own_s", "peers_s", "step_s"),
    ),
    Kind.NODE_SILENT: EventEntry(
        "heartbeats of nodes stopped, or came again",
        "supervisor",
        ("attempt", "nodes", "count", "silent"),
        {
            "nodes": Field(STRINGS, "host names, 16 at most"),
            "silent": Field(BOOLEAN, "true when the heartbeats stopped"),
        },
    ),
    Kind.NODE_SLOW: EventEntry(
        "a node has slowed the others down for minutes, or no longer does",
        "agent",
        (*_LAUNCH, "host", "ranks", "slow", "excess", "cost_share", "asks", "text"),
        {
            "ranks": Field(NUMBERS, "its slow ranks"),
            "slow": Field(BOOLEAN, "false once the node is as fast as usual"),
            "excess": Field(NUMBER, "by which share the ranks work longer per step, such as 0.2"),
            "cost_share": Field(NUMBER, "share of a step in which the others wait for them"),
            "asks": Field(BOOLEAN, "true if `health.slowdown` is `ask`"),
        },
    ),
    Kind.LINK_SLOW: EventEntry(
        "all ranks have waited longer for minutes, although no node works longer, or no longer do",
        "agent",
        (*_LAUNCH, "hosts", "slow", "excess", "asks", "text"),
        {
            "hosts": Field(STRINGS, "the node or the pair that the paired test named, if any"),
            "slow": Field(BOOLEAN, "false once steps take as long as usual"),
            "excess": Field(NUMBER, "by which share a step is longer than usual, such as 0.2"),
            "asks": Field(BOOLEAN, "true if `health.slowdown` is `ask`"),
        },
    ),
    Kind.PROTECTION: EventEntry(
        "the loss of a node would set the launch back further than expected, or no longer would",
        "agent",
        (*_LAUNCH, "host", "lacks", "unprotected"),
        {
            "host": Field(STRING, "the node without copies; missing if it concerns all nodes"),
            "lacks": Field(STRING, "`copies` of snapshots at a neighbour, or `spares`"),
            "unprotected": Field(STRING, "why; empty once the launch is protected again"),
        },
    ),
    Kind.SLOWDOWN_TESTED: EventEntry(
        "all ranks measured their nodes and the links between them, at a step boundary",
        "rank 0",
        (*_LAUNCH, "step", "took_s", "host_times", "device_times", "pair_rates"),
        {
            "took_s": Field(NUMBER, "how long training waited"),
            "host_times": Field(NUMBERS, "seconds of a fixed piece of work in Python, by node"),
            "device_times": Field(NUMBERS, "seconds of a fixed matrix product, by node"),
            "pair_rates": Field(
                NUMBERS, "MB/s between each node and the next one, 0 if it was not measured"
            ),
        },
    ),
    Kind.NODE_UNHEALTHY: EventEntry(
        "a health check failed on a node", "agent", ("attempt", "host", "check", "detail")
    ),
    Kind.TRACKED: EventEntry(
        "a session opened its run of an experiment tracker",
        "rank 0",
        (*_LAUNCH, "tracker", "tracker_id", "url"),
        {"url": Field(STRING, "web page of the tracker's run, if it has one")},
    ),
    Kind.LIMIT_PASSED: EventEntry(
        "a limit of `alerts` was passed, or the run is within it again",
        "supervisor",
        ("attempt", "limit", "passed", "value", "text"),
        {"limit": Field(STRING, "key of `alerts`, such as `ettr_min`")},
    ),
    Kind.ALERT_ACKNOWLEDGED: EventEntry(
        "a user acknowledged something that needs attention",
        "server",
        ("alert", "by", "note"),
        {"alert": Field(STRING, "id of the problem in `GET /api/v1/attention`")},
    ),
    Kind.METRIC_MISSING: EventEntry(
        "the program has not logged a metric that the spec names, or it does now",
        "rank 0",
        (*_LAUNCH, "key", "metric", "missing", "text"),
        {
            "key": Field(STRING, "key of the spec that names the metric"),
            "metric": Field(STRING, "name of the metric"),
            "missing": Field(BOOLEAN, "false once the program logs it"),
        },
    ),
    Kind.METRIC: EventEntry(
        "a metric of a committed checkpoint was reported",
        "command, server or supervisor",
        ("checkpoint", "step", "metric", "value", "by", "consumer"),
        {
            "metric": Field(STRING, "name of the metric"),
            "value": Field(NUMBER, "the number, as text if it is not finite"),
        },
    ),
    Kind.ANNOTATED: EventEntry(
        "a user changed the tags or the note of a run, or of its `checkpoint`",
        "command or server",
        ("checkpoint", "tags_added", "tags_removed", "note", "by", "via"),
        {
            "tags_added": Field(STRINGS, "tags that it has from now on"),
            "tags_removed": Field(STRINGS, "tags that it no longer has"),
            "note": Field(STRING, "the new note; empty if the note was removed"),
            "via": Field(STRING, "`cli` or `api`: the part of Holdfast that took the change"),
        },
    ),
    Kind.CONSUMER: EventEntry(
        "a consumer of a checkpoint is due, was started or has ended. The newest line about a "
        "consumer and a checkpoint counts",
        "supervisor",
        ("consumer", "checkpoint", "step", "state", "start", "tries", "reason"),
        {
            "state": Field(STRING, "`due`, `started`, `failed`, `done` or `given_up`"),
            "start": Field(INTEGER, "number of its newest start, and of its folder; 0 before"),
        },
    ),
    Kind.AUDIT: EventEntry(
        "a user acted through the server. Fields of the action itself follow",
        "server",
        ("action", "outcome", "by", "role", "address", "token"),
    ),
    Kind.NOTE: EventEntry(
        "something that a reader of the run may want to know",
        "any process",
        (
            *(*_LAUNCH, "text", "host", "checkpoint", "step", "promised", "has_left", "is_whole"),
            *("is_declared", "interval_s", "snapshots_every", "settings", "released"),
        ),
        {"released": Field(INTEGER, "the number of a node that takes no further part")},
    ),
}
