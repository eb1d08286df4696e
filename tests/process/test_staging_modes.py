"""Saves with one image in memory, or with images on the node's disk, have the bits of others."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.process.staging_program import Kept, make_optimizer, train
from tests.support.flusher_supervisor import SlotHolder, wait_until
from tests.support.forked import Forked

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SaveError
from holdfast.trainer import load_checkpoint
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.saving.late import Overlap
from holdfast.trainer.slots.modes import Staging
from holdfast.trainer.slots.slots import ImageFile, SlotState

PROGRAM: Final = Path(__file__).with_name("staging_program.py")
WAIT_S: Final = 300.0
MIB: Final = 1 << 20
STATE_BYTES: Final = 24 * MIB
STEPS: Final = 6
MODES: Final = ("memory", "single", "disk")
FACTS: Final[dict[str, Any]] = {"reason": "interval", "parent": None}


def launch(scratch: Path, run: str, *, ranks: int = 2, **settings: Any) -> tuple[int, str]:
    """Run the program. Return its exit status and its output."""
    told = {"bytes": STATE_BYTES, "steps": STEPS, "directory": str(scratch / run), **settings}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--master-port", "0"]
    command += [str(PROGRAM), json.dumps(told)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    env |= {"OMP_NUM_THREADS": "1", "HOLDFAST_STAGING_DIRECTORY": str(scratch / "images")}
    (scratch / "images").mkdir(exist_ok=True)
    with open(scratch / f"{run}.out", "ab") as stream:
        status = Forked(command, stdout=stream, stderr=stream, env=env).wait(WAIT_S)
    return status, (scratch / f"{run}.out").read_text()


def committed(run: Path) -> dict[int, Manifest]:
    """The committed checkpoints of a run, by step. Each verifies."""
    found = {}
    for path in RunPaths(run).list_checkpoints():
        manifest = read_manifest(path)
        if manifest is not None:
            assert find_damage(path, manifest) == []
            found[manifest.step] = manifest
    return found


def checksums(manifest: Manifest) -> dict[str, Any]:
    return {file.path: file.checksum for file in manifest.files if file.path != "train_state.json"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains once without an interruption for each setting; returns the run's folder."""

    @functools.cache
    def train(staging: str, *, overlap: bool = False, ranks: int = 2, grow: int = 0) -> Path:
        scratch = tmp_path_factory.mktemp("staging")
        settings = {"staging": staging, "overlap": overlap, "grow": grow}
        status, output = launch(scratch, "r", ranks=ranks, **settings)
        assert status == 0, output
        assert os.listdir(scratch / "images") == []
        return scratch / "r"

    return train


@pytest.mark.more
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staging", ["single", "disk"])
def test_the_bits_are_those_of_memory(trained: Any, staging: str, overlap: bool) -> None:
    expected, found = committed(trained("memory")), committed(trained(staging, overlap=overlap))
    both = expected.keys() & found.keys()
    assert STEPS in both
    assert [checksums(found[step]) for step in both] == [checksums(expected[step]) for step in both]
    if staging == "single":
        # A save waits for the former one, and is never skipped.
        assert found.keys() == set(range(1, STEPS + 1))


@pytest.mark.more
@pytest.mark.parametrize("staging", MODES)
def test_a_state_that_grows_is_planned_again(trained: Any, staging: str) -> None:
    found = committed(trained(staging, grow=3))
    assert found[STEPS].bytes > found[min(found)].bytes


