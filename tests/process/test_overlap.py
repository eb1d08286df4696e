"""Saves whose copies continue during the next step have the bits of saves that copy at once."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.forked import Forked

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths

PROGRAM = Path(__file__).with_name("overlap_program.py")
WAIT_S = 400.0
STEPS = 12
# What each case shows is in the program. The second part is in `make test-more` only.
QUICK: Final = ("Fused", "Norm", "Averaged", "ByData", "LaterByHand")
MORE: Final = (
    *("Case", "Momentum", "Accumulated", "AccumulatedOver", "Two", "Announced", "ByHand"),
    *("Bounded", "Compiled", "Evaluated", "LaterByData", "LaterBounded", "LaterCompiled"),
)
CHANGING: Final = ("ByHand", "ByData", "Bounded", "Compiled", "Evaluated")
LATER: Final = tuple(one for one in MORE + QUICK if one.startswith("Later"))


def marked(names: tuple[str, ...]) -> list[Any]:
    """Parameters, of which those of `make test-more` are marked."""
    more = pytest.mark.more
    return [pytest.param(one, marks=more) if one in MORE else one for one in names]


STEADY: Final = tuple(one for one in (*QUICK, *MORE) if one not in {*CHANGING, *LATER})


def launch(directory: Path, **settings: Any) -> tuple[int, str]:
    """Run the program on two ranks. Return its exit status and its output."""
    told = {"directory": str(directory), "piece_s": 0.05, "pause_s": 0.05, **settings}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--master-port", "0"]
    command += [str(PROGRAM), json.dumps(told)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    with open(directory / "output", "ab") as stream:
        process = Forked(command, stdout=stream, stderr=stream, env=env | {"OMP_NUM_THREADS": "1"})
        status = process.wait(WAIT_S)
    return status, (directory / "output").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains the cases of a part once, each with and without late copies; returns their folder."""

    @functools.cache
    def train(cases: tuple[str, ...]) -> Path:
        directory = tmp_path_factory.mktemp("overlap")
        status, output = launch(directory, cases=cases)
        assert status == 0, output
        return directory

    return lambda name: train(QUICK if name in QUICK else MORE)


def committed(directory: Path, name: str, *, overlap: bool = True) -> dict[int, Manifest]:
    """The committed checkpoints of a case, by step. Each verifies."""
    found = {}
    for path in RunPaths(directory / name / str(overlap)).list_checkpoints():
        manifest = read_manifest(path)
        if manifest is not None:
            assert find_damage(path, manifest) == []
            found[manifest.step] = manifest
    return found


def checksums(manifest: Manifest) -> dict[str, Any]:
    return {file.path: file.checksum for file in manifest.files if file.path != "train_state.json"}


def late_copies(directory: Path, name: str) -> int:
    lines = map(json.loads, (directory / "lines.jsonl").read_text().splitlines())
    (found,) = (one["late"] for one in lines if one["case"] == name and one["overlap"])
    return int(found)


def notes(directory: Path, name: str) -> list[str]:
    events, _ = read_journal(RunPaths(directory / name / "True").attempt(0).rank_journal)
    texts = [event.data["text"] for event in events if event.kind is EventKind.NOTE]
    return [text for text in texts if "session.before_update()" in text]


@pytest.mark.parametrize("name", marked((*QUICK, *MORE)))
def test_the_bits_are_those_of_saves_that_copy_at_once(folders: Any, name: str) -> None:
    at_once, late = (committed(folders(name), name, overlap=one) for one in (False, True))
    both = at_once.keys() & late.keys()
    assert STEPS in both
    assert len(both) >= 3
    for step in both:
        assert checksums(late[step]) == checksums(at_once[step]), step


@pytest.mark.parametrize("name", marked(STEADY))
def test_copies_go_on_and_all_are_sealed(folders: Any, name: str) -> None:
    assert late_copies(folders(name), name) >= 2
    assert notes(folders(name), name) == []


@pytest.mark.parametrize("name", marked(CHANGING))
def test_the_first_copy_shows_that_none_may_go_on(folders: Any, name: str) -> None:
    directory = folders(name)
    assert late_copies(directory, name) == 0
    (text,) = notes(directory, name)
    assert text in (directory / "output").read_text()
    # Nothing was thrown away.
    assert committed(directory, name).keys() >= {2, STEPS}


@pytest.mark.parametrize("name", marked(LATER))
def test_an_image_that_the_program_changed_is_thrown_away(folders: Any, name: str) -> None:
    directory = folders(name)
    found = notes(directory, name)
    if not found and name == "LaterByData":
        # No version counter shows these changes. All copies were complete before them.
        return
    (text,) = found
    assert text.startswith("step 6: the program changed tensors of the state while they were copi")
    assert late_copies(directory, name) == 2
    steps = sorted(committed(directory, name))
    assert 6 not in steps
    # All ranks save again at once.
    assert {7, 8} & set(steps)


def test_ranks_that_are_killed_during_a_copy_leave_no_mixture(folders: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cases": ["Fused"], "overlap": [True], "interval": 4}
    settings |= {"snapshots": 2, "piece_s": 0.5}
    status, output = launch(tmp_path, **settings, killed_in=5)
    assert status != 0, output
    at_once = committed(folders("Fused"), "Fused", overlap=False)
    found = committed(tmp_path, "Fused")
    # Step 4 was still being copied. The snapshot of step 2 was complete.
    assert {step: one.reason for step, one in found.items()} == {2: "crash"}
    assert checksums(found[2]) == checksums(at_once[2])
    status, output = launch(tmp_path, **settings)
    assert status == 0, output
    last = committed(tmp_path, "Fused")[STEPS]
    assert checksums(last) == checksums(at_once[STEPS])


def test_an_exception_during_a_copy_keeps_its_checkpoint(folders: Any, tmp_path: Path) -> None:
    status, output = launch(tmp_path, cases=["Fused"], overlap=[True], piece_s=0.5, fails_in=5)
    assert status != 0
    assert "a bad batch in step 5" in output
    found, at_once = committed(tmp_path, "Fused"), committed(folders("Fused"), "Fused")
    assert found.keys() == {2, 4}
    assert checksums(found[4]) == checksums(at_once[4])
