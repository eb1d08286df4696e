"""Writes run folders with many manifests, as after a long training, without fsync."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.digests import checksum_of_blocks
from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.manifest import FileEntry, Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths, checkpoint_id
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.spec.run_spec import RunSpec

T0: Final = 1_700_000_000.0
STEP: Final = 100
FILE_BYTES: Final = 1_000_000_000


def make_folders(root: Path, runs: int, manifests: int) -> None:
    """Create `runs` runs with `manifests` manifests each, without the files that they list."""
    for number in range(runs):
        _make_folder(RunPaths(root / f"ingest-{number:04d}"), f"{number:032x}", manifests)


def _make_folder(paths: RunPaths, uid: str, manifests: int) -> None:
    attempt = paths.attempt(1)
    attempt.journal.mkdir(parents=True)
    spec = RunSpec(name=paths.name, command=("train.py",))
    record = RunRecord(
        uid=uid,
        run=paths.name,
        name=paths.name,
        root=str(paths.directory.parent),
        created_at=T0,
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
    )
    paths.spec.write_bytes(to_json(record.model_dump(mode="json")))
    lines, parent = [], None
    for index in range(manifests):
        name = CheckpointName((index + 1) * STEP, 1, 1)
        directory = paths.checkpoint(name)
        directory.mkdir(parents=True)
        manifest = _manifest(paths.name, uid, name, parent, T0 + index)
        (directory / MANIFEST).write_bytes(encode_manifest(manifest))
        parent = checkpoint_id(paths.name, str(name))
        facts = {"attempt": 1, "launch": 1, "checkpoint": str(name), "step": name.step}
        lines.append(_line(2 * index, "staged", T0 + index, {**facts, "blocked_s": 0.1}))
        lines.append(_line(2 * index + 1, "committed", T0 + index, {**facts, "flush_s": 2.5}))
    attempt.rank_journal.write_text("\n".join(lines) + "\n")


def _manifest(run: str, uid: str, name: CheckpointName, parent: str | None, at: float) -> Manifest:
    blocks = f"{name.step:032x}" * 4
    file = FileEntry(
        path="__0_0.distcp",
        bytes=FILE_BYTES,
        checksum=checksum_of_blocks(blocks),
        block_bytes=FILE_BYTES // 4,
        blocks=blocks,
    )
    return Manifest(
        run_uid=uid,
        run=run,
        name=str(name),
        step=name.step,
        attempt=1,
        launch=1,
        world_size=8,
        parent=parent,
        files=(file,),
        blocked_s=0.1,
        flush_s=2.5,
        committed_at=at,
        metrics={"loss": 2.5},
    )


def _line(sequence: int, kind: str, at: float, data: dict[str, Any]) -> str:
    header = {"writer": "rank0", "opening": 1, "sequence": sequence, "time": at, "kind": kind}
    return json.dumps({**header, "data": data})
