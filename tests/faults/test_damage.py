"""`verify` reports every kind of damage, and a resume uses the previous checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.contracts.disk.bounds import BYTES_MAX
from holdfast.contracts.disk.digests import BLOCK_BYTES, FileChecksum
from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.manifest import (
    MANIFEST_BYTES_MAX,
    FileEntry,
    Manifest,
    encode_manifest,
)
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.trainer.loading.resume import choose, inspect

SIZES = {".metadata": 700, "__0_0.distcp": BLOCK_BYTES + 5000, "__1_0.distcp": 900, "pp0/a": 900}
GOOD, BAD = 10, 20


def commit(run: RunPaths, step: int) -> Path:
    """A checkpoint of several files with different contents, one longer than a block."""
    name = CheckpointName(step, 1, 1)
    directory = run.checkpoint(name)
    entries = []
    for path, size in SIZES.items():
        content = f"{path} of step {step} of {run.directory}, ".encode()
        content = (content * (size // len(content) + 1))[:size]
        checksum = FileChecksum(size)
        checksum.update(content)
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
        entries.append(FileEntry.of(path, size, checksum))
    manifest = Manifest(
        run_uid="0" * 32,
        run=run.name,
        name=str(name),
        step=step,
        attempt=1,
        launch=1,
        world_size=2,
        files=tuple(entries),
        committed_at=1.0,
    )
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    return directory


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two runs of two checkpoints each; tests damage copies of it."""
    root = tmp_path_factory.mktemp("origin")
    for run in ("run", "other"):
        for step in (GOOD, BAD):
            commit(RunPaths(root / run), step)
    return root


def flip(path: str, at: int) -> Callable[[Path], object]:
    """Flip one bit of the byte at `at`; a negative `at` counts from the end."""

    def act(directory: Path) -> None:
        content = bytearray((directory / path).read_bytes())
        content[at] ^= 0x10
        (directory / path).write_bytes(content)

    return act


def cut(path: str, by: int) -> Callable[[Path], object]:
    return lambda d: os.truncate(d / path, (d / path).stat().st_size - by)


def put(path: str, content: bytes) -> Callable[[Path], object]:
    return lambda d: (d / path).write_bytes(content)


