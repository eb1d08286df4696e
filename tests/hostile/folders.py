"""Run folders as a hostile user could leave them, each with one bad thing in it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind, journal_lock
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.states import AttemptState, Cause

NINES: Final = "9" * 40
ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
SPARSE_BYTES: Final = 20 << 30
CANARY: Final = "canary-5d1c"


@dataclass(frozen=True)
class Victim:
    """The attacker's target: another user's files, run and mirror; exploits write to `owned`."""

    home: Path
    run: Path
    uid: str
    mirror: Path
    url: str
    owned: Path

    @property
    def profile(self) -> Path:
        return self.home / "profile"

    @property
    def secret(self) -> Path:
        return self.home / "secret"


@dataclass(frozen=True)
class Target:
    """The folder that is made hostile: a run of two attempts, two checkpoints and a log."""

    folder: RunFolder
    victim: Victim

    @property
    def root(self) -> Path:
        return self.folder.paths.directory

    @property
    def attempt(self) -> AttemptPaths:
        return self.folder.paths.attempt(1)

    @property
    def checkpoint(self) -> Path:
        return self.folder.paths.list_checkpoints()[0]

    @property
    def log(self) -> Path:
        return self.attempt.rank_log(0, 1, 0)


def plain_run(root: Path, name: str, uid: str, **spec: Any) -> RunFolder:
    """A normal run: one attempt that ended, one that is running, two checkpoints, a log."""
    folder = RunFolder(root, name, uid, {"resources": {"gpus_per_node": 2}, **spec})
    attempt = folder.submit(1, 2, 1_700_000_000.0)
    folder.claim(1, 1_700_000_001.0)
    folder.launch(1, 1, 0, None)
    first = folder.commit(10, 1)
    folder.commit(20, 1, parent=f"{name}:{first}")
    folder.finish(1, AttemptState.PREEMPTED, Cause.PREEMPTION, 20, 1_700_000_100.0)
    folder.submit(2, 2, 1_700_000_200.0)
    log = attempt.rank_log(0, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    for empty in (folder.paths.tombstones, folder.paths.metrics):
        empty.mkdir(exist_ok=True)
    return folder


def _put(path: Path, make: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    make(path)


def _each(work: Callable[[Any], None], *items: Any) -> None:
    for item in items:
        work(item)


def _pipe(path: Path) -> None:
    _put(path, os.mkfifo)


def _pipe_document(target: Target, name: str) -> None:
    _pipe(getattr(target.attempt, name))


def _link_document(target: Target, name: str, to: str) -> None:
    _link(getattr(target.attempt, name), to)


def _replace_document(target: Target, name: str) -> None:
    _put(getattr(target.attempt, name), os.mkdir)


def _deepen_document(target: Target, name: str) -> None:
    _put(getattr(target.attempt, name), lambda at: at.write_text("[" * 100_000))


def _sparse(path: Path) -> None:
    def make(at: Path) -> None:
        with open(at, "wb") as stream:
            stream.truncate(SPARSE_BYTES)

    _put(path, make)


def _link(path: Path, target: Path | str) -> None:
    _put(path, lambda at: at.symlink_to(target))


def _replace_folder(path: Path, target: Path) -> None:
    if path.exists():
        path.rename(path.with_name(f"{path.name}.aside"))
    path.symlink_to(target)


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, **changes}))


def _edit_spec(target: Target, record: dict[str, Any] | None = None, **changes: Any) -> None:
    path = target.folder.paths.spec
    spec = json.loads(path.read_bytes())["spec"]
    for key, value in changes.items():
        spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
    _edit(path, spec=spec, **(record or {}))


def _lines(path: Path, *documents: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as stream:
        for number, document in enumerate(documents):
            line = {"writer": "flow", "opening": 90, "sequence": number, "time": 1.7e9}
            stream.write(json.dumps({**line, **document}) + "\n")


def _event(kind: EventKind, **data: Any) -> dict[str, Any]:
    return {"kind": kind.value, "data": data}


def _set_interpreter(target: Target) -> None:
    script = target.root / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {target.victim.owned}/python\n")
    script.chmod(0o755)
    _edit_spec(target, launch={"python": str(script)})


def _copy_identity(target: Target) -> None:
    _edit_spec(
        target,
        {"run": target.victim.run.name, "uid": target.victim.uid},
        checkpoint={"keep": {"last": 1}},
    )


def _claim_mirror(target: Target) -> None:
    record = {"uid": target.victim.uid}
    mirror = f"file://{target.victim.mirror}"
    _edit_spec(target, record, checkpoint={"mirror": mirror, "keep": {"last": 1}})
    for checkpoint in target.folder.paths.list_checkpoints():
        tombstone = target.folder.paths.tombstone(f"{checkpoint.name}")
        tombstone.write_bytes((checkpoint / "manifest.json").read_bytes())


def _forge_mirror_record(target: Target) -> None:
    (target.checkpoint / "__0_0.distcp").unlink()
    record = {"url": target.victim.url, "bytes": 1, "seconds": 1.0, "mirrored_at": 1.0}
    (target.checkpoint / "mirrored.json").write_text(json.dumps(record))


def _control_characters(target: Target) -> None:
    """Texts that are refused in new specs, but are read from recorded ones."""
    words = "a\x1b]0;owned\x07\nsrun evil"
    _edit_spec(
        target,
        resources={"executor": "slurm", "partition": words, "extra": {"exclude": words}},
        launch={"srun": [words, "--het-group=1"]},
        cost={"currency": words},
        unheard_of={"key": words},
    )


def _spec_mirror(target: Target) -> None:
    _forge_mirror_record(target)
    _edit_spec(target, checkpoint={"mirror": f"{target.victim.url}/m", "local": "/tmp/none"})


def _forged_types(target: Target) -> None:
    wrong: list[Any] = ["x", {}, [], 10**40, 1e300, True, None]
    kinds = [_event(kind, **dict.fromkeys(_KEYS, value)) for kind in EventKind for value in wrong]
    bare = [_event(kind) for kind in EventKind]
    _lines(target.folder.paths.journal / "flow.jsonl", *kinds, *bare)


def _forged_times(target: Target) -> None:
    events = [
        {**_event(EventKind.NOTE, text="x"), "time": time}
        for time in (1e300, -1e300, 1e12, float("inf"), float("nan"), 10**30)
    ]
    numbers = [
        {**_event(EventKind.NOTE, text="x"), "opening": number, "sequence": number}
        for number in (10**40, -1, 1e30)
    ]
    _lines(target.folder.paths.journal / "flow.jsonl", *events, *numbers)


def _escapes(target: Target) -> None:
    said = ESCAPES
    target.log.write_text(said)
    _lines(
        target.folder.paths.journal / "flow.jsonl",
        _event(EventKind.OPERATOR_REQUEST, action="stop", by=said, after_attempt=2),
        _event(EventKind.SAVE_FAILED, checkpoint=said, step=1, error=said),
        _event(EventKind.HANG_CONFIRMED, attempt=1, finding=said, dumps=[said]),
        _event(EventKind.EXPORTED, checkpoint=target.checkpoint.name, path=said, format=said),
        _event(EventKind.METRIC, checkpoint=target.checkpoint.name, metric=said, value="nan"),
        _event(EventKind.PINNED, checkpoint=target.checkpoint.name, by=said, note=said),
        _event(EventKind.ATTEMPT_ENDED, attempt=2, state="failed", cause=said, evidence=[said]),
        _event(EventKind.FORKED, checkpoint=target.checkpoint.name, into_run=said, into_uid=said),
    )
    _edit(target.attempt.outcome, hosts=[said], traceback=said)
    _edit(target.folder.paths.spec, created_by=said)


def _hard_link(target: Target) -> None:
    # If the kernel forbids hard links to other users' files, the folder stays a normal one.
    for writer in ("api", "cli"):
        with contextlib.suppress(PermissionError):
            os.link(target.victim.profile, target.folder.paths.journal_of(writer))


def _odd_file_names(target: Target) -> None:
    """File names that are not UTF-8, or have control characters."""
    for parent in (target.folder.paths.journal, target.attempt.logs, target.root):
        for name in (b"\xff\xfe.jsonl", b"\x1b[31m.jsonl", b"a\nb.jsonl"):
            Path(os.fsdecode(os.fsencode(parent) + b"/" + name)).write_text("{}\n")


def _create_lock_files(target: Target) -> None:
    # The test process takes the locks.
    cli = target.folder.paths.journal_of("cli")
    for path in (target.folder.paths.orders_lock, journal_lock(cli)):
        path.touch()


def _link_removing_folder(target: Target) -> None:
    """Links that would make a deletion remove the victim's files, if it followed them."""
    target.folder.paths.removing("step-00000001.a0001.l01").symlink_to(target.victim.home)
    _edit_spec(target, checkpoint={"keep": {"last": 1}})
    inside = target.checkpoint / "deep"
    inside.symlink_to(target.victim.home)


