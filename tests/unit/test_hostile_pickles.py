"""Hostile pickles run no code, change no class, and use little time and memory.

Each is read in a forked child with bounded memory and CPU time. The child compares every
attribute of the classes involved before and after, and reports how much memory it used.
"""

from __future__ import annotations

import collections
import gc
import io
import os
import pathlib
import pickle
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed.checkpoint.filesystem as files
import torch.distributed.checkpoint.metadata as records
from torch.distributed._shard.sharded_tensor import metadata as sharded

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.format.metadata import open_checkpoint, parse_metadata
from holdfast.trainer.format.plain_load import load_plain
from holdfast.trainer.format.plain_pickle import RefusedPickle, read_pickle

GROWTH_BYTES_MAX: Final = 300 << 20
MEMORY_BYTES_MAX: Final = 4 << 30
CPU_S_MAX: Final = 5
DCP: Final = "torch.distributed.checkpoint.metadata"
FILES: Final = "torch.distributed.checkpoint.filesystem"
WATCHED: Final[tuple[Any, ...]] = (
    records.BytesStorageMetadata,
    records.ChunkStorageMetadata,
    records.Metadata,
    records.MetadataIndex,
    records.StorageMeta,
    records.TensorProperties,
    records.TensorStorageMetadata,
    records._MEM_FORMAT_ENCODING,
    *records._MEM_FORMAT_ENCODING,
    sharded.TensorProperties,
    sharded.MEM_FORMAT_ENCODING,
    *sharded.MEM_FORMAT_ENCODING,
    files._StorageInfo,
    files._StoragePrefix,
    torch.Size,
    torch.Tensor,
    torch.serialization._get_layout,
    torch.float32,
    collections.OrderedDict,
    pathlib.PurePath,
    pathlib.PurePosixPath,
    pathlib.PosixPath,
)
NAMES: Final = (
    *((DCP, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata")),
    *((DCP, name) for name in ("MetadataIndex", "StorageMeta", "TensorProperties")),
    *((DCP, name) for name in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    (FILES, "_StorageInfo"),
    (FILES, "_StoragePrefix"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("builtins", "getattr"),
    ("__builtin__", "getattr"),
)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def whole(planner_data: bytes = b"N") -> bytes:
    """A valid, empty `.metadata` with the given planner data."""
    attributes = text("state_dict_metadata") + b"}" + text("planner_data") + planner_data
    return named(DCP, "Metadata") + b")\x81}(" + attributes + text("storage_data") + b"}ub."


def attributes_on(name: tuple[str, str], made: bytes = b"") -> bytes:
    """GLOBAL, then BUILD with `(None, {attribute: value})`, which sets attributes; then POP."""
    pairs = text("is_relative_to") + b"\x88" + text("_str") + text("/etc") + text("x") + b"K\x01"
    return named(*name) + made + b"(N}(" + pairs + b"utb0"


def nested(levels: int) -> bytes:
    """A tuple that contains the same tuple twice, and so on: short to write, endless to hash."""
    return b"K\x01\x85\x940" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x940" for n in range(levels)
    )


SETTERS: Final = {
    f"attributes of {name} {how}": (attributes_on((module, name), made) + whole())
    for module, name in NAMES
    for how, made in (
        ("itself", b""),
        ("an object", b")\x81"),
        ("called with nothing", b")R"),
        ("called with 0", b"K\x00\x85R"),
    )
}
BOMBS: Final = {
    "a far place in the memo": b"Nr\xff\xff\xff\x0f." + whole(),
    "a place in the memo by text": b"Np999999999\n." + whole(),
    "long text": b"\x8d" + struct.pack("<Q", 6 << 30) + b"x.",
    "long text, short length": b"X\xff\xff\xff\xffx.",
    "long bytes": b"\x8e" + struct.pack("<Q", 6 << 30) + b"x.",
    "a long bytearray": b"\x96" + struct.pack("<Q", 6 << 30) + b"x.",
    "a long number": b"\x8b\xff\xff\xff\x7f.",
    "a long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "lists in lists": b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples in tuples": b")" + b"\x85" * 3_000_000 + b"0" + whole(),
    "a deep tuple as a key": b"})" + b"\x85" * 3_000_000 + b"Ns0" + whole(),
    "marks upon marks": b"(" * 5_000_000,
    "a key that is endless to hash": nested(60) + b"}h\x3cNs0" + whole(),
    "a set that is endless to hash": nested(60) + b"\x8f(h\x3c\x900" + whole(),
    "a frozen set that is endless to hash": nested(60) + b"(h\x3c\x910" + whole(),
    "an index that is endless to hash": nested(60)
    + named(DCP, "MetadataIndex")
    + b")\x81}("
    + (text("fqn") + text("a") + text("offset") + b"h\x3cub0")
    + whole(),
    "an endless comparison": nested(60) + b"}(" + (b"h\x3cN" * 2) + b"u0" + whole(),
    "a size of as many dimensions": named("torch", "Size")
    + b"("
    + b"K\x01" * 99
    + b"t\x85R0"
    + whole(),
    "a size from a size": named("torch", "Size") + b"J\xff\xff\xff\x7f\x85R0" + whole(),
    "many lists": b"(" + b"]" * 4_000_000 + b"l.",
    "no end": b"N" * 4_000_000,
    "nothing at all": b"",
    "zeros": bytes(4_000_000),
    "a name without an end": b"c" + b"a" * 4_000_000,
    "the memo doubled": b"".join(b"(" + b"h\x00" * 0 + b"t\x940" for _ in range(200)) + whole(),
    "a persistent id": b"K\x01Q.",
    "out-of-band memory": b"\x97.",
    "an extension": b"\x82\x01.",
    "an instance": b"(ios\nsystem\n.",
    "a call by name": b"cos\nsystem\n" + text("touch ran") + b"\x85R.",
    "a call by names on the stack": text("os") + text("system") + b"\x93.",
    "builtins": b"cbuiltins\neval\n" + text("1") + b"\x85R.",
    "an object by keywords": named(DCP, "Metadata") + b")}\x92.",
}


def storage(count: int) -> bytes:
    reference = text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu")
    return b"(" + reference + b"J" + struct.pack("<i", count) + b"tQ"


def entry(pickled: bytes, *more: tuple[str, bytes]) -> bytes:
    """A zip in the layout of `torch.save` around any pickle."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as made:
        said = (("version", b"3\n"), ("byteorder", b"little"))
        for name, content in (("data.pkl", b"\x80\x02" + pickled + b"."), *said, *more):
            made.writestr(f"archive/{name}", content)
    return packed.getvalue()


def rebuilt(count: int, *arguments: bytes) -> bytes:
    function = named("torch._utils", "_rebuild_tensor_v2")
    return function + b"(" + storage(count) + b"".join(arguments) + b"\x89NtR"


def huge(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


ENTRIES: Final = {
    "a bytearray of zeros": entry(named("__builtin__", "bytearray") + huge(2 << 30) + b"\x85R"),
    "a tensor by its size": entry(named("torch", "FloatTensor") + huge(6 << 28) + b"\x85R"),
    "a storage by its size": entry(
        named("torch.storage", "UntypedStorage") + huge(6 << 30) + b"\x85R"
    ),
    "a typed storage by its size": entry(
        named("torch.storage", "TypedStorage") + huge(6 << 28) + b"\x85R"
    ),
    "a storage that is not there": entry(rebuilt(4, b"K\x00K\x04\x85K\x01\x85")),
    "a tensor beyond its storage": entry(
        rebuilt(1, b"K\x00", huge(6 << 30), b"\x85K\x01\x85"), ("data/0", bytes(4))
    ),
    "a storage of more than its record": entry(
        rebuilt(1 << 30, b"K\x00K\x04\x85K\x01\x85"), ("data/0", bytes(4))
    ),
    "bytes doubled again and again": entry(
        b"".join(named("_codecs", "encode") for _ in range(36))
        + text("x")
        + b"".join((text("latin1") if n == 0 else text("hex")) + b"\x86R" for n in range(36))
    ),
    "a key that is endless to hash": entry(
        b"K\x01\x85q\x000"
        + b"".join(
            b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) + b"0"
            for n in range(60)
        )
        + b"}h\x3cNs"
    ),
    "a set that is endless to hash": entry(
        b"K\x01\x85q\x000"
        + b"".join(
            b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) + b"0"
            for n in range(60)
        )
        + named("__builtin__", "set")
        + b"]h\x3ca\x85R"
    ),
    "a call by name": entry(b"cos\nsystem\n" + text("touch ran") + b"\x85R"),
    "no pickle": entry(b"N").replace(b"data.pkl", b"data.txt"),
}


def inflating() -> bytes:
    packed, part = io.BytesIO(), bytes(1 << 24)
    with (
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
        made.open("archive/data.pkl", "w") as stream,
    ):
        for _ in range(2 * GROWTH_BYTES_MAX // len(part)):
            stream.write(part)
    return packed.getvalue()


def facts() -> list[tuple[str, list[tuple[str, int]]]]:
    """Every attribute, by identity, of the objects that a pickle can reach."""
    return [
        (repr(each), sorted((name, id(value)) for name, value in vars(each).items()))
        for each in WATCHED
        if hasattr(each, "__dict__")
    ]


def in_child(read: Callable[[], object]) -> str:
    """The result of `read` in a forked child: "refused", "read", or what went wrong."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        os.write(sending, _outcome(read).encode()[:4000])
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as stream:
        said = stream.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"the child ended by signal {os.WTERMSIG(status)}"


def _outcome(read: Callable[[], object]) -> str:
    # Exclude the objects of earlier tests from garbage collection.
    gc.freeze()
    before, grown = facts(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES_MAX, resource.RLIM_INFINITY))
    try:
        read()
        said = "read"
    except DamagedCheckpointError:
        said = "refused"
    except BaseException as error:
        # The test judges any error.
        said = f"raised {type(error).__name__}: {error}"
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) * 1024
    if taken > GROWTH_BYTES_MAX:
        return f"{said}, with {taken} bytes of memory"
    if facts() != before:
        return f"{said}, and a class changed"
    return said


@pytest.mark.more
@pytest.mark.parametrize("content", SETTERS.values(), ids=SETTERS)
def test_no_pickle_sets_an_attribute_of_a_class(content: bytes) -> None:
    assert in_child(lambda: parse_metadata(content, "here")) in {"refused", "read"}


@pytest.mark.more
@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_no_pickle_uses_much_time_or_memory(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_child(lambda: parse_metadata(content, "here")) in {"refused", "read"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ENTRIES.values(), ids=ENTRIES)
def test_no_entry_uses_much_time_or_memory(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_child(lambda: load_plain(content)) == "refused"
    assert not (tmp_path / "ran").exists()


@pytest.mark.more
def test_an_entry_that_decompresses_to_a_large_size_is_refused() -> None:
    content = inflating()
    assert in_child(lambda: load_plain(content)) == "refused"


def test_an_ambiguous_zip_is_read_as_it_was_checked() -> None:
    content = bytearray(entry(b"cos\nsystem\n" + text("touch ran") + b"\x85R"))
    plain = entry(b"K\x07")
    # The first archive is hidden before the second, and only the second is checked and read.
    assert load_plain(bytes(content) + plain) == 7


def test_sound_metadata_after_a_hostile_prefix_is_refused_and_alone_is_read() -> None:
    assert in_child(lambda: parse_metadata(whole(), "here")) == "read"
    attempt = attributes_on(("pathlib", "PosixPath")) + whole()
    assert in_child(lambda: parse_metadata(attempt, "here")) == "refused"


def test_a_huge_sparse_metadata_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / ".metadata", "wb") as stream:
        stream.write(b"\x80\x04\x8d" + struct.pack("<Q", 7 << 30))
        stream.truncate(7 << 30)
    assert in_child(lambda: open_checkpoint(tmp_path).metadata) == "refused"


def test_the_unpickler_of_python_lets_a_pickle_change_a_class() -> None:
    """It harms even a reader that restricts which names may be looked up."""
    content = attributes_on((DCP, "StorageMeta")) + whole()

    def unpickle() -> None:
        pickle.loads(content)

    assert in_child(unpickle) == "read, and a class changed"


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_off_while_a_pickle_is_read(is_on: bool) -> None:
    seen = []

    def find(module: str, name: str) -> None:
        seen.append(gc.isenabled())
        raise RefusedPickle(f"{module}.{name}")

    try:
        if not is_on:
            gc.disable()
        with pytest.raises(RefusedPickle):
            read_pickle(iter([named("os", "system")]), find, {})
        assert gc.isenabled() is is_on
        assert read_pickle(iter([b"K\x07."]), find, {}) == 7
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert seen == [False]


def test_safe_reading_of_large_metadata_is_fast_enough() -> None:
    size = torch.Size([2, 3])
    chunks = [records.ChunkStorageMetadata(torch.Size([n, 0]), size) for n in range(20_000)]
    properties = records.TensorProperties(dtype=torch.float32)
    shape = torch.Size([20_002, 3])
    whole = records.Metadata({"a": records.TensorStorageMetadata(properties, shape, chunks)})
    content = pickle.dumps(whole)
    began = time.process_time()
    assert parse_metadata(content, "here") == whole
    assert time.process_time() - began < 5, sys.version
