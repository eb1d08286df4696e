"""The model's files in `checkpoint-N`, written in the background.

The trainer calls safetensors to write them, with the names of `WRITERS`. While it saves, calls with
these names for files of its directory copy the tensors into memory, and the flusher writes the
files. Programs may read a directory as soon as it is saved. So the trainer itself writes the files
if it has a callback with `on_save`, uploads them, or has a class with a save of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import transformers
from transformers import TrainerCallback, modeling_utils

from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.sources.safetensors_file import LENGTH_BYTES, METADATA, TYPES
from holdfast.trainer.staging.file_writers import Output, Writer

# Where Transformers calls safetensors, for its own models and for other modules.
WRITERS: Final = ((modeling_utils, "safe_save_file"), (safetensors.torch, "save_file"))
SAVES: Final = ("_save_checkpoint", "save_model", "_save")
NAMES: Final = {dtype: name for name, dtype in TYPES.items()}


def may_wait(trainer: Any) -> bool:
    """Return True if nothing reads the files of a save before the training continues."""
    kinds = [kind for kind in type(trainer).__mro__ if not _is_known(kind)]
    has_own_save = any(name in vars(kind) for kind in kinds for name in SAVES)
    has_reader = any(
        type(callback).on_save is not TrainerCallback.on_save
        for callback in trainer.callback_handler.callbacks
    )
    return not (trainer.args.push_to_hub or has_own_save or has_reader)


@contextlib.contextmanager
def in_background(session: FrameworkSession, directory: Path) -> Iterator[None]:
    """Let the flusher write each safetensors file of `directory` that is saved in the block."""
    functions = [getattr(module, name) for module, name in WRITERS]
    for (module, name), function in zip(WRITERS, functions, strict=True):
        setattr(module, name, partial(_save, session, directory.absolute(), function))
    try:
        yield
    finally:
        for (module, name), function in zip(WRITERS, functions, strict=True):
            setattr(module, name, function)


def safetensors_writer(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Writer:
    """Return the writer of a safetensors file with these dense tensors.

    The library writes to a path, or first makes the whole file in memory, which takes many times as
    long as a copy. The order is the library's: larger types first, so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        facts = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**facts, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)

    def write(output: Output) -> None:
        output.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for _, tensor in ordered:
            output.write(_content(tensor))

    return write


def _save(
    session: FrameworkSession,
    directory: Path,
    save: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Do what `save`, a function of safetensors, does. It is called for all other files."""
    path = Path(filename).absolute()
    if path.parent == directory and _is_plain(tensors):
        session.write_file(path, safetensors_writer(tensors, metadata or {}))
    else:
        save(tensors, filename, metadata=metadata)


def _content(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _is_plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return False for tensors that the library refuses, or that need more than a copy."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.nbytes}
    filled = sum(tensor.nbytes > 0 for tensor in tensors.values())
    return len(storages) == filled and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in NAMES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        for tensor in tensors.values()
    )


def _is_known(kind: type) -> bool:
    return kind is transformers.Trainer or kind.__module__.startswith(__package__)
