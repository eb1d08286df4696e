"""Hostile checkpoints: each case damages a good one in one way."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.manifest import FileEntry, Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName

NAME: Final = str(CheckpointName(7, 1, 1))
DATA: Final = "__0_0.distcp"
TRAIN_STATE: Final = "train_state.json"
# More memory than the loading program may use.
BOMB_BYTES: Final = 3 << 29
CANARY: Final = "ran"
Spoil = Callable[[Path], object]


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._command = f"touch {target}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def state() -> dict[str, Any]:
    """The state that is saved and loaded into."""
    return {"w": torch.arange(6000.0).reshape(60, 100), "n": 3}


def make(directory: Path) -> None:
    """A good checkpoint, as stock DCP writes it."""
    save(state(), checkpoint_id=directory)
    (directory / "train_state.json").write_text('{"step": 7}')


def seal(directory: Path) -> None:
    """Write a manifest that matches all files, as an attacker could."""
    entries = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink()):
        content = path.read_bytes()
        checksum = FileChecksum(len(content))
        checksum.update(content)
        entries.append(FileEntry.of(str(path.relative_to(directory)), len(content), checksum))
    manifest = Manifest(
        run_uid="0" * 32,
        run="run",
        name=NAME,
        step=7,
        attempt=1,
        launch=1,
        world_size=1,
        files=tuple(entries),
        committed_at=1.0,
    )
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))


def edit(change: Callable[[Any], object]) -> Spoil:
    """Change something in `.metadata`."""

    def act(directory: Path) -> None:
        metadata = pickle.loads((directory / ".metadata").read_bytes())
        change(metadata)
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))

    return act


def raw(make_content: Callable[[Path], bytes]) -> Spoil:
    return lambda d: (d / ".metadata").write_bytes(make_content(d))


def place(key: str, **changes: Any) -> Spoil:
    """Change the location of the entry of `key`."""

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                metadata.storage_data[index] = replace(info, **changes)

    return edit(change)


def chunks(*boxes: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Spoil:
    """Replace the chunks of `w`, each (offsets, sizes), all at the location of the original one."""

    def change(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "w")
        info = metadata.storage_data.pop(index)
        made = [ChunkStorageMetadata(_size(o), _size(s)) for o, s in boxes]
        metadata.state_dict_metadata["w"].chunks = made
        for chunk in made:
            if isinstance(chunk.offsets, torch.Size):
                metadata.storage_data[MetadataIndex("w", chunk.offsets)] = info

    return edit(change)


def _size(numbers: tuple[Any, ...]) -> Any:
    return torch.Size(numbers) if all(isinstance(n, int) for n in numbers) else numbers


def entry(key: str, content: Callable[[Path], bytes]) -> Spoil:
    """Append other bytes for the entry of `key` to the data file."""

    def act(directory: Path) -> None:
        data = content(directory)
        at = (directory / DATA).stat().st_size
        with open(directory / DATA, "ab") as stream:
            stream.write(data)
        place(key, offset=at, length=len(data))(directory)

    return act


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def canary(directory: Path) -> Hostile:
    return Hostile(directory.parent / CANARY)


@cache
def bomb() -> bytes:
    """A tensor's zip file whose data decompress to `BOMB_BYTES` zeros."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.zeros(60, 100)))) as source,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
    ):
        for name in source.namelist():
            with made.open(name, "w", force_zip64=True) as target:
                if name.endswith("/data/0"):
                    for _ in range(BOMB_BYTES >> 20):
                        target.write(bytes(1 << 20))
                else:
                    target.write(source.read(name))
    return stream.getvalue()


def put(path: str, content: bytes) -> Spoil:
    return lambda d: (d / path).write_bytes(content)


def instead(path: str, make_other: Callable[[Path], object]) -> Spoil:
    """Replace the file by something else."""

    def act(directory: Path) -> None:
        (directory / path).unlink()
        make_other(directory / path)

    return act


def move_outside(directory: Path) -> None:
    os.rename(directory / DATA, directory.parent / "outside")
    (directory / DATA).symlink_to(directory.parent / "outside")


def patched(find: bytes, put: bytes) -> bytes:
    content = saved(torch.zeros(60, 100))
    assert find in content
    return content.replace(find, put)


def forged(**changes: Any) -> TensorStorageMetadata:
    """A tensor's entry with values of wrong types."""
    return replace(TENSOR, **changes)


def set_entry(value: Any) -> Spoil:
    return edit(lambda m: m.state_dict_metadata.update(w=value))


def set_dict(name: str, value: Any) -> Spoil:
    return edit(lambda m: setattr(m, name, value))


