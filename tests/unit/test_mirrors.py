"""Mirrors without a store: URLs, tiers, retries, and the check of streamed bytes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast.contracts.disk import digests
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.mirrors import Tiers, problem_with_mirror
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.trainer.mirror.store import EntryCheck, part_bytes_for
from holdfast.trainer.mirror.transfer import (
    PAUSE_MAX_S,
    TRIES_MAX,
    Retries,
    default_pauses,
    open_store,
)
from holdfast.workers.agent.launch.flusher_supervisor import build_environment


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://bucket/prefix", None),
        ("file:///shared/place", None),
        ("gs://bucket", None),
        ("/shared/place", "expected a URL"),
        ("s3:/bucket", "expected a URL"),
        ("s3://", "expected a bucket"),
        ("s3://key:secret@bucket", "must not contain credentials"),
        ("s3://bucket?versions=1", "expected no `?`"),
    ],
)
def test_a_mirror_url_must_be_valid_and_without_secrets(url: str, problem: str | None) -> None:
    found = problem_with_mirror(url)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    "wrong",
    [{"local": "/scratch"}, {"local": "scratch", "mirror": "s3://b"}, {"mirror": "here"}],
)
def test_invalid_tiers_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"local|expected"):
        Checkpointing.model_validate(wrong)


def test_tiers_round_trip_through_the_environment_and_runs_are_separate() -> None:
    tiers = Tiers(mirror="s3://bucket/", local="/scratch")
    assert Tiers.from_environment(tiers.to_environment()) == tiers
    assert Tiers.from_environment({}) == Tiers()
    places = {tiers.location("r", uid * 32) for uid in "ab"}
    assert places == {f"s3://bucket/r.{uid * 32}" for uid in "ab"}
    folder = tiers.node_folder("r", "a" * 32)
    assert folder is not None
    assert str(folder.directory) == f"/scratch/r.{'a' * 32}"
    assert Tiers(mirror="s3://b").node_folder("r", "a" * 32) is None


def test_the_flusher_gets_only_store_settings_and_its_timeout() -> None:
    spec = {"AWS_ENDPOINT_URL": "http://store", "LD_PRELOAD": "x.so"}
    inherited = {"PATH": "/bin", "HOLDFAST_CHECKPOINT_WRITE_LIMIT": "5MB"}
    tiers = Tiers(mirror="s3://b")
    built = build_environment(inherited, spec, tiers, flush_timeout_s=90.0)
    limited = build_environment(inherited, spec, tiers, flush_timeout_s=90.0, write_limit=7)
    assert limited == built | {"HOLDFAST_CHECKPOINT_WRITE_LIMIT": "7"}
    assert built == {
        "PATH": "/bin",
        "AWS_ENDPOINT_URL": "http://store",
        "HOLDFAST_CHECKPOINT_MIRROR": "s3://b",
        "HOLDFAST_FLUSH_TIMEOUT_S": "90.0",
    }


def test_transient_errors_are_retried_and_permanent_ones_raised_at_once() -> None:
    asked: list[int] = []
    slept: list[float] = []

    def refuse(is_passing: bool, until: int) -> int:
        asked.append(1)
        if len(asked) < until:
            raise MirrorError("no", is_passing=is_passing)
        return len(asked)

    retries = Retries(pauses_s=[1.0, 2.0], sleep=slept.append)
    assert retries.do(refuse, True, 3) == 3
    assert slept == [1.0, 2.0]
    asked.clear()
    with pytest.raises(MirrorError):
        retries.do(refuse, True, 4)
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(MirrorError):
        retries.do(refuse, False, 2)
    assert len(asked) == 1
    assert len(default_pauses()) == TRIES_MAX - 1
    assert max(default_pauses()) <= PAUSE_MAX_S


@given(st.data())
def test_a_streamed_file_passes_only_with_exactly_the_entrys_bytes(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", 16)
        content = data.draw(st.binary(max_size=80))
        running = digests.FileChecksum(len(content))
        running.update(content)
        entry = FileEntry.of("a", len(content), running)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
        edges = [0, *cuts, len(content)]

        def feed(given: bytes) -> None:
            check = EntryCheck(entry)
            for start, end in pairwise(edges):
                check.update(given[start:end])
            check.update(given[len(content) :])
            check.finish()

        feed(content)
        wrong = [content[:-1], content + b"x"] if content else [b"x"]
        if content:
            at = data.draw(st.integers(0, len(content) - 1))
            wrong.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        for bad in wrong:
            with pytest.raises(DamagedCheckpointError):
                feed(bad)


def test_no_file_needs_more_parts_than_a_store_accepts() -> None:
    for size in (0, 1 << 20, 160 * 10**9, 5 * 2**40):
        part = part_bytes_for(size)
        assert -(-size // part) <= 10_000


@pytest.mark.root
def test_a_mirror_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    url = Tiers(mirror=f"file://{tmp_path}").location("r", "a" * 32)
    place = tmp_path / f"r.{'a' * 32}"
    place.mkdir()
    open_store(url)
    os.chown(place, 54_321, -1)
    with pytest.raises(MirrorError, match="belongs to another user"):
        open_store(url)
