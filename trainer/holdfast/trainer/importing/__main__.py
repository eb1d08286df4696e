"""Import weights of another program as the first checkpoint of a run.

    python -m holdfast.trainer.importing SOURCE --run FOLDER --uid UID [--json]

The import needs no GPU, no process group, and not the program that trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.digests import FileChecksum, document_digest
from holdfast.contracts.disk.durable import fsync_directory, make_directory, to_json, write_bytes
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.paths import IMPORTED, TRAIN_STATE, RunPaths
from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.plain_text import counted
from holdfast.trainer.flusher.commit import commit_alone
from holdfast.trainer.format.metadata import METADATA
from holdfast.trainer.importing.write import Digests, encode_metadata, plan_images, write_images
from holdfast.trainer.sources.find import AUTO, FORMS, open_source
from holdfast.trainer.sources.tensors import WeightsSource, select
from holdfast.trainer.staging.step_facts import versions
from holdfast.trainer.state.imported import document_of

REASON: Final = "import"


def import_into(run: RunPaths, uid: str, source: WeightsSource) -> dict[str, Any]:
    """Commit the weights of `source` as the checkpoint `IMPORTED` of a run; return the facts.

    The checkpoint must not exist yet. Raises `CheckpointError` and `OSError` as the parts do. No
    file is left then.
    """
    directory = run.checkpoint(IMPORTED)
    make_directory(directory)
    began = time.time()
    try:
        images = plan_images(source.parts)
        entries, digests = write_images(images, source, directory)
        origin = {
            "path": str(source.place),
            "format": source.form,
            "bytes": source.bytes,
            "tensors": len({part.name for part in source.parts}),
            "digest": digest_of_tensors(source, digests),
        }
        for name, content in (
            (METADATA, encode_metadata(images)),
            (TRAIN_STATE, to_json(document_of(origin))),
        ):
            write_bytes(directory / name, content, mode=source.rights)
            checksum = FileChecksum(len(content))
            checksum.update(content)
            entries.append(FileEntry.of(name, len(content), checksum))
        fsync_directory(directory)
        manifest = commit_alone(run, directory, _make_part(run, uid, entries, began))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return {**origin, "checkpoint": manifest.name, "left_out": list(source.left_out)}


def digest_of_tensors(source: WeightsSource, digests: Digests) -> str:
    """Return the SHA-256 of all names, types, shapes and bytes, whatever files they come from."""
    return document_digest(
        sorted(
            [part.name, str(part.dtype), list(part.shape), list(part.offsets), digest]
            for part in source.parts
            for digest in [digests[part.name, part.offsets]]
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if committed, 1 if the source is bad or a write failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.trainer.importing", description=__doc__
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--uid", required=True)
    parser.add_argument("--form", choices=FORMS, default=AUTO)
    parser.add_argument("--rename", action="append", type=_rule, default=[])
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    # The caller cancelled the import. The exit removes the partial checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        source = open_source(given.source, given.form)
        parts = select(
            source.parts, rename=dict(given.rename), exclude=given.exclude, where=source.place
        )
        facts = import_into(RunPaths(given.run), given.uid, replace(source, parts=tuple(parts)))
    except CheckpointError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"holdfast: {given.run}: not written: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(facts)
        if given.json
        else f"{facts['checkpoint']}: {counted(facts['tensors'], 'tensor')}"
    )
    return 0


def _make_part(
    run: RunPaths, uid: str, entries: Sequence[FileEntry], began: float
) -> dict[str, Any]:
    """Return what the commit needs, as a node that flushed a step would give it."""
    return {
        "node": 0,
        "nodes": 1,
        "world_size": 1,
        "ranks": [0],
        "files": [entry.model_dump(mode="json") for entry in entries],
        "blocked_s": 0.0,
        "staged_at": began,
        "fsynced_at": time.time(),
        "manifest": {
            "run_uid": uid,
            "run": run.name,
            "name": str(IMPORTED),
            "step": IMPORTED.step,
            "attempt": IMPORTED.attempt,
            "launch": IMPORTED.launch,
            "world_size": 1,
            "reason": REASON,
            "versions": versions(),
        },
    }


def _rule(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text}: expected OLD=NEW, such as encoder.*=model.*")
    return old, new


if __name__ == "__main__":
    sys.exit(main())