WHOLE: Final = ((0, 0), (60, 100))
HALF: Final = ((0, 0), (30, 100))
TENSOR: Final = TensorStorageMetadata(
    TensorProperties(dtype=torch.float32), torch.Size((60, 100)), []
)
METADATA_CASES: Final[dict[str, Spoil]] = {
    "a pickle that calls": raw(lambda d: pickle.dumps(canary(d))),
    "calls among the planner's data": lambda d: edit(
        lambda m: setattr(m, "planner_data", canary(d))
    )(d),
    "calls among the places": lambda d: edit(lambda m: m.storage_data.update(x=canary(d)))(d),
    "calls as an attribute": lambda d: edit(lambda m: m.__dict__.update(more=canary(d)))(d),
    "names eval": raw(
        lambda d: b"cbuiltins\neval\n(S'open(\"" + bytes(d.parent / CANARY) + b'", "w")' + b"'\ntR."
    ),
    "names a lazy module of torch": raw(lambda d: b"ctorch\n_inductor\n."),
    "no pickle": raw(lambda d: b"\x80\x04 no"),
    "empty": raw(lambda d: b""),
    "entries that are a list": set_dict("state_dict_metadata", ["w", "n"]),
    "places that are a list": set_dict("storage_data", [1, 2]),
    "places that are missing": set_dict("storage_data", None),
    "places under numbers": set_dict("storage_data", {1: _StorageInfo(DATA, 0, 10)}),
    "places that are text": edit(
        lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, "x"))
    ),
    "an entry that is text": set_entry("text"),
    "an entry that is bytes": set_entry(BytesStorageMetadata()),
    "an entry without chunks": set_entry(TENSOR),
    "chunks that are none": set_entry(forged(chunks=None)),
    "chunks that are text": set_entry(forged(chunks=["x"])),
    "properties that are none": set_entry(forged(properties=None)),
    "a type that is text": edit(
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "float32")
    ),
    "keys that are numbers": edit(
        lambda m: m.state_dict_metadata.update(dict.fromkeys([5], TENSOR))
    ),
    "a path above": place("w", relative_path="../other.distcp"),
    "an absolute path": place("w", relative_path="/etc/passwd"),
    "a path with NUL": place("w", relative_path="a\0b"),
    "a path that is a number": place("w", relative_path=7),
    "a path that is endless": place("w", relative_path="a" * 5000),
    "the directory itself": place("w", relative_path="."),
    "a negative offset": place("w", offset=-8),
    "an offset beyond the file": place("w", offset=1 << 20),
    "an offset beyond all": place("w", offset=1 << 63),
    "a length beyond the file": place("w", length=1 << 45),
    "a length beyond all": place("n", length=(1 << 63) - 1),
    "a negative length": place("n", length=-1),
    "a length of nothing": place("w", length=0),
    "a length that is text": place("w", length="9"),
    "a hole": chunks(HALF),
    "a hole under two of the same": chunks(HALF, ((0, 0), (30, 100))),
    "a hole under an overlap": chunks(HALF, ((15, 0), (30, 100))),
    "a chunk beyond the tensor": chunks(((0, 0), (60, 100)), ((60, 0), (60, 100))),
    "a chunk before the tensor": chunks(((-60, 0), (120, 100))),
    "a chunk of 2 ** 80 elements": chunks(((0, 0), (1 << 40, 1 << 40))),
    "a chunk of other dimensions": chunks(((0,), (6000,))),
    "a chunk of text": chunks((("a", "b"), ("c", "d"))),
}
ENTRY_CASES: Final[dict[str, Spoil]] = {
    "a number that calls": entry("n", lambda d: saved(canary(d))),
    "a number that is a bare pickle": entry("n", lambda d: pickle.dumps(canary(d))),
    "a number that is no zip": entry("n", lambda d: b"PK\x03\x04" + b"x" * 200),
    "a tensor that calls": entry("w", lambda d: saved(canary(d))),
    "a tensor that is a bare pickle": entry("w", lambda d: pickle.dumps(canary(d))),
    "a tensor that is text": entry("w", lambda d: saved("text")),
    "a tensor of another shape": entry("w", lambda d: saved(torch.zeros(50, 100))),
    "a tensor of other dimensions": entry("w", lambda d: saved(torch.zeros(6000))),
    "a tensor of a zip cut short": entry("w", lambda d: saved(torch.zeros(60, 100))[:-30]),
    "a tensor that inflates": entry("w", lambda d: bomb()),
    "a number that inflates": entry("n", lambda d: bomb()),
    "a storage of another size": entry("w", lambda d: patched(b"\x4d\x70\x17", b"\x4d\x70\x71")),
}
FILE_CASES: Final[dict[str, Spoil]] = {
    "a link outside": move_outside,
    "a pipe": instead(DATA, os.mkfifo),
    "a device": instead(DATA, lambda p: p.symlink_to("/dev/zero")),
    "a link to itself": instead(DATA, lambda p: p.symlink_to(p.name)),
    ".metadata is a pipe": instead(".metadata", os.mkfifo),
    ".metadata has no end": instead(".metadata", lambda p: p.symlink_to("/dev/zero")),
    ".metadata is huge": lambda d: os.truncate(d / ".metadata", 1 << 42),
}
TRAIN_STATE_CASES: Final[dict[str, Spoil]] = {
    "deep": put(TRAIN_STATE, ('{"a":' * 200_000 + "1" + "}" * 200_000).encode()),
    "huge": lambda d: os.truncate(d / TRAIN_STATE, 1 << 40),
    "a list": put(TRAIN_STATE, b"[]"),
    "not UTF-8": put(TRAIN_STATE, b'{"a": "\xff"}'),
    "a number of a million digits": put(TRAIN_STATE, b'{"step": ' + b"9" * 1_000_000 + b"}"),
    "a pipe": instead(TRAIN_STATE, os.mkfifo),
    "no end": instead(TRAIN_STATE, lambda p: p.symlink_to("/dev/zero")),
}
