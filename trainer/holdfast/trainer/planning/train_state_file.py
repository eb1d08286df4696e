"""The train state of a checkpoint: a JSON file beside the tensors, of limited size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.paths import TRAIN_STATE
from holdfast.contracts.errors import DamagedCheckpointError, SaveError
from holdfast.trainer.format.metadata import read_verified
from holdfast.trainer.planning.layout import TRAIN_STATE_BYTES_MAX


def encode_train_state(document: Mapping[str, Any]) -> bytes:
    """Return the content of the file. Raises `SaveError` if it is too large or not JSON.

    Text is kept to the code point, so lone surrogates too, which other documents replace.
    """
    try:
        content = to_json(dict(document), surrogates="backslashreplace")
    except (TypeError, ValueError) as error:
        raise SaveError(
            f"the train state is not JSON: {error}; put tensors into the state. The train "
            "state takes numbers, text, lists and mappings"
        ) from error
    if len(content) > TRAIN_STATE_BYTES_MAX:
        raise SaveError(
            f"the train state is {len(content)} bytes of JSON, expected "
            f"{TRAIN_STATE_BYTES_MAX} or less; put large data into the state as tensors"
        )
    return content


def read_train_state(directory: Path, manifest: Manifest | None) -> dict[str, Any]:
    """Return the train state of the checkpoint in `directory`, or {} if stock DCP wrote it.

    `manifest` is the checkpoint's, or None for stock DCP. Raises `DamagedCheckpointError` if the
    train state differs from the manifest, cannot be read, or is not a JSON object.
    """
    path = directory / TRAIN_STATE
    listed = manifest is not None and any(file.path == TRAIN_STATE for file in manifest.files)
    if not listed and not path.exists():
        return {}
    try:
        # Through the manifest: the file of another user may have changed since the commit.
        content = read_verified(directory, TRAIN_STATE, manifest, TRAIN_STATE_BYTES_MAX)
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path}: not JSON: {error}; resume from another checkpoint",
            damaged=[f"{TRAIN_STATE}: {error}"],
        ) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpointError(
            f"{path}: contains a {type(parsed).__name__}, expected a JSON object; resume from "
            "another checkpoint",
            damaged=[f"{TRAIN_STATE}: a {type(parsed).__name__}"],
        )
    return parsed
