"""Mirror copies: in a directory and a real S3-compatible store, and uploads that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.support.mirrors import (
    PART_BYTES,
    SIZES,
    UID,
    WAIT_S,
    fork_server,
    make_checkpoint,
    push,
    start,
)
from tests.support.object_store import BUCKET, ObjectStore, Proxy, ProxyFault

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.mirrors import checkpoint_key
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError
from holdfast.trainer.mirror import __main__ as mirror
from holdfast.trainer.mirror import store as mirror_store
from holdfast.trainer.mirror.store import MirrorStore
from holdfast.trainer.mirror.transfer import (
    Retries,
    commit,
    fetch,
    missing_files,
    newest_remote,
    open_store,
    read_remote,
    read_upload,
    send_files,
)

QUICK = Retries(pauses_s=[0.05] * 5)
ONCE = Retries(pauses_s=())
# XFS accepts no smaller file system.
XFS_BYTES = 320 * 1024 * 1024
# Number of requests of an upload of `SIZES`; the tests kill the uploader at each of them.
REQUESTS = 14
# The request that joins the parts to one object, and the one that publishes the manifest.
JOINED, NAMED = 10, REQUESTS - 1


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_store, "PART_BYTES", PART_BYTES)


@pytest.fixture(params=["file", "s3", "local"])
def location(request: pytest.FixtureRequest, s3: ObjectStore, proxy: Proxy, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"s3://{BUCKET}/{tmp_path.name}/r.{UID}"
    # fsspec's name for the local file system, as an example of any other protocol.
    return f"{request.param}://{tmp_path}/mirror/r.{UID}"


def send(
    store: MirrorStore, directory: Path, retries: Retries = ONCE, former: Path | None = None
) -> int:
    upload = read_upload(directory, None)
    assert upload is not None
    known = None if former is None else read_manifest(former)
    sent = send_files(store, upload, retries=retries, former=known)
    assert missing_files(store, upload, retries=retries) == []
    commit(store, upload, retries=retries)
    return sent


def name_of(step: int) -> CheckpointName:
    return CheckpointName(step, 1, 1)


@pytest.mark.more
def test_checkpoint_is_copied_to_the_mirror_and_fetched_back(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    directories = [make_checkpoint(tmp_path / "r", step) for step in (5, 6)]
    for directory in directories:
        assert send(store, directory) == sum(SIZES.values())
        assert send(store, directory) == 0, "existing files must not be sent again"
    remote, skipped = newest_remote(store, UID, newer_than=name_of(5), without=(), retries=ONCE)
    assert remote is not None
    assert (remote.name, skipped) == (name_of(6), [])
    into = tmp_path / "back" / str(name_of(6))
    assert fetch(store, remote, into, url=location, retries=ONCE) == sum(SIZES.values())
    manifest = read_manifest(into)
    assert manifest == read_manifest(directories[1])
    assert manifest is not None
    assert find_damage(into, manifest) == []
    assert mirror.main([location, "verify", str(name_of(6))]) == 0
    # After a deletion the manifest stays as a tombstone, and the checkpoint is not sent again.
    assert mirror.main([location, "delete", str(name_of(6))]) == 0
    assert read_remote(store, name_of(6), UID, retries=ONCE) is None
    assert store.sizes(f"checkpoints/{name_of(6)}") == {}
    assert store.read(f"tombstones/{name_of(6)}.json") == (into / "manifest.json").read_bytes()
    with pytest.raises(MirrorError, match="was deleted from the mirror"):
        send(store, directories[1])
    found, _ = newest_remote(store, UID, newer_than=None, without=(), retries=ONCE)
    assert found is not None
    assert found.name == name_of(5)


def test_damaged_checkpoint_is_not_sent_to_the_mirror(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    directory = make_checkpoint(tmp_path / "r", 5)
    content = bytearray((directory / "pp0/large").read_bytes())
    content[70_000] ^= 1
    (directory / "pp0/large").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="pp0/large"):
        send(store, directory)
    assert checkpoint_key(str(name_of(5)), "pp0/large") not in store.sizes("checkpoints")
    assert store.read(checkpoint_key(str(name_of(5)))) is None


def test_damaged_or_uncommitted_mirror_copies_are_refused(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    send(store, make_checkpoint(tmp_path / "r", 5))
    store.put(checkpoint_key(str(name_of(5)), "small"), os.urandom(SIZES["small"]))
    assert mirror.main([location, "verify", str(name_of(5))]) == 1
    remote = read_remote(store, name_of(5), UID, retries=ONCE)
    assert remote is not None
    into = tmp_path / "back" / str(name_of(5))
    with pytest.raises(DamagedCheckpointError, match="small"):
        fetch(store, remote, into, url=location, retries=ONCE)
    assert not (into / "manifest.json").exists()
    with pytest.raises(DamagedCheckpointError, match="another run"):
        read_remote(store, name_of(5), "b" * 32, retries=ONCE)
    store.put(checkpoint_key(str(name_of(9))), b"{}")
    store.put(checkpoint_key(str(name_of(8)), "small"), b"half of it")
    found, skipped = newest_remote(store, UID, newer_than=None, without=(), retries=ONCE)
    assert found is not None
    assert found.name == name_of(5)
    assert ["never committed" in line for line in skipped] == [False, True]
    # A checkpoint of another run with the same name is never replaced.
    upload = read_upload(make_checkpoint(tmp_path / "other" / "r", 5), None)
    assert upload is not None
    with pytest.raises(MirrorError, match="another checkpoint of that name"):
        commit(store, upload, retries=ONCE)


@pytest.fixture(
    params=[
        pytest.param("file", marks=pytest.mark.more),
        pytest.param("s3", marks=pytest.mark.more),
        pytest.param("xfs", marks=pytest.mark.root),
    ]
)
def copying(request: pytest.FixtureRequest, s3: ObjectStore, proxy: Proxy, tmp_path: Path) -> Any:
    """A mirror, and whether it can copy parts of its own files."""
    if request.param == "s3":
        yield f"s3://{BUCKET}/{tmp_path.name}/r.{UID}", True
    elif request.param == "file":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield f"file://{folder}/r.{UID}", False
    else:
        image, mount = tmp_path / "image", tmp_path / "mount"
        mount.mkdir()
        with open(image, "wb") as stream:
            stream.truncate(XFS_BYTES)
        for command in (f"mkfs.xfs -q {image}", f"mount -o loop {image} {mount}"):
            subprocess.run(command.split(), check=True, timeout=60)
        try:
            yield f"file://{mount}/r.{UID}", True
        finally:
            subprocess.run(["umount", mount], check=True, timeout=60)


def test_parts_of_the_former_checkpoint_are_copied_within_the_mirror(
    copying: tuple[str, bool], tmp_path: Path
) -> None:
    """The frozen part is not sent again, unless the mirror's own copy of it is damaged."""
    location, is_able = copying
    store = open_store(location)
    frozen = [os.urandom(4 * PART_BYTES) for _ in range(2)]
    tail = PART_BYTES + 17

    def checkpoint(step: int) -> Path:
        content = frozen[0] + os.urandom(PART_BYTES) + frozen[1] + os.urandom(tail)
        files = {"a": content, "small": b"small"}
        return make_checkpoint(tmp_path / "r", step, contents=files)

    first, second, third = map(checkpoint, (1, 2, 3))
    whole = 10 * PART_BYTES + 17 + 5
    assert send(store, first) == whole
    # Two of the eight frozen parts begin or end within a block of 4 MiB that has changed.
    shared = 6 * PART_BYTES if is_able else 0
    assert send(store, second, former=first) == whole - shared
    assert mirror.verify(store, second.name)["ok"]
    # A copy that another one damaged has the right size only.
    key = checkpoint_key(second.name, "a")
    store.delete([key])
    (tmp_path / "other").write_bytes(os.urandom(whole - 5))
    entry = make_checkpoint(tmp_path / "x", 9, contents={"a": (tmp_path / "other").read_bytes()})
    manifest = read_manifest(entry)
    assert manifest is not None
    store.put_file(key, tmp_path / "other", manifest.files[0])
    assert send(store, third, former=second) == whole
    assert mirror.verify(store, third.name)["ok"]
    # The former one was deleted meanwhile.
    store.delete([key])
    fourth = checkpoint(4)
    assert send(store, fourth, former=second) == whole
    assert mirror.verify(store, fourth.name)["ok"]