def replace(path: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replace `path` by something else."""

    def act(directory: Path) -> None:
        (directory / path).unlink()
        make(directory / path)

    return act


def swap(one: str, other: str) -> Callable[[Path], object]:
    def act(directory: Path) -> None:
        os.rename(directory / one, directory / "aside")
        os.rename(directory / other, directory / one)
        os.rename(directory / "aside", directory / other)

    return act


def take(path: str, run: str, step: int) -> Callable[[Path], object]:
    """Overwrite the file with that of another checkpoint."""
    name = str(CheckpointName(step, 1, 1))
    return lambda d: shutil.copyfile(d.parents[2] / run / "checkpoints" / name / path, d / path)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change one value in the manifest."""

    def act(directory: Path) -> None:
        document = json.loads((directory / MANIFEST).read_bytes())
        # An attacker can compute a fitting digest, or leave it out as old manifests do.
        del document["digest"]
        change(document)
        (directory / MANIFEST).write_bytes(to_json(document))

    return act


def rename_file(path: str) -> Callable[[Path], object]:
    return edit(lambda m: m["files"][0].update(path=path))


BIG = "__0_0.distcp"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "first bit": (flip(BIG, 0), f"{BIG}: bytes 0 to {BLOCK_BYTES - 1}: checksum"),
    "bit of the last block": (flip(BIG, -1), f"bytes {BLOCK_BYTES} to {BLOCK_BYTES + 4999}"),
    "bit of a small file": (flip("pp0/a", 450), "pp0/a: checksum"),
    "bit of .metadata": (flip(".metadata", 10), ".metadata: checksum"),
    "cut by a byte": (cut(BIG, 1), "bytes, expected"),
    "emptied": (put(BIG, b""), "0 bytes, expected"),
    "longer by a byte": (put("__1_0.distcp", b"x" * 901), "901 bytes, expected 900"),
    "missing": (lambda d: (d / "pp0/a").unlink(), "pp0/a: missing"),
    "a folder missing": (lambda d: shutil.rmtree(d / "pp0"), "pp0/a: missing"),
    "two files swapped": (swap("__1_0.distcp", "pp0/a"), "__1_0.distcp: checksum"),
    "the file of another step": (take(BIG, "run", GOOD), "checksum"),
    "the file of another run": (take(BIG, "other", BAD), "checksum"),
    "a folder for a file": (replace(BIG, lambda p: p.mkdir()), "not a regular file"),
    "a pipe for a file": (replace(BIG, os.mkfifo), "not a regular file"),
    "a device for a file": (replace(BIG, lambda p: p.symlink_to("/dev/zero")), "leads outside"),
    "a link outside": (replace(BIG, lambda p: p.symlink_to("/etc/passwd")), "leads outside"),
    "links in a circle": (replace(BIG, lambda p: p.symlink_to(p.name)), "a loop of links"),
    "manifest: missing": (lambda d: (d / MANIFEST).unlink(), "never committed"),
    "manifest: emptied": (put(MANIFEST, b""), "Invalid JSON"),
    "manifest: cut": (cut(MANIFEST, 80), "Invalid JSON"),
    "manifest: bit": (flip(MANIFEST, 40), f"{MANIFEST}: "),
    "manifest: last bit": (flip(MANIFEST, -8), f"{MANIFEST}: "),
    "manifest: of another step": (take(MANIFEST, "run", GOOD), "belongs to step-00000010"),
    "manifest: of another run": (take(MANIFEST, "other", BAD), "checksum"),
    "manifest: a folder": (replace(MANIFEST, lambda p: p.mkdir()), MANIFEST),
    "manifest: a pipe": (replace(MANIFEST, os.mkfifo), "not a regular file"),
    "manifest: endless": (replace(MANIFEST, lambda p: p.symlink_to("/dev/zero")), "a link, or"),
    "manifest: links in a circle": (
        replace(MANIFEST, lambda p: p.symlink_to(p.name)),
        "a link, or inside a linked folder",
    ),
    "manifest: huge": (
        lambda d: os.truncate(d / MANIFEST, MANIFEST_BYTES_MAX + 1),
        f"{MANIFEST_BYTES_MAX + 1} bytes, expected",
    ),
    "manifest: deep": (put(MANIFEST, b'{"topology":' + b"[" * 200_000), "recursion limit"),
    "manifest: of a newer format": (edit(lambda m: m.update(format=2)), "format"),
    "manifest: no files' digests": (edit(lambda m: m["files"][0].pop("checksum")), "checksum"),
    "manifest: a file twice": (edit(lambda m: m["files"].append(m["files"][0])), "listed 2 times"),
    "manifest: a path above": (rename_file("../run/spec.json"), "inside the checkpoint"),
    "manifest: a path within": (rename_file("pp0/../../x"), "inside the checkpoint"),
    "manifest: an absolute path": (rename_file("/etc/passwd"), "inside the checkpoint"),
    "manifest: a path with NUL": (rename_file("a\0b"), "inside the checkpoint"),
    "manifest: an endless path": (rename_file("a" * 5000), "cannot be read"),
    "manifest: a path to itself": (rename_file("."), "inside the checkpoint"),
    "manifest: a negative size": (edit(lambda m: m["files"][0].update(bytes=-1)), "files.0.bytes"),
    "manifest: a size beyond the file": (
        edit(lambda m: m["files"][0].update(bytes=10**14)),
        f".metadata: 700 bytes, expected {10**14}",
    ),
    "manifest: a size beyond all": (
        edit(lambda m: m["files"][0].update(bytes=10**30)),
        f"files.0.bytes: Input should be less than or equal to {BYTES_MAX}",
    ),
    "manifest: blocks of no bytes": (edit(lambda m: m["files"][1].update(block_bytes=0)), "block"),
    "manifest: a block's digest": (edit(lambda m: spoil_block(m["files"][1])), "block digests"),
}


def spoil_block(entry: dict[str, Any]) -> None:
    entry["blocks"] = "0" * 32 + entry["blocks"][32:]


Verify = Callable[[Path], tuple[int, list[str]]]


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """`holdfast verify`, called in this process: its exit status, and the damage that it names."""

    def call(directory: Path) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "verify", str(directory), "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        said = json.loads(capsys.readouterr().out)
        assert said["ok"] is (not said["damaged"])
        return int(ended.value.code or 0), said["damaged"]

    return call


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_and_resume_uses_the_previous_checkpoint(
    verify: Verify, origin: Path, tmp_path: Path, damage: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(origin, root)
    run = RunPaths(root / "run")
    directory = run.checkpoint(CheckpointName(BAD, 1, 1))
    assert inspect(directory)[1] is None
    act, word = DAMAGES[damage]
    act(directory)
    before = sorted(os.listdir(directory))
    _, problem = inspect(directory)
    assert problem is not None
    assert word in problem
    choice = choose(run, verify=True)
    assert choice.manifest is not None
    assert choice.manifest.step == GOOD
    assert choice.skipped == (f"{directory.name}: {problem}",)
    status, damaged = verify(directory)
    assert status == 1
    assert damaged
    # A skipped checkpoint is not deleted, so that people can inspect it.
    assert sorted(os.listdir(directory)) == before


def test_undamaged_checkpoint_passes_verification(verify: Verify, origin: Path) -> None:
    directory = RunPaths(origin / "run").checkpoint(CheckpointName(BAD, 1, 1))
    assert verify(directory) == (0, [])