def _link_checkpoints(target: Target) -> None:
    _edit_spec(target, checkpoint={"keep": {"last": 1}})
    _replace_folder(target.folder.paths.checkpoints, target.victim.run / "checkpoints")


def _link_tombstones(target: Target) -> None:
    _edit_spec(target, checkpoint={"keep": {"last": 1}})
    _replace_folder(target.folder.paths.tombstones, target.victim.home)


def _live_pending(target: Target) -> None:
    """A paused run that waits for a resume."""
    event = _event(EventKind.OPERATOR_REQUEST, action="pause", by="x", after_attempt=9)
    _lines(target.folder.paths.journal / "flow.jsonl", event)
    _set_interpreter(target)


def _many(target: Target) -> None:
    for number in range(3, 300):
        target.folder.paths.attempt(number).directory.mkdir()


_KEYS: Final = (
    *("attempt", "launch", "step", "checkpoint", "state", "cause", "action", "host", "nodes"),
    *("after_attempt", "evidence", "excluded", "skip", "skipped", "dumps", "silent", "own_s"),
    *("peers_s", "rank", "finding", "reason", "error", "path", "to", "hosts", "ended_at", "gpus"),
    *("limit", "passed", "text", "key", "metric", "missing"),
)
# How a plain folder is made hostile, by name.
Kinds = Mapping[str, Callable[[Target], object]]
_HOSTILE: Final[dict[str, Callable[[Target], object]]] = {
    "attempt-nines": lambda t: (t.folder.paths.attempts / NINES).mkdir(),
    "attempt-zeros": lambda t: (t.folder.paths.attempts / "000000001").mkdir(),
    "attempts-many": _many,
    "bytes-huge": lambda t: _edit_entry(t, bytes=10**30),
    "blocks-zero": lambda t: _edit_entry(t, block_bytes=1, bytes=10**15, blocks="ab"),
    "world-huge": lambda t: _edit(t.attempt.request, nodes=10**40),
    "outcome-huge": lambda t: _edit(t.attempt.outcome, world_size=10**40),
    "outcome-times": lambda t: _edit(t.attempt.outcome, ended_at=1e300, started_at=float("nan")),
    "step-huge": lambda t: (t.folder.paths.checkpoints / f"step-{NINES}.a0001.l01").mkdir(),
    **{
        f"pipe-{name}": partial(_pipe_document, name=name)
        for name in ("request", "submission", "claim", "outcome", "stop")
    },
    "pipe-spec": lambda t: _pipe(t.folder.paths.spec),
    "pipe-journal": lambda t: _pipe(t.folder.paths.journal_of("flow")),
    "pipe-own-journals": lambda t: _each(
        lambda w: _pipe(t.folder.paths.journal_of(w)), "cli", "api"
    ),
    "pipe-node-journal": lambda t: _pipe(t.attempt.journal / "rank0.jsonl"),
    "pipe-tombstone": lambda t: _pipe(t.folder.paths.tombstone("step-00000005.a0001.l01")),
    "pipe-log": lambda t: _pipe(t.log),
    "pipe-data": lambda t: _pipe(t.checkpoint / "__0_0.distcp"),
    "pipe-metadata": lambda t: _pipe(t.checkpoint / ".metadata"),
    "pipe-manifest": lambda t: _pipe(t.checkpoint / "manifest.json"),
    "pipe-mirrored": lambda t: _pipe(t.checkpoint / "mirrored.json"),
    "pipe-heartbeat": lambda t: _pipe(t.folder.paths.attempt(2).heartbeats / "nodes-0.json"),
    "pipe-metrics": lambda t: _pipe(t.folder.paths.metrics_of(1, 1)),
    "pipe-locks": lambda t: _each(
        lambda p: _pipe(p), t.folder.paths.orders_lock, t.folder.paths.flow_lock
    ),
    "zero-journal": lambda t: _link(t.folder.paths.journal_of("flow"), "/dev/zero"),
    "sparse-journal": lambda t: _sparse(t.folder.paths.journal_of("flow")),
    "sparse-request": lambda t: _sparse(t.attempt.request),
    "sparse-spec": lambda t: _sparse(t.folder.paths.spec),
    "sparse-manifest": lambda t: _sparse(t.checkpoint / "manifest.json"),
    "sparse-data": lambda t: _sparse(t.checkpoint / "__0_0.distcp"),
    "sparse-log": lambda t: _sparse(t.log),
    "sparse-metrics": lambda t: _sparse(t.folder.paths.metrics_of(1, 1)),
    "sparse-tombstone": lambda t: _sparse(t.folder.paths.tombstone("step-00000005.a0001.l01")),
    "journal-to-profile": lambda t: _each(
        lambda writer: _link(t.folder.paths.journal_of(writer), t.victim.profile), "api", "cli"
    ),
    "journal-to-home": lambda t: _replace_folder(t.folder.paths.journal, t.victim.home),
    "journal-hard-link": _hard_link,
    "lock-to-home": lambda t: _link(t.folder.paths.orders_lock, t.victim.home / "lock"),
    "attempts-to-run": lambda t: _replace_folder(
        t.folder.paths.attempts, t.victim.run / "attempts"
    ),
    "attempt-to-run": lambda t: _replace_folder(
        t.folder.paths.attempt(2).directory, t.victim.run / "attempts" / "0002"
    ),
    "checkpoints-to-run": _link_checkpoints,
    "tombstones-to-home": _link_tombstones,
    "log-to-secret": lambda t: _link(t.log, t.victim.secret),
    "logs-to-home": lambda t: _replace_folder(t.log.parent, t.victim.home),
    "outcome-to-secret": lambda t: _link(t.attempt.outcome, t.victim.secret),
    "spec-to-run": lambda t: _link(t.folder.paths.spec, t.victim.run / "spec.json"),
    "data-to-secret": lambda t: _link(t.checkpoint / "__0_0.distcp", t.victim.secret),
    "source-to-home": lambda t: _edit_entry(t, source=str(t.victim.home), path="secret"),
    "checkpoint-loop": lambda t: _replace_folder(t.checkpoint, t.checkpoint),
    "data-loop": lambda t: _link(t.checkpoint / "__0_0.distcp", "__0_0.distcp"),
    "spec-loop": lambda t: _link(t.folder.paths.spec, "spec.json"),
    "removing-to-home": _link_removing_folder,
    "python": _set_interpreter,
    "paused-python": _live_pending,
    "name-of-another": _copy_identity,
    "uid-of-another": lambda t: _edit_spec(t, {"uid": t.victim.uid}),
    "mirror-of-another": _claim_mirror,
    "mirrored-elsewhere": _forge_mirror_record,
    "mirror-elsewhere": _spec_mirror,
    "cause-unknown": lambda t: _lines(
        t.folder.paths.journal / "flow.jsonl",
        _event(EventKind.ATTEMPT_ENDED, attempt=2, state="failed", cause="because"),
    ),
    "state-unknown": lambda t: _lines(
        t.folder.paths.journal / "flow.jsonl",
        _event(EventKind.ATTEMPT_STATE, attempt=2, state="nowhere"),
    ),
    "facts-forged": _forged_types,
    "times-forged": _forged_times,
    "escapes": _escapes,
    "names": _odd_file_names,
    "locks-held": _create_lock_files,
    "spec-no-json": lambda t: t.folder.paths.spec.write_bytes(b"\xff{"),
    "spec-deep": lambda t: t.folder.paths.spec.write_text("[" * 100_000),
    "spec-wrong": lambda t: _edit_spec(t, command=[], nonsense=1),
    "spec-controls": _control_characters,
    "spec-time": lambda t: _edit(t.folder.paths.spec, created_at=1e300),
    "manifest-time": lambda t: _edit(t.checkpoint / "manifest.json", committed_at=3e11),
    "manifest-times": lambda t: _edit(
        t.checkpoint / "manifest.json", committed_at=1e300, staged_at=-1e300, flush_s=1e300
    ),
    "job-of-another": lambda t: _edit(t.attempt.submission, job_id="--user=root"),
    "locks-to-home": lambda t: _each(
        lambda path: _link(path, t.victim.home / "lock"),
        *(t.folder.paths.flow_lock, t.folder.paths.worker_lock),
        *(journal_lock(t.folder.paths.journal_of(writer)) for writer in ("cli", "api", "orders")),
    ),
}
HOSTILE: Final = _HOSTILE
_DOCUMENTS: Final = ("request", "submission", "claim", "outcome", "stop")
# More of the same kinds, for tests that do not try every command on every folder.
MANY: Final[dict[str, Callable[[Target], object]]] = {
    **HOSTILE,
    **{f"zero-{one}": partial(_link_document, name=one, to="/dev/zero") for one in _DOCUMENTS},
    **{f"loop-{one}": partial(_link_document, name=one, to=f"{one}.json") for one in _DOCUMENTS},
    **{f"folder-{one}": partial(_replace_document, name=one) for one in _DOCUMENTS},
    **{f"deep-{one}": partial(_deepen_document, name=one) for one in _DOCUMENTS},
    "zero-manifest": lambda t: _link(t.checkpoint / "manifest.json", "/dev/zero"),
    "zero-spec": lambda t: _link(t.folder.paths.spec, "/dev/zero"),
    "zero-lock": lambda t: _link(t.folder.paths.flow_lock, "/dev/zero"),
}


def _edit_entry(target: Target, source: str | None = None, **changes: Any) -> None:
    path = target.checkpoint / "manifest.json"
    document = json.loads(path.read_bytes())
    _edit(path, files=[{**document["files"][0], **changes}], source=source)


def make_hostile(root: Path, victim: Victim, kinds: Kinds = HOSTILE) -> None:
    """Write every hostile folder under `root`; call it as the attacker."""
    for number, (name, change) in enumerate(kinds.items()):
        folder = plain_run(root, name, f"{number:032x}")
        change(Target(folder, victim))
