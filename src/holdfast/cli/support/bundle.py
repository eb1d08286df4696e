"""Collects what a report about a run needs, and makes an archive of it without secrets."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote, quote_plus

from holdfast.contracts import errors, redaction
from holdfast.contracts.disk import reading
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import AttemptPaths, ConsumerPaths, RunPaths
from holdfast.contracts.disk.rank_logs import rank_logs
from holdfast.contracts.records.documents import RunRecord, Submission, read_document
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.secrets import hide, known_secrets, longest_first, unknown_secrets
from holdfast.contracts.version import holdfast_version

FORMAT: Final = 1
DOCUMENT_BYTES_MAX: Final = 1024 * 1024
JOURNAL_BYTES_MAX: Final = 4 * 1024 * 1024
STACK_BYTES_MAX: Final = 512 * 1024
LOG_BYTES_MAX: Final = 128 * 1024
CONSUMER_BYTES_MAX: Final = 64 * 1024
# Of each attempt, by name. A folder of another user may contain any number of files.
FILES_OF_A_KIND_MAX: Final = 512
ATTEMPTS_MAX: Final = 50
CONSUMERS_MAX: Final = 50
JOBS_MAX: Final = 20
CONSUMER_JOBS_MAX: Final = 5
SLURM_S: Final = 10.0
# The newest attempts say why a run fails, so older ones have their documents and journals only.
ATTEMPTS_WITH_LOGS: Final = 5
# Of each attempt's series: how many buckets of time, and how many nodes with GPUs.
SERIES_BUCKETS: Final = 200
GPU_NODES_MAX: Final = 32
SLOW_LINES_MAX: Final = 1000
# Lines about slow ranks, nodes and links. The journals have them too, but may be cut.
SLOWNESS: Final = frozenset(
    {
        *(EventKind.STRAGGLER, EventKind.NODE_SLOW, EventKind.LINK_SLOW),
        *(EventKind.SLOWDOWN_TESTED, EventKind.NODE_UNHEALTHY),
    }
)
PACKAGES: Final = (
    *("torch", "numpy", "prefect", "submitit", "pydantic", "sqlalchemy", "fastapi", "typer"),
    *("transformers", "accelerate", "lightning", "deepspeed", "torchtitan", "fsspec", "s3fs"),
    *("safetensors", "datasets", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
# The attempt's documents. `channel.json` and the addresses of flushers contain keys.
DOCUMENTS: Final = (
    *("request.json", "submission.json", "submitting.json", "missing.json", "claim.json"),
    *("order.json", "stop.json", "drained.json", "outcome.json", "restart.json", "verdict.json"),
    *("terms/*.json", "launches/*.json", "launches/*/shards-*.json", "heartbeats/*.json"),
)
# Every file of these folders is left out, for the reason.
NEVER: Final = {
    "checkpoints": "weights and optimizer state",
    "exports": "weights",
    "converted": "weights",
    "fetched": "weights",
    "private": "the values of secrets",
    "code": "the program's files",
    "attempts/*/channel.json": "the key by which the attempt's nodes know each other",
    "attempts/*/launches/*/*.address": "the keys of flushers",
    "attempts/*/logs/*.pkl": "a pickle of the job",
    "attempts/*/dumps/*/nccl-rank-*": "pickles; collectives.json has a summary of each",
}
RECORDS: Final = "nccl-rank-"
MANIFEST_NAME: Final = "MANIFEST.json"
# The bytes of all files together, before they are compressed.
TOTAL_BYTES_MAX: Final = 32 * 1024 * 1024
FILES_MAX: Final = 4000
LEFT_OUT_MAX: Final = 1000
LINE_BYTES_MAX: Final = 1024 * 1024
# Secrets that were recognised in one file and are removed from all. Each costs a search.
LEARNT_MAX: Final = 200
LEARNT_CHARACTERS_MIN: Final = 12
# Names that are Holdfast's own or a scheduler's. Another user's folder may contain any other.
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9._+-]{1,200}(?:/[A-Za-z0-9._+-]{1,200}){0,20}")


def spellings(secrets: Iterable[str]) -> tuple[str, ...]:
    """Return each secret as programs print it, longest first.

    That is: as it is, in JSON, in Python, in a URL and as base64. Of a secret with several lines,
    each line counts too, because a log may indent them.
    """
    found: set[str] = set()
    for secret in secrets:
        found |= {secret, *(line.strip() for line in secret.splitlines())}
    for one in tuple(found):
        raw = os.fsencode(one)
        found |= {json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1], repr(one)[1:-1]}
        found |= {quote(raw, safe=""), quote(raw), quote_plus(raw)}
        if len(one) >= redaction.SECRET_CHARACTERS_MIN:
            found.add(base64.b64encode(raw).decode().rstrip("="))
            found.add(base64.urlsafe_b64encode(raw).decode().rstrip("="))
    return longest_first(found)


class Archive:
    """Collects files without their secrets, up to `bytes_max` bytes."""

    def __init__(self, secrets: Sequence[str], *, bytes_max: int = TOTAL_BYTES_MAX) -> None:
        self._secrets = spellings(secrets)
        self._left = bytes_max
        self._bytes_max = bytes_max
        self._files: dict[str, bytes] = {}
        self._facts: list[dict[str, Any]] = []
        self._left_out: list[dict[str, str]] = []
        self._unlisted = 0
        self._learnt: set[str] = set()

    @property
    def left_out(self) -> list[dict[str, str]]:
        """What the archive lacks, each with its name and the reason."""
        return self._left_out

    @property
    def names(self) -> list[str]:
        """The names of the files in the archive."""
        return list(self._files)

    def leave_out(self, name: str, reason: object) -> None:
        """Record that something is not in the archive."""
        if len(self._left_out) >= LEFT_OUT_MAX:
            self._unlisted += 1
            return
        facts = {"name": self._clean(name)[:1000], "reason": self._clean(str(reason))[:1000]}
        self._left_out.append(facts)

    def add_json(self, name: str, value: Any) -> None:
        """Add a document without its secrets."""
        self._learn(redaction.secrets_of({"": value}))
        clean = redaction.redact(value, self._secrets)
        self.add_text(name, json.dumps(clean, indent=1, ensure_ascii=False, default=str) + "\n")

    def add_text(self, name: str, text: str, **facts: object) -> None:
        """Add a text without its secrets."""
        if not _SAFE_NAME.fullmatch(name) or ".." in name.split("/") or self._clean(name) != name:
            self.leave_out(name, "its name is none of Holdfast's")
            return
        content = self._clean(text).encode(errors="replace")
        if len(content) > self._left:
            self.leave_out(name, f"the archive has at most {self._bytes_max} bytes")
            return
        if len(self._files) >= FILES_MAX:
            self.leave_out(name, f"the archive has at most {FILES_MAX} files")
            return
        self._left -= len(content)
        self._files[name] = content
        self._facts.append({"name": name, "bytes": len(content), **facts})

    def add_end(self, name: str, path: Path, bytes_max: int, *, below: Path) -> None:
        """Add the last `bytes_max` bytes of a file as text. Links must stay inside `below`."""
        found = self._read_end(name, path, bytes_max, below)
        if found is not None:
            content, start = found
            self.add_text(name, content.decode(errors="replace"), **_cut(start))

    def add_json_lines(self, name: str, path: Path, bytes_max: int, *, below: Path) -> None:
        """Add the last whole lines of a file of JSON lines, each without its secrets."""
        found = self._read_end(name, path, bytes_max, below, is_masked=False)
        if found is None:
            return
        content, start = found
        lines = content.split(b"\n")
        # The first line may have lost its beginning, and with it the name of a secret.
        kept = lines[1:] if start else lines
        long = [line for line in kept if len(line) > LINE_BYTES_MAX]
        for line in long:
            self.leave_out(name, f"a line of {len(line)} bytes, more than {LINE_BYTES_MAX}")
        cleaned = (self._clean_line(line) for line in kept if len(line) <= LINE_BYTES_MAX)
        self.add_text(name, "\n".join(cleaned), **_cut(start))

    def _read_end(
        self, name: str, path: Path, bytes_max: int, below: Path, *, is_masked: bool = True
    ) -> tuple[bytes, int] | None:
        """Return the last bytes of a file, and how many are before them; None if it is left out."""
        try:
            with open(reading.open_regular(path, below=below, follow=is_masked), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                start, length = max(0, size - bytes_max), min(size, bytes_max)
                if is_masked:
                    return self._read_masked(stream, start, length), start
                stream.seek(start)
                return stream.read(length), start
        except FileNotFoundError:
            return None
        except (OSError, errors.ForeignFileError) as error:
            self.leave_out(name, error)
            return None

    def _read_masked(self, stream: BinaryIO, start: int, length: int) -> bytes:
        # A secret may be cut at both ends.
        before = min(start, redaction.AROUND_BYTES)
        stream.seek(start - before)
        content = stream.read(before + length + redaction.AROUND_BYTES)
        text = content.decode(errors="replace")
        self._learn(text[begin:end] for begin, end in redaction.spans(text, self._secrets))
        return redaction.mask_bytes(content, self._secrets)[before : before + length]

    def to_bytes(self, about: Mapping[str, Any]) -> bytes:
        """Return the compressed archive, with its manifest first."""
        folder = str(about["folder"])
        manifest = {
            **about,
            "files": self._facts,
            "left_out": self._left_out,
            "left_out_and_not_listed": self._unlisted,
        }
        text = json.dumps(redaction.redact(manifest, self._secrets), indent=1, ensure_ascii=False)
        files = {MANIFEST_NAME: f"{text}\n".encode(errors="replace"), **self._files}
        for learnt in longest_first(self._learnt):
            hidden = redaction.HIDDEN.encode()
            files = {
                name: one.replace(learnt.encode(errors="replace"), hidden)
                for name, one in files.items()
            }
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(about["made_at"])
                tar.addfile(entry, io.BytesIO(content))
        return gzip.compress(packed.getvalue(), mtime=0)

    def _learn(self, values: Iterable[str]) -> None:
        """Remember secrets that one file reveals. Another may have them without their names."""
        for value in values:
            if len(self._learnt) >= LEARNT_MAX:
                return
            bare = value.strip("\"',;:()[]{}<>")
            if len(bare) >= LEARNT_CHARACTERS_MIN and redaction.looks_random(bare):
                self._learnt.add(bare)

    def _clean(self, text: str) -> str:
        return hide(redaction.redact_text(text, self._secrets), self._secrets)

    def _clean_line(self, line: bytes) -> str:
        """Return a JSON line without its secrets, or a damaged one as text without them."""
        text = line.decode(errors="replace")
        try:
            value = json.loads(text)
            self._learn(redaction.secrets_of({"": value}))
            return json.dumps(redaction.redact(value, self._secrets), ensure_ascii=False)
        except (ValueError, RecursionError):
            return text


def _cut(start: int) -> dict[str, int]:
    return {"bytes_before": start} if start else {}


@dataclass(frozen=True)
class Bundle:
    """An archive as bytes, the names of its files, and what it lacks.

    `unknown_secrets` has a line for each secret whose value is not known here.
    """

    content: bytes
    files: tuple[str, ...]
    left_out: list[dict[str, str]]
    unknown_secrets: list[str]


def make_bundle(paths: RunPaths) -> Bundle:
    """Return the archive of a run.

    Raises `UnreadableRunError` if the spec cannot be read: without it, the run's secrets are
    unknown.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise errors.UnreadableRunError(
            f"{paths.spec}: missing or invalid. Without it, the values of the run's secrets are "
            "unknown, so nothing was written; restore the file first"
        )
    attempts = paths.list_attempts()
    unlisted: list[tuple[str, object]] = []
    documents = {"spec.json": record.model_dump(mode="json")}
    consumers = _newest_consumers(paths)
    folders: list[AttemptPaths] = [*reversed(attempts[-ATTEMPTS_MAX:]), *consumers]
    documents |= _documents(paths, folders, unlisted)
    secrets = {*known_secrets(record.spec, paths)}
    for document in documents.values():
        secrets |= {
            *redaction.secrets_of(document if isinstance(document, dict) else {"": document})
        }
    archive = Archive(sorted(secrets))
    for place, reason in NEVER.items():
        archive.leave_out(place, f"never included: {reason}")
    for name, problem in unlisted:
        archive.leave_out(name, problem)
    archive.add_json("versions.json", _versions())
    for name, document in documents.items():
        archive.add_json(name, document)
    _add_index(archive, paths)
    _add_journals(archive, paths, attempts)
    _add_slowness(archive, paths, attempts)
    _add_slurm(archive, paths, [*consumers[:CONSUMER_JOBS_MAX][::-1], *attempts])
    _add_stacks_and_logs(archive, paths, attempts)
    _add_consumer_logs(archive, paths, consumers)
    unknown = unknown_secrets(record.spec, paths)
    about = {
        "format": FORMAT,
        "folder": f"holdfast-{paths.name}",
        "run": paths.name,
        "made_at": time.time(),
        "holdfast": holdfast_version(),
        # These may be in the files unless they look like secrets: their values are not known here.
        "secrets_without_a_value_here": unknown,
    }
    return Bundle(archive.to_bytes(about), tuple(archive.names), archive.left_out, unknown)


