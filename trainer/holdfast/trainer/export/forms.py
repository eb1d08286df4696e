"""The four export formats. Each is written to a temporary place and then moved to its output.

One process reads whole tensors of a checkpoint, and verifies them, in batches.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import stat
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import OBJ_PATH, set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk import damage, durable
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, KeyMismatchError
from holdfast.trainer.format.metadata import METADATA, Opened, open_checkpoint, paths_of
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.compare_keys import Selection, is_of_one_rank, shorten
from holdfast.trainer.planning.layout import read_train_state
from holdfast.trainer.process import devices
from holdfast.trainer.sources.dcp import split_name, weights_at
from holdfast.trainer.sources.tensors import rights_of
from holdfast.trainer.state import plain
from holdfast.trainer.state.objects import MODULE, PER_RANK, STREAM


@dataclass(frozen=True)
class ExportEntry:
    """One entry to write: its saved key, its name in the export, its size.

    `bytes` is the size in the wanted type, or 0 for a number, whose `dtype` is None. `path` is its
    position in nested dictionaries.
    """

    key: str
    name: str
    path: OBJ_PATH
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    bytes: int

    @property
    def is_tensor(self) -> bool:
        """True for a tensor, False for a number such as a learning rate."""
        return self.dtype is not None


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint and the entries to write.

    `documents` are those of objects, by name. `prefix` begins the names of parameters.
    """

    opened: Opened
    entries: tuple[ExportEntry, ...]
    documents: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    @property
    def directory(self) -> Path:
        return self.opened.directory

    def read(self, entries: Sequence[ExportEntry]) -> dict[str, Any]:
        """Return whole tensors or numbers by name. Every byte is checked against the manifest.

        Raises `DamagedCheckpointError` if bytes differ.
        """
        flat: dict[str, Any] = {
            one.key: torch.empty(one.shape, dtype=one.dtype, device=devices.CPU)
            if one.is_tensor
            else 0
            for one in entries
        }
        if flat:
            load_state(self.opened, flat, group=None, strict=False, include=tuple(flat))
        return {one.name: flat[one.key] for one in entries}


def open_source(
    directory: Path,
    *,
    include: Collection[str],
    rename: Mapping[str, str],
    dtype: torch.dtype | None,
    weights_only: bool = False,
) -> ExportSource:
    """Open the Holdfast or stock DCP checkpoint in `directory` for an export.

    `include` has keys or key prefixes. Without any, everything is taken, or with `weights_only` the
    model's part. `rename` is that of `Selection`. If given, `dtype` is the type of all
    floating-point tensors in the export. Per-rank entries, such as the state of random number
    generators, are left out.

    Raises `DamagedCheckpointError` if the checkpoint is damaged, `KeyMismatchError` for a rename
    that fits no key, and `CheckpointError` if nothing is left to write.
    """
    opened = open_checkpoint(directory)
    at = ".".join(map(str, weights_at(opened)))
    if weights_only and not include and at:
        include = (at,)
    saved = {
        key: value
        for key, value in opened.metadata.state_dict_metadata.items()
        if not is_of_one_rank(key)
    }
    taken = [key for key in saved if _is_below(key, include)]
    kept = read_train_state(opened.directory, opened.manifest).get("objects", {})
    documents = {name: document for name, document in kept.items() if _is_below(name, include)}
    if not taken and not documents:
        raise CheckpointError(
            f"{directory}: no key matches {', '.join(include) or 'the selection'}; it has "
            f"{shorten(list(saved)) or 'none'}"
        )
    names = Selection(rename=rename).rename_all(taken)
    paths = paths_of(opened.metadata)
    entries = []
    for key in taken:
        wanted: torch.dtype | None = None
        shape: tuple[int, ...] = ()
        if isinstance(value := saved[key], dcp.TensorStorageMetadata):
            wanted, shape = _type_of(value, dtype), tuple(value.size)
        path = paths.get(key) if names[key] == key else None
        entries.append(
            ExportEntry(
                key=key,
                name=names[key],
                path=path or split_name(names[key]),
                dtype=wanted,
                shape=shape,
                bytes=math.prod(shape) * wanted.itemsize if wanted is not None else 0,
            )
        )
    return ExportSource(opened, tuple(entries), documents, f"{at}." if at else "")