@pytest.mark.more
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staging", MODES)
def test_a_killed_rank_leaves_no_mixture_and_another_size_goes_on(
    staging: str, overlap: bool, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    choice = random.Random(seed)
    for attempt in range(2):
        run = f"r{attempt}"
        killed: dict[str, Any] = {"kill_step": 3, "kill_rank": choice.randrange(2)}
        killed["kill_s"] = choice.random() * 0.3
        options: dict[str, Any] = {"staging": staging, "overlap": overlap, "snapshots": 1}
        status, output = launch(tmp_path, run, interval=2, **options, **killed)
        assert status != 0 or committed(tmp_path / run)[STEPS], (seed, output)
        # The flusher commits what all ranks have sealed.
        has_ended = functools.partial(has_no_flusher, tmp_path / run)
        wait_until(has_ended, "the flusher to end", WAIT_S)
        found = committed(tmp_path / run)
        status, output = launch(tmp_path, run, ranks=1, interval=2, **options)
        assert status == 0, (seed, killed, output)
        after = committed(tmp_path / run)
        assert after.keys() >= found.keys(), (seed, killed)
        assert is_trained(tmp_path / run, after[STEPS].name), (seed, killed)
        assert os.listdir(tmp_path / "images") == []


def is_trained(run: Path, name: str) -> bool:
    """Return True if a checkpoint has the bits of training without any save."""
    expected, found = (Kept(STATE_BYTES) for _ in range(2))
    theirs, ours = make_optimizer(expected), make_optimizer(found)
    for step in range(1, STEPS + 1):
        train(expected, theirs, step)
    load_checkpoint(RunPaths(run).checkpoint(name), found, ours)
    both = zip(expected.values, found.values, strict=True)
    return all(
        torch.equal(one, other)
        and torch.equal(theirs.state[one]["momentum_buffer"], ours.state[other]["momentum_buffer"])
        for one, other in both
    )


def has_no_flusher(run: Path) -> bool:
    """Return True once no flusher of a run writes any more."""
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (one / "cmdline").read_bytes().split(b"\0")
            if b"holdfast.trainer.flusher" in words and str(run).encode() in words:
                return False
    return True


# --- one engine -------------------------------------------------------------------------------


@pytest.fixture
def holder() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def make_engine(holder: SlotHolder, folder: Path, staging: Staging) -> CheckpointEngine:
    identity = Identity(
        run_uid="1" * 32,
        run="r",
        attempt=3,
        launch=2,
        rank=0,
        local_rank=0,
        local_ranks=1,
        world_size=1,
        node=0,
        nodes=1,
        command_digest="c" * 64,
    )
    return CheckpointEngine(
        flusher=holder.name,
        run=RunPaths(folder / "r"),
        identity=identity,
        group=None,
        staging=staging,
    )


def state_of(value: float, size: int = MIB) -> dict[str, Any]:
    """Tensors of several forms: plain, of another layout, and of complex numbers."""
    plain = torch.full((size // 4,), value)
    return {
        "model": {
            "plain": plain,
            "turned": (torch.arange(6.0).reshape(2, 3) * value).t(),
            "conj": torch.full((9,), complex(value, 1.0)).conj(),
            "half": torch.full((7,), value, dtype=torch.bfloat16),
        },
    }


def folder_of(folder: Path, step: int) -> Path:
    return folder / "r" / "checkpoints" / f"step-{step:08d}.a0003.l02"


def sums(folder: Path, step: int) -> dict[str, Any]:
    manifest = read_manifest(folder_of(folder, step))
    assert manifest is not None
    assert find_damage(folder_of(folder, step), manifest) == []
    return checksums(manifest)


@pytest.mark.parametrize("mode", ["single", "disk"])
def test_the_files_are_those_of_memory(holder: SlotHolder, tmp_path: Path, mode: str) -> None:
    found = []
    for one in ("memory", mode):
        engine = make_engine(holder, tmp_path / one, Staging(one, str(tmp_path)))
        for step in (1, 2, 3):
            engine.save(state_of(float(step), 40 * MIB), {"step": step}, step=step, **FACTS)
        # A larger state needs another plan.
        engine.wait(WAIT_S)
        engine.prepare(state_of(4.0, 50 * MIB))
        engine.save(state_of(4.0, 50 * MIB), {"step": 4}, step=4, **FACTS)
        assert [result.committed for result in engine.wait(WAIT_S)] == [True]
        engine.close()
        found.append([sums(tmp_path / one, step) for step in (1, 2, 3, 4)])
    assert found[0] == found[1]


def test_images_on_disk_outlive_a_killed_flusher(holder: SlotHolder, tmp_path: Path) -> None:
    engine = make_engine(holder, tmp_path, Staging("disk", str(tmp_path)))
    engine.prepare(state_of(1.0))
    assert [name for name in os.listdir(tmp_path) if name != "r"] == []
    wait_until(lambda: len(holder.kept) == 2, "the supervisor to have the slots")
    for handle in holder.kept.values():
        facts = os.fstat(handle)
        assert (facts.st_nlink, facts.st_mode & 0o777) == (0, 0o600)
        assert facts.st_blocks * 512 >= MIB
    holder.signal(signal.SIGSTOP)
    engine.save(state_of(7.0), {}, step=7, **FACTS)
    holder.kill()
    holder.start()
    assert [result.committed for result in engine.wait(WAIT_S)] == [True]
    assert sums(tmp_path, 7)
    engine.close()


def test_one_slot_has_the_snapshot_until_a_save_begins(holder: SlotHolder, tmp_path: Path) -> None:
    engine = make_engine(holder, tmp_path, Staging("single"))
    engine.prepare(state_of(1.0))
    assert engine.wait_for_metadata() is None
    assert engine.snapshot(state_of(1.0), {}, step=1, **FACTS)
    assert engine._stage is not None
    (staged,) = engine._stage.slots
    holder.signal(signal.SIGSTOP)
    engine.save(state_of(2.0), {}, step=2, **FACTS)
    assert (staged.slot.state, staged.slot.step) == (SlotState.SEALED, 2)
    # The only slot is in use, so there is no snapshot, and the next save waits.
    assert not engine.snapshot(state_of(3.0), {}, step=3, **FACTS)
    with pytest.raises(SaveError, match=r"no staging slot came free within 0 s\. Steps \[2\]"):
        engine.save(state_of(3.0), {}, step=3, timeout_s=0.2, **FACTS)
    holder.signal(signal.SIGCONT)
    # The ranks die: the save is committed.
    engine.connection.close()
    wait_until(lambda: staged.slot.state is SlotState.DONE, "the commit", WAIT_S)
    assert sums(tmp_path, 2)
    engine.close()


def test_a_disk_without_space_fails_the_save_and_loses_nothing(
    holder: SlotHolder, tmp_path: Path
) -> None:
    """The flusher may write no long file. That fails the same call as a full disk."""
    images = tmp_path / "images"
    images.mkdir()
    engine = make_engine(holder, tmp_path, Staging("disk", str(images)))
    engine.save(state_of(1.0), {}, step=1, **FACTS)
    assert engine.wait(WAIT_S)[0].committed
    before = resource.prlimit(holder.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(holder.process.pid, resource.RLIMIT_FSIZE, (8 * MIB, before[1]))
    with pytest.raises(SaveError, match="cannot hold 2 images") as caught:
        engine.prepare(state_of(2.0, 30 * MIB))
    assert f"{images} cannot hold" in str(caught.value)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert "checkpoint.staging_directory" in str(caught.value)
    assert sums(tmp_path, 1)
    resource.prlimit(holder.process.pid, resource.RLIMIT_FSIZE, before)
    engine.save(state_of(2.0, 30 * MIB), {}, step=2, **FACTS)
    assert engine.wait(WAIT_S)[0].committed
    engine.close()


def test_a_disk_that_fails_fails_one_save(
    holder: SlotHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(holder, tmp_path, Staging("disk", str(tmp_path)))
    state = state_of(1.0, 20 * MIB)
    engine.prepare(state)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    steady = Overlap({state["model"]["plain"].data_ptr()})
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "move", fail)
        for slot in engine._stage.slots if engine._stage else ():
            slot._copier._move_bytes = fail
        with pytest.raises(SaveError, match="cannot be staged: the disk is broken"):
            engine.save(state, {}, step=1, **FACTS)
        # The same in a copy that continues. Small tensors are no part of it.
        only = {"model": {"plain": state["model"]["plain"]}}
        engine.prepare(only)
        for slot in engine._stage.slots if engine._stage else ():
            slot._copier._move_bytes = fail
        engine.save(only, {}, step=2, continuing=steady, **FACTS)
        done = engine.complete_copy()
        assert done is not None
        assert "the disk is broken" in done.problem
        assert not done.is_spoiled
        (result,) = engine.wait(WAIT_S)
        assert not result.committed
        assert "the disk is broken" in str(result.error)
    engine.prepare(state)
    engine.save(state, {}, step=3, **FACTS)
    assert engine.wait(WAIT_S)[0].committed
    engine.close()


def test_few_pages_are_dirty(tmp_path: Path) -> None:
    """Of an image that is written, the disk has all but the last pieces."""
    engine_file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(engine_file, 0, 64 * MIB)
    image = ImageFile(engine_file, 0)
    content = memoryview(bytes(64 * MIB))
    image.put(0, content)
    assert sum(stop - start for start, stop in image._written) < 16 * MIB
    assert os.pread(engine_file, 10, 63 * MIB) == bytes(10)
    image.close()
    os.close(engine_file)


@pytest.mark.parametrize(
    ("directory", "problem"),
    [("/dev/shm", "is in memory"), ("/nowhere/at/all", "is not a directory")],
)
def test_a_directory_that_is_no_disk_is_refused(
    holder: SlotHolder, tmp_path: Path, directory: str, problem: str
) -> None:
    engine = make_engine(holder, tmp_path, Staging("disk", directory))
    with pytest.raises(SaveError, match=rf"checkpoint\.staging_directory '{directory}' {problem}"):
        engine.prepare(state_of(1.0))
    engine.close()


# --- a memory limit ---------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.more
def test_a_job_with_little_memory_saves_with_one_image_or_on_disk(tmp_path: Path) -> None:
    """The limit is what the program and its Session need before a save, and 1.3 x its state."""
    state = 160 * MIB
    told: dict[str, Any] = {"bytes": state, "steps": 4}
    bare = {**told, "bare": True, "interval": 100, "directory": str(tmp_path / "bare")}
    status, _, need = run_limited(tmp_path, bare, None)
    assert status == 0
    limit = need + int(1.3 * state)
    outputs = {}
    for staging in MODES:
        given = {**told, "staging": staging, "directory": str(tmp_path / staging)}
        status, outputs[staging], peak = run_limited(tmp_path, given, limit)
        assert (status == 0) == (staging != "memory"), outputs[staging]
        assert peak <= limit
    assert "checkpoint.staging = 'single' fits" in outputs["memory"]
    assert "checkpoint.staging = 'disk' fits" in outputs["memory"]
    found = {staging: committed(tmp_path / staging) for staging in ("single", "disk")}
    assert found["single"].keys() == {1, 2, 3, 4}
    assert checksums(found["single"][4]) == checksums(found["disk"][4])


def run_limited(scratch: Path, given: dict[str, Any], limit: int | None) -> tuple[int, str, int]:
    """Run the program alone in a memory cgroup. Return status, output and the peak of memory."""
    group = Path("/sys/fs/cgroup/memory") / f"holdfast-staging-{os.getpid()}-{time.monotonic_ns()}"
    is_first = group.parent.is_dir()
    group = group if is_first else Path("/sys/fs/cgroup") / group.name
    group.mkdir()
    names = ("limit_in_bytes", "max_usage_in_bytes") if is_first else ("max", "peak")
    if limit is not None:
        (group / f"memory.{names[0]}").write_text(str(limit))
    env = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    env |= {"OMP_NUM_THREADS": "1", "HOLDFAST_STAGING_DIRECTORY": str(scratch)}
    # Freed tensors return to the system, so the program needs the same memory in each run.
    env["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    try:
        done = subprocess.run(
            ["sh", "-c", script, "sh", sys.executable, str(PROGRAM), json.dumps(given)],
            env=env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "all to end", WAIT_S)
        peak = int((group / f"memory.{names[1]}").read_text())
        return done.returncode, done.stdout + done.stderr, peak
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