def _documents(
    paths: RunPaths, folders: Iterable[AttemptPaths], left_out: list[tuple[str, object]]
) -> dict[str, Any]:
    """Return the JSON documents by name: of the newest successor, and of `folders`."""
    found: dict[str, Any] = {}
    newest = paths.newest_successor()
    for one in [*([newest] if newest else []), *folders]:
        for pattern in DOCUMENTS:
            for path in _listed(one.directory, pattern):
                name = path.relative_to(paths.directory).as_posix()
                try:
                    content = reading.read_bounded(path, DOCUMENT_BYTES_MAX, below=paths.directory)
                    found[name] = json.loads(content)
                except FileNotFoundError:
                    continue
                except (OSError, errors.ForeignFileError, ValueError, RecursionError) as error:
                    left_out.append((name, error))
    return found


def _newest_consumers(paths: RunPaths) -> list[ConsumerPaths]:
    """Return the newest starts of consumers, newest first."""
    newest = paths.newest_consumer()
    return [paths.consumer(number) for number in range(newest, max(0, newest - CONSUMERS_MAX), -1)]


def _add_consumer_logs(
    archive: Archive, paths: RunPaths, consumers: Sequence[ConsumerPaths]
) -> None:
    """Add the ends of what consumers and their jobs printed."""
    for one in consumers:
        jobs = _listed(one.logs, "[!.]*.[eos]*")
        for path in (one.log, one.directory / "process.log", *jobs):
            name = path.relative_to(paths.directory).as_posix()
            archive.add_end(name, path, CONSUMER_BYTES_MAX, below=paths.directory)
    older = paths.newest_consumer() - len(consumers)
    if older > 0:
        reason = f"only the newest {CONSUMERS_MAX} starts are included, and {older} are older"
        archive.leave_out("consumers", reason)