def batches(entries: Sequence[ExportEntry], bytes_max: int) -> Iterator[list[ExportEntry]]:
    """Yield entries in order, in batches of at most `bytes_max` but at least one entry."""
    batch: list[ExportEntry] = []
    for entry in entries:
        if batch and sum(one.bytes for one in batch) + entry.bytes > bytes_max:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def weights_of(source: ExportSource) -> list[ExportEntry]:
    """Return the tensors to write. Raises `KeyMismatchError` if the selection has numbers.

    The prefix of a parameter's name, such as `model.`, is removed.
    """
    require_tensors(source)
    numbers = [entry.key for entry in source.entries if not entry.is_tensor]
    if numbers:
        raise KeyMismatchError(
            f"{source.directory}: a file of tensors cannot hold numbers, and {shorten(numbers)} "
            "are numbers; leave them out with --include, or use --to torch",
            extra=numbers,
        )
    named = [replace(one, name=one.name.removeprefix(source.prefix)) for one in source.entries]
    owners: dict[str, str] = {}
    for one in named:
        if owners.setdefault(one.name, one.key) != one.key:
            raise KeyMismatchError(
                f"{source.directory}: {owners[one.name]} and {one.key} would both be {one.name}; "
                "give one of them another name with --rename, or choose with --include",
                extra=[one.key],
            )
    return named


def require_tensors(source: ExportSource) -> None:
    """Raise `CheckpointError` if only plain values of objects would be written."""
    if not source.entries:
        raise CheckpointError(
            f"{source.directory}: {', '.join(source.documents)} has no tensors, and this format "
            "contains nothing else; use --to torch"
        )


def _is_below(key: str, prefixes: Collection[str]) -> bool:
    """Return True if no prefixes are given, or if `key` is one of them or lies below one.

    The optimizer's state of a parameter is not below the parameter, unlike in a `Selection`.
    """
    return not prefixes or any(key == one or key.startswith(f"{one}.") for one in prefixes)


def _type_of(entry: dcp.TensorStorageMetadata, wanted: torch.dtype | None) -> torch.dtype:
    saved = entry.properties.dtype
    return wanted if wanted is not None and saved.is_floating_point else saved


# The state of a checkpoint in the form that `load_state_dict` takes in other programs.

OPTIMIZER: Final = "optimizer"
# Objects without plain values: their state is tensors, or rows of single ranks.
_NO_VALUES: Final = frozenset({MODULE, PER_RANK, STREAM})
_STATE: Final = "optimizer.state."
_GROUPS: Final = "optimizer.param_groups."
_OF_GROUP: Final = frozenset({"params", "param_names"})