def kill(children: list[BaseProcess]) -> None:
    assert children[0].pid is not None
    os.kill(children[0].pid, signal.SIGKILL)


def kill_uploads(
    cases: list[tuple[int, bool]], s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> list[str]:
    """For each (request, before): kill an uploader there, check, and finish in another process.

    Returns the HTTP methods of the requests with a kill; "none" if the upload had fewer requests.
    """
    location = f"s3://{BUCKET}/{tmp_path.name}/r.{UID}"
    store, context = open_store(location), fork_server()
    send(store, make_checkpoint(tmp_path / "r", 1))
    verbs = []
    for step, (at, before) in enumerate(cases, start=2):
        directory = make_checkpoint(tmp_path / "r", step)
        children: list[BaseProcess] = []
        strike = ProxyFault(at, before, partial(kill, children))
        proxy.arm(strike)
        children.append(start(context, push, s3.environment(proxy.port), location, directory))
        children[0].join(WAIT_S)
        is_struck = strike.has_fired.is_set()
        assert children[0].exitcode == (-signal.SIGKILL if is_struck else 0)
        verbs.append(proxy.requests[at].split(" ")[0] if is_struck else "none")
        proxy.arm(None)
        # The mirror's newest checkpoint is the previous one or this one, complete either way.
        found, _ = newest_remote(store, UID, newer_than=None, without=(), retries=QUICK)
        assert found is not None
        assert found.name.step in {step - 1, step}, (at, before)
        assert mirror.verify(store, str(found.name))["ok"], (at, before)
        send(store, directory, QUICK)
        assert mirror.verify(store, str(name_of(step)))["ok"], (at, before)
        assert store.abort_uploads("checkpoints/") == 0, f"{(at, before)} left an upload behind"
    return verbs


@pytest.mark.more
def test_uploader_killed_before_any_request_leaves_a_valid_mirror(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    verbs = kill_uploads([(at, True) for at in range(REQUESTS + 1)], s3, proxy, tmp_path)
    assert verbs[-1] == "none"
    assert {*verbs} == {"GET", "HEAD", "POST", "PUT", "none"}
    assert verbs.count("none") == 1


def test_uploader_killed_after_its_last_responses_leaves_a_valid_mirror(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    """The two most important responses: the parts are joined, and the manifest is published."""
    verbs = kill_uploads([(JOINED, False), (NAMED, False)], s3, proxy, tmp_path)
    assert verbs == ["POST", "PUT"]


@pytest.mark.slow
def test_uploader_killed_after_any_response_leaves_a_valid_mirror(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    verbs = kill_uploads([(at, False) for at in range(REQUESTS)], s3, proxy, tmp_path)
    assert "none" not in verbs


@pytest.mark.more
def test_requests_with_lost_responses_are_retried(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    location = f"s3://{BUCKET}/{tmp_path.name}/r.{UID}"
    store = open_store(location)
    at, before, step = 0, False, 1
    while True:
        strike = ProxyFault(at, before, lambda: None)
        proxy.arm(strike)
        send(store, make_checkpoint(tmp_path / "r", step), QUICK)
        proxy.arm(None)
        assert mirror.verify(store, str(name_of(step)))["ok"]
        step += 1
        if not strike.has_fired.is_set():
            break
        at, before = (at, True) if not before else (at + 1, False)
    assert at > 10
    assert store.abort_uploads("checkpoints/") == 0


def test_refused_request_is_reported_without_retry_or_secret(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert mirror.main([f"s3://{BUCKET}/elsewhere/r", "list"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert "SignatureDoesNotMatch" in answer["error"] or "signature" in answer["error"]
    assert "not-the-secret" not in answer["error"]
    assert len(proxy.requests) == 1, "a refused request must not be retried"