def _listed(folder: Path, pattern: str) -> Iterator[Path]:
    """Return the first files of a pattern under a folder that may be another user's."""
    return iter(sorted(islice(folder.glob(pattern), FILES_OF_A_KIND_MAX)))


def _versions() -> dict[str, Any]:
    """Return versions on the machine that makes the archive. The job may have had others."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "of": "the machine that made this archive",
        "holdfast": holdfast_version(),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
    }


def _add_index(archive: Archive, paths: RunPaths) -> None:
    """Add what the index says about the run, as it is: a refresh would change what is reported."""
    from holdfast.cli.shared.index import open_index
    from holdfast.lineage.queries import run_queries

    try:
        with open_index() as database:
            shown = run_queries.show_run(database, str(paths.directory))
    except errors.NotFoundError:
        archive.leave_out("index.json", "the index does not know the run")
    except errors.HoldfastError as error:
        archive.leave_out("index.json", error)
    else:
        archive.add_json("index.json", shown)


def _add_journals(archive: Archive, paths: RunPaths, attempts: list[AttemptPaths]) -> None:
    for folder in (paths.directory, *(one.directory for one in reversed(attempts))):
        for path in _listed(folder, "journal/*.jsonl"):
            name = path.relative_to(paths.directory).as_posix()
            archive.add_json_lines(name, path, JOURNAL_BYTES_MAX, below=paths.directory)


def _add_slowness(archive: Archive, paths: RunPaths, attempts: list[AttemptPaths]) -> None:
    """Add what tells of slow ranks, nodes and links: journal lines, and values over time."""
    from holdfast.api.series.gpus import read_gpus
    from holdfast.api.series.heat import RANKS_MAX, read_heat_map
    from holdfast.api.series.models import HeatValue, TimeRange

    lines = [one.model_dump(mode="json") for one in load_events(paths) if one.kind in SLOWNESS]
    archive.add_json("slowness.json", lines[-SLOW_LINES_MAX:])
    if len(lines) > SLOW_LINES_MAX:
        archive.leave_out("slowness.json", f"only its newest {SLOW_LINES_MAX} lines are included")
    within = TimeRange(None, None, SERIES_BUCKETS)
    for one in attempts[: -ATTEMPTS_WITH_LOGS - 1 : -1]:
        folder = one.series.relative_to(paths.directory).as_posix()
        for value in (HeatValue.STEP, HeatValue.OWN):
            ranks = read_heat_map(paths.name, one, value, within, range(RANKS_MAX))
            for problem in ranks.problems:
                archive.leave_out(folder, problem)
            if ranks.rows:
                archive.add_json(f"{folder}/ranks-{value}.json", ranks.model_dump(mode="json"))
        nodes = [node.node for node in read_gpus(paths.name, one, None, within).nodes]
        for node in nodes[:GPU_NODES_MAX]:
            gpus = read_gpus(paths.name, one, node, within)
            archive.add_json(f"{folder}/gpus-{node:04d}.json", gpus.model_dump(mode="json"))
        if len(nodes) > GPU_NODES_MAX:
            archive.leave_out(folder, f"GPUs of more than {GPU_NODES_MAX} nodes")


def _add_slurm(archive: Archive, paths: RunPaths, attempts: Sequence[AttemptPaths]) -> None:
    """Add what Slurm says about the newest jobs, until it does not answer."""
    from functools import partial

    from holdfast.workers.schedulers.slurm_client import call
    from holdfast.workers.schedulers.slurm_records import accounting_text, controller_text

    ask = partial(call, timeout_s=SLURM_S)
    successor = paths.newest_successor()
    jobs: dict[str, Submission] = {}
    for one in [*([successor] if successor else []), *reversed(attempts)]:
        try:
            job = read_document(Submission, one.submission)
        except (errors.HoldfastError, OSError):
            # The document itself is listed as left out.
            continue
        if job is not None and job.executor == "slurm":
            jobs.setdefault(job.job_id, job)
    for number, (job_id, job) in enumerate(jobs.items()):
        name = f"slurm/{job_id}"
        if number >= JOBS_MAX:
            archive.leave_out(name, f"only the newest {JOBS_MAX} jobs are included")
            continue
        try:
            archive.add_text(f"{name}.sacct.txt", accounting_text(job_id, job.submitted_at, ask))
        except errors.SchedulerUnavailableError as error:
            archive.leave_out("slurm", error)
            return
        except errors.SchedulerError as error:
            archive.leave_out(f"{name}.sacct.txt", error)
        try:
            archive.add_text(f"{name}.scontrol.txt", controller_text(job_id, ask))
        except errors.SchedulerUnavailableError as error:
            archive.leave_out("slurm", error)
            return
        except errors.SchedulerError as error:
            archive.leave_out(f"{name}.scontrol.txt", error)


def _add_stacks_and_logs(archive: Archive, paths: RunPaths, attempts: list[AttemptPaths]) -> None:
    def add(path: Path, bytes_max: int, below: Path) -> None:
        name = path.relative_to(paths.directory).as_posix()
        archive.add_end(name, path, bytes_max, below=below)

    add(paths.flow_log, LOG_BYTES_MAX, paths.directory)
    newest = list(reversed(attempts))
    for number, one in enumerate(newest):
        if number >= ATTEMPTS_WITH_LOGS:
            name = one.logs.relative_to(paths.directory).as_posix()
            archive.leave_out(name, f"only the newest {ATTEMPTS_WITH_LOGS} attempts have logs")
            continue
        for pattern in ("dumps/*", "dumps/*/*"):
            for path in _listed(one.directory, pattern):
                if not path.is_dir() and not path.name.startswith(RECORDS):
                    add(path, STACK_BYTES_MAX, one.directory)
        for pattern in (
            "*.out",
            "*.err",
            "*.log",
            # The others are links to it.
            "[!.]*.sh",
            "node-*/*.log",
            "node-*/l*/torchrun.log",
        ):
            for path in _listed(one.logs, pattern):
                add(path, LOG_BYTES_MAX, one.directory)
        skipped: list[Exception] = []
        logs = sorted(
            rank_logs(one, on_skip=skipped.append), key=lambda log: (log.launch, log.rank)
        )
        for log in logs[:FILES_OF_A_KIND_MAX]:
            add(log.path, LOG_BYTES_MAX, log.below)
        for log in logs[FILES_OF_A_KIND_MAX:]:
            name = log.path.relative_to(paths.directory).as_posix()
            archive.leave_out(name, f"an attempt has at most {FILES_OF_A_KIND_MAX} of them here")
        for error in skipped:
            archive.leave_out(f"attempts/{one.directory.name}/logs", error)
