"""`python -m holdfast.trainer.mirror`: see `command`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from holdfast.contracts import errors
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.mirrors import checkpoint_folder, checkpoint_key, tombstone_key
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.trainer.mirror import transfer
from holdfast.trainer.mirror.store import EntryCheck, MirrorStore

# List, verify, delete, fetch and push the checkpoints of a run's mirror, from outside a job:
#
#     python -m holdfast.trainer.mirror LOCATION list
#     python -m holdfast.trainer.mirror LOCATION verify NAME
#     python -m holdfast.trainer.mirror LOCATION delete NAME [NAME …]
#     python -m holdfast.trainer.mirror LOCATION fetch NAME --into DIRECTORY
#     python -m holdfast.trainer.mirror LOCATION push DIRECTORY
#
# LOCATION is the URL of a run in the mirror, as in `mirrored.json` and the journal. Each command
# prints one JSON object. On failure the object has `error` and the exit status is 1. The commands
# need fsspec, and s3fs for S3, but not torch.


def list_committed(store: MirrorStore) -> dict[str, Any]:
    """Return every checkpoint in the mirror, oldest first, and whether it is committed there."""
    retries, found = transfer.Retries(), []
    for name in transfer.list_remote(store, retries=retries):
        content = retries.do(store.read, checkpoint_key(str(name)))
        found.append({"name": str(name), "committed": content is not None})
    return {"checkpoints": found}


def delete(store: MirrorStore, names: list[str]) -> dict[str, Any]:
    """Remove checkpoints, manifest first, so that a crash in between leaves no checkpoint.

    The manifest stays as a tombstone. You may repeat the call or name absent checkpoints.
    """
    retries, freed = transfer.Retries(), 0
    for name in map(str, map(_parse, names)):
        content = retries.do(store.read, checkpoint_key(name))
        if content is not None:
            # The tombstone is there before the manifest goes. After a crash in between, the copy is
            # still committed, and the deletion can be repeated.
            retries.do(store.put, tombstone_key(name), content)
            # The manifest goes first, so that no reader finds a commit whose files are being
            # deleted.
            retries.do(store.delete, [checkpoint_key(name)])
        # Parts of unfinished uploads cost space and appear in no listing of objects.
        retries.do(store.abort_uploads, f"{checkpoint_folder(name)}/")
        sizes = retries.do(store.sizes, checkpoint_folder(name))
        retries.do(store.delete, sorted(sizes))
        freed += sum(sizes.values())
    return {"deleted": names, "bytes": freed}


def verify(store: MirrorStore, name: str) -> dict[str, Any]:
    """Read every byte of a checkpoint in the mirror and compare it with the manifest."""
    retries, damaged = transfer.Retries(), []
    remote = _remote(store, name)
    sizes = retries.do(store.sizes, checkpoint_folder(name))
    for entry in remote.manifest.files:
        key = checkpoint_key(name, entry.path)
        if sizes.get(key) != entry.bytes:
            found = f"{sizes[key]} bytes, expected {entry.bytes}" if key in sizes else "missing"
            damaged.append(f"{entry.path}: {found}")
            continue
        try:
            retries.do(_read, store, key, entry)
        except errors.DamagedCheckpointError as error:
            damaged += error.damaged
    files = len(remote.manifest.files)
    return {"ok": not damaged, "checkpoint": remote.manifest.id, "files": files, "damaged": damaged}


def push(store: MirrorStore, directory: Path) -> dict[str, Any]:
    """Copy a committed checkpoint to the mirror, and continue an earlier unfinished copy."""
    upload, retries = transfer.read_upload(directory, None), transfer.Retries()
    if upload is None:
        raise errors.NotFoundError(f"{directory}: no committed checkpoint in this directory")
    sent = transfer.send_files(store, upload, retries=retries)
    missing = transfer.missing_files(store, upload, retries=retries)
    if missing:
        absent = ", ".join(missing[:5])
        raise errors.MirrorError(f"{directory}: files are neither here nor in the mirror: {absent}")
    transfer.commit(store, upload, retries=retries)
    return {"pushed": upload.name, "bytes": sent}


def _read(store: MirrorStore, key: str, entry: FileEntry) -> None:
    check = EntryCheck(entry)
    for piece in store.pieces(key, entry.bytes):
        check.update(piece)
    check.finish()


def _remote(store: MirrorStore, name: str) -> transfer.Remote:
    remote = transfer.read_remote(store, _parse(name), None, retries=transfer.Retries())
    if remote is None:
        raise errors.NotFoundError(f"{name} is not committed in this mirror; `list` shows what is")
    return remote


def _parse(name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:
        raise errors.MirrorError(
            f"{name!r}: expected a checkpoint directory name like step-….a….l…"
        )
    return parsed


def _act(given: argparse.Namespace) -> dict[str, Any]:
    store = transfer.Retries().do(transfer.open_store, given.location)
    if given.act == "list":
        return list_committed(store)
    if given.act == "delete":
        return delete(store, given.names)
    if given.act == "verify":
        return verify(store, given.name)
    if given.act == "push":
        return push(store, given.directory)
    remote = _remote(store, given.name)
    read_bytes = transfer.fetch(
        store, remote, given.into, url=given.location, retries=transfer.Retries()
    )
    return {"fetched": given.name, "into": str(given.into), "bytes": read_bytes}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run the command, print the answer and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.mirror")
    parser.add_argument("location", help="URL of the run in its mirror")
    acts = parser.add_subparsers(dest="act", required=True)
    acts.add_parser("list")
    acts.add_parser("verify").add_argument("name")
    acts.add_parser("delete").add_argument("names", nargs="+")
    acts.add_parser("push").add_argument("directory", type=Path)
    bring = acts.add_parser("fetch")
    bring.add_argument("name")
    bring.add_argument("--into", type=Path, required=True)
    given = parser.parse_args(argv)
    try:
        answer = _act(given)
    except (errors.HoldfastError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 1 if "error" in answer or answer.get("ok") is False else 0


if __name__ == "__main__":
    sys.exit(main())
