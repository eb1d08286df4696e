"""Export a committed or stock DCP checkpoint to a format that other programs read.

    python -m holdfast.trainer.export DIRECTORY --to FORM --output PATH [--json]

The export needs no GPU, no process group, and not the program that trained.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.paths import CheckpointName, plain_checkpoint
from holdfast.contracts.errors import CheckpointError, NotFoundError
from holdfast.contracts.plain_text import counted
from holdfast.trainer.export.forms import FORMS, appearing, bytes_in, open_source
from holdfast.trainer.loading.checkpoint import check_committed

# The formats that contain only weights by default.
WEIGHTS_ONLY: Final = ("safetensors", "hf")
TYPES: Final = ("float64", "float32", "float16", "bfloat16")
SHARD_BYTES: Final = 5 * 10**9


def export(given: argparse.Namespace) -> dict[str, Any]:
    """Write the export and return its facts. Raises `CheckpointError` if it is not possible."""
    directory, output = plain_checkpoint(given.directory), Path(given.output)
    with appearing(output, directory) as place, ExitStack() as held:
        if CheckpointName.parse(directory.name) is not None:
            held.enter_context(reading(directory))
            check_committed(directory)
        source = open_source(
            directory,
            include=given.include,
            rename=dict(given.rename),
            dtype=getattr(torch, given.dtype) if given.dtype else None,
            weights_only=given.to in WEIGHTS_ONLY,
        )
        FORMS[given.to](source, place, given.shard_bytes)
    return {
        "path": str(output.absolute()),
        "format": given.to,
        "tensors": sum(entry.is_tensor for entry in source.entries),
        "bytes": bytes_in(output),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if written, 1 if the checkpoint is bad or a write failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.trainer.export", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--to", choices=sorted(FORMS), required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--rename", action="append", type=_rule, default=[])
    parser.add_argument("--dtype", choices=TYPES)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    if given.shard_bytes < 1:
        parser.error(f"--shard-bytes {given.shard_bytes}: expected 1 or more")
    # The caller cancelled the export. The exit removes the partial output.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        facts = export(given)
    except (CheckpointError, NotFoundError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"holdfast: {given.output}: not written: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(facts)
        if given.json
        else f"{facts['path']}: {counted(facts['tensors'], 'tensor')}"
    )
    return 0


def _rule(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text}: expected SAVED=WRITTEN, such as model.a.*=b.*")
    return old, new


if __name__ == "__main__":
    sys.exit(main())