def make_optimizer(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the argument of `optimizer.load_state_dict`, or None if there are no groups.

    `values` has flattened keys. Parameters keep their order and are numbered. Consecutive
    parameters with equal options form one group, and `param_names` has their names.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            options.setdefault(name, {})[option] = value
    if not options:
        return None
    groups: list[dict[str, Any]] = []
    for number, (name, own) in enumerate(options.items()):
        known = groups[-1] if groups else {}
        if not _is_same(own, {k: v for k, v in known.items() if k not in _OF_GROUP}):
            groups.append({**own, "params": [], "param_names": []})
        groups[-1]["params"].append(number)
        groups[-1]["param_names"].append(name)
    numbers = {name: number for number, name in enumerate(options)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(_STATE):
            owner, rest = _split(key.removeprefix(_STATE), numbers)
            if owner is not None:
                state.setdefault(numbers[owner], {})[rest] = value
    return {"state": state, "param_groups": groups}


def make_objects(
    documents: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return schedulers and extras by name, as from `state_dict`, without per-rank objects.

    `documents` are those of the train state. `tensors` are all tensors that were read, by key.
    """
    made: dict[str, Any] = {}
    for name, document in documents.items():
        kind = document.get(plain.MARK) if isinstance(document, dict) else None
        if kind == MODULE:
            begin = f"{name}."
            value: Any = {
                k.removeprefix(begin): v for k, v in tensors.items() if k.startswith(begin)
            }
        elif kind in {PER_RANK, STREAM}:
            continue
        else:
            value = _loadable(plain.decode(document, tensors))
        part, dot, rest = name.partition(".")
        if dot:
            made.setdefault(part, {})[rest] = value
        else:
            made[part] = value
    return made


def owned_by(key: str, documents: Iterable[str]) -> bool:
    """Return True for a tensor that belongs to one of the named objects."""
    return not is_of_one_rank(key) and any(key.startswith(f"{name}.") for name in documents)


def plain_values(documents: Mapping[str, Any]) -> dict[OBJ_PATH, Any]:
    """Return the values of schedulers and extras that are not tensors, by path as stock DCP has it.

    Tensors are entries of the checkpoint already.
    """
    others = {
        name: document
        for name, document in documents.items()
        if not (isinstance(document, dict) and document.get(plain.MARK) in _NO_VALUES)
    }
    made = make_objects(others, plain.templates(others))
    flat, paths = flatten_state_dict(made)
    return {paths[key]: v for key, v in flat.items() if not isinstance(v, torch.Tensor)}


def _loadable(value: Any) -> Any:
    """Return `value` with the types that `torch.load(weights_only=True)` and stock DCP accept.

    NumPy arrays become tensors, its numbers Python's, and other mappings plain dictionaries.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        pairs = {_loadable(key): _loadable(item) for key, item in value.items()}
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else pairs
    if type(value) in {list, tuple}:
        return type(value)(_loadable(item) for item in value)
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Return True for equal options. A tensor prints four digits only, so `repr` is not enough."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return repr(one) == repr(other)


def _split(rest: str, names: Mapping[str, int]) -> tuple[str | None, str]:
    """Split into a parameter's name, which may contain dots, and the rest."""
    at = len(rest)
    while (at := rest.rfind(".", 0, at)) > 0:
        if rest[:at] in names:
            return rest[:at], rest[at + 1 :]
    return None, rest


# The file names that Hugging Face's libraries use.
HF_WHOLE: Final = "model.safetensors"
HF_SHARD: Final = "model-{number:05d}-of-{count:05d}.safetensors"
# In a folder of DCP: the values of schedulers and extras that are not tensors.
VALUES: Final = "__values_0.distcp"
HF_INDEX: Final = "model.safetensors.index.json"


def write_torch(source: ExportSource, place: Path, _: int) -> None:
    """Write one file for `torch.load(path, weights_only=True)`, with parts for `load_state_dict`.

    The complete state is in memory.
    """
    values = source.read(source.entries)
    flat = {entry.key: values[entry.name] for entry in source.entries}
    objects = make_objects(source.documents, flat)
    optimizer = make_optimizer(flat)
    state: dict[str, Any] = {}
    for entry in source.entries:
        is_of_optimizer = optimizer is not None and entry.key.startswith(f"{OPTIMIZER}.")
        if not is_of_optimizer and not owned_by(entry.key, source.documents):
            set_element(state, entry.path, values[entry.name])
    if optimizer is not None:
        state[OPTIMIZER] = optimizer
    torch.save(state | objects, place)
    _sync(place)


def write_safetensors(source: ExportSource, place: Path, _: int) -> None:
    """Write the tensors to one safetensors file. All of them are in memory."""
    _write_tensors(source, weights_of(source), place)


def write_hf(source: ExportSource, place: Path, shard_bytes: int) -> None:
    """Write a folder for `from_pretrained`: safetensors of at most `shard_bytes`, and their index.

    One shard is in memory at a time. The user adds the configuration and the tokenizer.
    """
    place.mkdir()
    shards = list(batches(weights_of(source), shard_bytes))
    if len(shards) == 1:
        _write_tensors(source, shards[0], place / HF_WHOLE)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = HF_SHARD.format(number=number, count=len(shards))
        _write_tensors(source, shard, place / name)
        where |= {entry.name: name for entry in shard}
    total = sum(entry.bytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write_text(place / HF_INDEX, json.dumps(index, indent=2) + "\n")
    durable.fsync_directory(place)


def write_dcp(source: ExportSource, place: Path, _: int) -> None:
    """Write a stock DCP folder, without Holdfast's own files.

    The plain values of schedulers and extras, which Holdfast saves as JSON, become entries. If
    everything is wanted as it was saved, the files are copied. Otherwise, and to join several
    pipeline stages, the state goes through memory and stock DCP's own writer.
    """
    require_tensors(source)
    values = plain_values(source.documents)
    if _is_whole(source):
        _copy_files(source, place)
        if values:
            _add_values(source.opened.metadata, values, place)
        return
    with warnings.catch_warnings():
        # Stock DCP warns about a save without a process group, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_with_dcp(_nested(source, values), checkpoint_id=place, no_dist=True)
    for path in place.iterdir():
        _sync(path)
    durable.fsync_directory(place)


FORMS: Final[dict[str, Callable[[ExportSource, Path, int], None]]] = {
    "torch": write_torch,
    "safetensors": write_safetensors,
    "hf": write_hf,
    "dcp": write_dcp,
}


@contextmanager
def appearing(output: Path, checkpoint: Path) -> Iterator[Path]:
    """Yield a path to write to. At the end of the block, move it to `output`, whole and durable.

    Its files get no more permissions than the files of the `checkpoint` have. Raises
    `CheckpointError` if `output` exists. Nothing is ever overwritten.
    """
    _refuse_existing(output)
    durable.make_directory(output.absolute().parent)
    scratch = Path(tempfile.mkdtemp(dir=output.absolute().parent, prefix=f".{output.name}."))
    try:
        yield scratch / output.name
        # `os.rename` would silently replace an empty directory.
        _refuse_existing(output)
        _limit_rights(scratch / output.name, checkpoint)
        os.rename(scratch / output.name, output)
        durable.fsync_directory(output.absolute().parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def bytes_in(output: Path) -> int:
    return sum(path.stat().st_size for path in _files_in(output))


def _limit_rights(place: Path, checkpoint: Path) -> None:
    """Take permissions from the files at `place` that the checkpoint's files do not have."""
    rights = reduce(and_, (rights_of(p.stat()) for p in _files_in(checkpoint)), 0o666)
    for path in _files_in(place):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~rights:
            path.chmod(mode & rights)


def _files_in(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]


def _refuse_existing(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise CheckpointError(
            f"{output}: exists already and is not overwritten; give another --output, or delete it"
        )


def _nested(source: ExportSource, more: Mapping[OBJ_PATH, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    values = source.read(source.entries)
    for entry in source.entries:
        set_element(state, entry.path, values[entry.name])
    for path, value in more.items():
        set_element(state, path, value)
    return state


def _add_values(metadata: dcp.Metadata, values: Mapping[OBJ_PATH, Any], place: Path) -> None:
    """Add values that are not tensors to a copied DCP folder, in a separate file."""
    entries, stored, paths = {}, {}, {}
    with open(place / VALUES, "wb") as stream:
        for path, value in values.items():
            key, start = ".".join(map(str, path)), stream.tell()
            torch.save(value, stream)
            stored[dcp.MetadataIndex(key)] = _StorageInfo(VALUES, start, stream.tell() - start)
            entries[key], paths[key] = dcp.BytesStorageMetadata(), path
    more = replace(
        metadata,
        state_dict_metadata={**metadata.state_dict_metadata, **entries},
        storage_data={**(metadata.storage_data or {}), **stored},
        planner_data={**paths_of(metadata), **paths},
    )
    (place / METADATA).write_bytes(pickle.dumps(more))
    _sync(place / VALUES)
    _sync(place / METADATA)
    durable.fsync_directory(place)


def _write_tensors(source: ExportSource, entries: list[ExportEntry], place: Path) -> None:
    # safetensors is an optional dependency of training.
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError(
            "safetensors is not installed in the job's environment; install Holdfast with the "
            "extra `trainer` there, or write --to torch"
        ) from error
    save_file(source.read(entries), place, metadata={"format": "pt"})
    _sync(place)


def _is_whole(source: ExportSource) -> bool:
    """Return True if the files are exactly what is wanted: one stage, all keys, same names."""
    metadata = source.opened.metadata
    saved = metadata.state_dict_metadata
    folders = {"/" in info.relative_path for info in (metadata.storage_data or {}).values()}
    is_all = {entry.key for entry in source.entries} == {
        key for key in saved if not is_of_one_rank(key)
    }
    same = all(
        entry.name == entry.key and _type_saved(saved[entry.key]) == entry.dtype
        for entry in source.entries
    )
    return is_all and same and folders <= {False}


def _type_saved(entry: dcp.STORAGE_TYPES) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, dcp.TensorStorageMetadata) else None


def _copy_files(source: ExportSource, place: Path) -> None:
    """Copy data files and `.metadata`, after a check that they are as committed."""
    manifest = source.opened.manifest
    storage = source.opened.metadata.storage_data or {}
    names = sorted({info.relative_path for info in storage.values()})
    if manifest is not None and (damaged := damage.find_damage(source.directory, manifest)):
        raise DamagedCheckpointError(
            f"{source.directory}: {'; '.join(damaged)}; export another checkpoint", damaged=damaged
        )
    place.mkdir()
    for name in [*names, METADATA]:
        shutil.copyfile(source.directory / name, place / name)
        _sync(place / name)
    durable.fsync_directory(place)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
