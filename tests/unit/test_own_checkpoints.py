"""Checkpoints that a program writes itself: the spec, how they are found, judged and recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.histories import record_of, spec_of
from tests.support.other_users import STRANGER
from tests.support.runs import RunFolder

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import Manifest, files_folder, record_source, retire_source
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.spec.sections import Program
from holdfast.contracts.states import AttemptState
from holdfast.flows.forks import fork_run
from holdfast.workers.agent.launch.command import build_command
from holdfast.workers.agent.leading import judge_own_completion
from holdfast.workers.agent.watch.kernel_view import ignores
from holdfast.workers.agent.watch.program_watch import OutputProgress, Tail
from holdfast.workers.checkpoints import own_checkpoints, retention
from holdfast.workers.checkpoints.exports import ExportFormat, export
from holdfast.workers.checkpoints.own_checkpoints import CheckpointPattern, OwnCheckpoint
from holdfast.workers.runs import operator
from holdfast.workers.runs.request import build_request

CHECKPOINTS = "out/checkpoint-{step}"
PROGRESS = r"step (?P<step>[\d,]+)"
WAIT_S = 20
RANK_START = [sys.executable, "-u", "-m", "holdfast.trainer.rank_start"]


# --- The spec.


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ({"checkpoints": "out/"}, "has {step} once"),
        ({"checkpoints": "out/last", "complete": ["done"]}, "complete proves nothing"),
        ({"checkpoints": "{step}/weights"}, "Its last part has {step} once"),
        ({"checkpoints": "a-{step}-{step}"}, "has {step} once"),
        ({"checkpoints": "../out-{step}"}, "without `..`"),
        ({"checkpoints": CHECKPOINTS, "progress": "step ("}, "not a regular expression"),
        ({"checkpoints": CHECKPOINTS, "progress": r"step (\d+)"}, "no group named 'step'"),
        ({"checkpoints": CHECKPOINTS, "complete": ["../done"]}, "a file inside a checkpoint"),
        ({"checkpoints": CHECKPOINTS, "complete": [""]}, "a file inside a checkpoint"),
        ({"checkpoints": CHECKPOINTS, "signal": "SIGKILL"}, "SIGTERM"),
        ({"progress": PROGRESS}, "program.progress"),
        ({"launcher": "none"}, "is set without program.checkpoints"),
    ],
)
def test_a_wrong_description_of_a_program_is_refused(program: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        spec_of(program=program)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"checkpoint": {"mirror": "file:///copies"}},
            r"checkpoint\.mirror .* does not apply to program",
        ),
        ({"checkpoint": {"keep": {"last": 3}}}, r"checkpoint\.keep\.last .* does not apply"),
        ({"launch": {"torchrun": ["--numa-binding=node"]}}, "leave one of them out"),
    ],
)
def test_keys_that_act_on_checkpoints_are_refused(fields: dict[str, Any], words: str) -> None:
    program = {"checkpoints": CHECKPOINTS, "launcher": "none"}
    with pytest.raises(ValidationError, match=words):
        spec_of(program=program, **fields)


# --- How the program is started.


def test_ranks_start_with_the_signal_s_default_action() -> None:
    words = _command(checkpoints=CHECKPOINTS, signal="SIGUSR1")
    (at,) = (n for n, word in enumerate(words) if word.endswith(".program_start"))
    assert "--no-python" in words[:at]
    assert words[at + 1 :] == ["SIGUSR1", "", *RANK_START, "t.py"]
    assert "--no-python" not in _command()


def test_without_torchrun_the_command_itself_is_started() -> None:
    words = _command(checkpoints=CHECKPOINTS, launcher="none")
    assert words[1] == "-m"
    assert words[3:] == ["SIGTERM", "/logs/command/attempt_0/0", "t.py"]


def _command(**program: Any) -> list[str]:
    spec = spec_of(program=program)
    request = build_request(record_of(spec), spec, attempt=1, gpus=4, reason="test")
    return build_command(request, node=0, launch=1, address="127.0.0.1", port=1, logs=Path("/logs"))


def test_a_shell_can_handle_the_signal_although_its_parent_ignores_it(tmp_path: Path) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    ignore = f"trap '' TERM; exec {sys.executable} -m holdfast.workers.agent.program_start"
    command = ["bash", "-c", f'{ignore} SIGTERM "$0" bash -c "$1"', str(tmp_path), script]
    with subprocess.Popen(command) as process:
        output = tmp_path / "stdout.log"
        _wait_for(lambda: output.exists() and "ready" in output.read_text())
        assert not ignores(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert output.read_text() == "ready\nsaved\n"


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    module = "holdfast.workers.agent.program_start"
    command = [sys.executable, "-m", module, "none", str(tmp_path), "no-such-program"]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 127
    error = (tmp_path / "stderr.log").read_text()
    assert error == "no-such-program: No such file or directory\n"


def _wait_for(look: Any) -> None:
    import time

    give_up = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < give_up
        time.sleep(0.02)


# --- Progress.


def test_progress_is_the_newest_step_of_the_output() -> None:
    now = [0.0]
    progress = OutputProgress(PROGRESS, lambda: now[0])
    for seconds, line in ((1, "step 10"), (5, "step 1,2"), (6, "no number"), (9, "step 8")):
        now[0] = seconds
        progress.take(line)
    assert (progress.first, progress.step, progress.step_s) == (10, 12, 2.0)


@pytest.mark.parametrize("line", ["step ,", "step " + "9" * 400, "x" * 5000 + "step 7", "step ٣"])
def test_text_that_is_no_step_is_ignored(line: str) -> None:
    progress = OutputProgress(r"step (?P<step>\S+)")
    progress.take(line)
    assert progress.step == NOWHERE


def test_a_log_is_read_by_lines_and_progress_bars_have_lines_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log, tmp_path)
    assert tail.lines() == []
    log.write_bytes(b"step 1\rstep 2\nstep")
    assert tail.lines() == ["step 1", "step 2"]
    with log.open("ab") as stream:
        stream.write(b" 3")
    assert tail.lines() == []
    assert tail.lines(is_last=True) == ["step 3"]
    assert tail.lines(is_last=True) == []


def test_a_log_that_is_a_pipe_or_leads_elsewhere_is_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "attempt"
    inside.mkdir()
    os.mkfifo(inside / "pipe")
    (tmp_path / "secret").write_text("step 7\n")
    (inside / "link").symlink_to(tmp_path / "secret")
    for name in ("pipe", "link"):
        assert Tail(inside / name, inside).lines() == []


# --- What counts as complete.


def _found(folder: Path, step: int = 50) -> OwnCheckpoint:
    found = own_checkpoints.look_at(folder, step, frozenset({os.geteuid()}))
    assert found is not None
    return found


def _write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_the_pattern_finds_directories_and_files_by_step(tmp_path: Path) -> None:
    for name in ("checkpoint-50", "checkpoint-7", "checkpoint-x", "other-9", "checkpoint-1.tmp"):
        _write(tmp_path / "out" / name, state="x")
    found = CheckpointPattern(Program(checkpoints=CHECKPOINTS), str(tmp_path)).find()
    assert [(one.step, one.path.name) for one in found] == [
        (7, "checkpoint-7"),
        (50, "checkpoint-50"),
    ]
    _write(tmp_path, **{"m-5.pt": "abc"})
    (one,) = CheckpointPattern(Program(checkpoints="m-{step}.pt"), str(tmp_path)).find()
    assert (one.step, one.folder, [each.path for each in one.files]) == (5, tmp_path, ["m-5.pt"])
    assert CheckpointPattern(Program(checkpoints="none/m-{step}"), str(tmp_path)).find() == []


@pytest.mark.parametrize("kind", ["pipe", "link", "inner_link", "folder_link"])
def test_links_and_pipes_are_never_opened_and_make_a_checkpoint_incomplete(
    tmp_path: Path, kind: str
) -> None:
    folder = _write(tmp_path / "checkpoint-50", state="x")
    if kind == "pipe":
        os.mkfifo(folder / "p")
    elif kind == "inner_link":
        (folder / "l").symlink_to("/etc/passwd")
    elif kind == "folder_link":
        (folder / "d").symlink_to("/etc")
    else:
        folder = tmp_path / "checkpoint-51"
        folder.symlink_to(tmp_path / "checkpoint-50")
    found = _found(folder)
    program = Program(checkpoints=CHECKPOINTS)
    why = own_checkpoints.why_incomplete(found, program, still_s=99, was_seen=True, ended="exited")
    assert "link or" in why
    assert all(one.path == "state" for one in found.files)


@pytest.mark.parametrize(
    ("complete", "still_s", "seen", "ended", "words"),
    [
        ((), 6.0, "seen", "", ""),
        ((), 4.0, "seen", "", "changed less than 5 s ago"),
        ((), 99.0, "old", "", "was there before the program started"),
        ((), 99.0, "unseen", "", "was there before the program started"),
        ((), 0.0, "seen", "exited", ""),
        ((), 0.0, "old", "exited", "was there before the program started"),
        ((), 4.0, "seen", "died", "died while it may still have been writing"),
        (("state",), 6.0, "seen", "", ""),
        (("state",), 6.0, "unseen", "", ""),
        (("state",), 0.0, "old", "", ""),
        (("state",), 4.0, "seen", "", "changed less than 5 s ago"),
        (("state",), 4.0, "unseen", "", "changed less than 5 s ago"),
        (("state",), 0.0, "seen", "died", ""),
        (("done", "state"), 99.0, "seen", "exited", "done is missing"),
    ],
)
def test_a_checkpoint_is_complete_only_if_something_proves_it(
    tmp_path: Path, complete: tuple[str, ...], still_s: float, seen: str, ended: str, words: str
) -> None:
    found = _found(_write(tmp_path / "checkpoint-50", state="x"))
    program = Program(checkpoints=CHECKPOINTS, complete=complete)
    was_seen, is_old = seen == "seen", seen == "old"
    why = own_checkpoints.why_incomplete(
        found, program, still_s=still_s, was_seen=was_seen, is_old=is_old, ended=ended
    )
    assert words in why
    assert bool(words) == bool(why)


def test_an_empty_directory_is_not_complete(tmp_path: Path) -> None:
    found, program = _found(_write(tmp_path / "checkpoint-5")), Program(checkpoints=CHECKPOINTS)
    why = own_checkpoints.why_incomplete(found, program, still_s=9, was_seen=True, ended="exited")
    assert why == "contains no file"


# --- The record in the run.


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root", "own", "o" * 32, {})


def _record(run: RunFolder, found: OwnCheckpoint) -> Manifest:
    manifest = Manifest(
        run_uid="o" * 32,
        run="own",
        name=str(CheckpointName(found.step, 1, 1)),
        step=found.step,
        attempt=1,
        launch=1,
        world_size=1,
        files=own_checkpoints.seal(found, lambda: True),
        source=str(found.folder),
        staged_at=found.changed_at,
        committed_at=found.changed_at + 1,
    )
    assert record_source(run.paths, manifest)
    return manifest


def test_a_recorded_checkpoint_verifies_where_the_program_wrote_it(
    run: RunFolder, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "checkpoint-50", state="x", weights="w" * 5_000_000)
    found = _found(folder)
    manifest = _record(run, found)
    directory = run.paths.checkpoint(manifest.name)
    pattern = CheckpointPattern(Program(checkpoints="checkpoint-{step}"), str(tmp_path))
    assert own_checkpoints.recorded(run.paths, pattern) == {folder: manifest}
    assert found.is_recorded_by(manifest)
    assert [path.name for path in directory.iterdir()] == ["manifest.json"]
    assert find_damage(directory, manifest) == []
    (folder / "weights").write_text("w" * 4_999_999 + "v")
    assert not _found(folder).is_recorded_by(manifest)
    (line,) = find_damage(directory, manifest)
    assert line.startswith("weights: bytes 4194304 to 4999999: checksum ")
    (folder / "state").unlink()
    assert "state: missing" in find_damage(directory, manifest)


def test_a_single_file_is_a_checkpoint_too(run: RunFolder, tmp_path: Path) -> None:
    _write(tmp_path, **{"m-5.pt": "abc"})
    manifest = _record(run, _found(tmp_path / "m-5.pt", 5))
    pattern = CheckpointPattern(Program(checkpoints="m-{step}.pt"), str(tmp_path))
    assert list(own_checkpoints.recorded(run.paths, pattern)) == [tmp_path / "m-5.pt"]
    assert find_damage(run.paths.checkpoint(manifest.name), manifest) == []


def test_files_that_change_while_they_are_read_are_not_recorded(tmp_path: Path) -> None:
    folder = _write(tmp_path / "checkpoint-50", a="1", b="2")
    found = _found(folder)
    (folder / "b").write_text("22")
    with pytest.raises(CheckpointError, match="changed its files while they were read"):
        own_checkpoints.seal(found, lambda: True)
    (folder / "b").unlink()
    os.mkfifo(folder / "b")
    with pytest.raises(CheckpointError, match="b was replaced"):
        own_checkpoints.seal(found, lambda: True)
    with pytest.raises(InterruptedError):
        own_checkpoints.seal(_found(_write(tmp_path / "checkpoint-51", a="1")), lambda: False)


def test_a_retired_checkpoint_becomes_a_tombstone_and_its_files_stay(
    run: RunFolder, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "checkpoint-50", state="x")
    manifest = _record(run, _found(folder))
    for _ in range(2):
        retire_source(run.paths, manifest.name)
    assert run.paths.tombstone(manifest.name).is_file()
    assert run.paths.list_checkpoints() == []
    assert (folder / "state").read_text() == "x"
    assert _record(run, _found(folder)) == manifest


@pytest.mark.root
def test_a_folder_that_a_manifest_names_must_be_its_owner_s(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _write(tmp_path / "checkpoint-50", state="x")
    manifest = _record(run, _found(folder))
    directory = run.paths.checkpoint(manifest.name)
    with files_folder(directory, manifest) as inside:
        assert (inside / "state").read_text() == "x"
    os.chown(directory / "manifest.json", 4711, -1)
    assert find_damage(directory, manifest) == [
        "state: a folder of another user than the checkpoint's"
    ]
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(directory / "manifest.json", os.getuid(), -1)
    (line,) = find_damage(directory, manifest.model_copy(update={"source": str(link)}))
    assert line.startswith("state: ")
    assert "link" in line


def test_nothing_of_holdfast_deletes_exports_forks_or_pins_such_a_checkpoint(
    run: RunFolder, tmp_path: Path
) -> None:
    manifests = []
    for step in (50, 60):
        manifests.append(_record(run, _found(_write(tmp_path / f"c-{step}", state="x"), step)))
    verdicts = retention.plan_run(run.paths)
    assert [verdict.is_kept for verdict in verdicts] == [True, True]
    assert retention.OWN in verdicts[0].reason
    name = manifests[0].name
    directory = run.paths.checkpoint(name)
    with pytest.raises(CheckpointError, match=r"cannot export it; its files are in .*c-50"):
        export(directory, ExportFormat.TORCH, tmp_path / "x.pt", writer="cli")
    with pytest.raises(CheckpointError, match="cannot start another run from it"):
        fork_run(run.paths, name, name="other", overrides=(), by="tester")
    with pytest.raises(CheckpointError, match="cannot keep it from being deleted"):
        operator.pin(run.paths, name, by="tester")


# --- Completion.


@pytest.mark.parametrize(
    ("step", "steps_total", "counts", "state", "words"),
    [
        (100, 100, True, AttemptState.COMPLETED, ""),
        (
            40,
            100,
            True,
            AttemptState.FAILED,
            "after step 40, although the spec's [config] sets 100",
        ),
        (40, None, True, AttemptState.COMPLETED, "does not set its last step"),
        (40, 100, False, AttemptState.COMPLETED, "newest checkpoint is after step 40"),
    ],
)
def test_a_program_of_its_own_is_complete_after_the_steps_of_its_spec(
    step: int, steps_total: int | None, counts: bool, state: AttemptState, words: str
) -> None:
    ending = judge_own_completion(step, steps_total, counts_steps=counts)
    assert ending.state is state
    assert words in " ".join(ending.evidence)
    allowed = judge_own_completion(step, steps_total, counts_steps=counts, allow_early_exit=True)
    assert allowed.state is AttemptState.COMPLETED


def test_the_parent_is_the_newest_checkpoint_before_a_step(run: RunFolder, tmp_path: Path) -> None:
    manifests = [
        _record(run, _found(_write(tmp_path / f"c-{step}", state="x"), step)) for step in (10, 20)
    ]
    assert own_checkpoints.newest_before(manifests, 20) == manifests[0]
    assert own_checkpoints.newest_before(manifests, 20, or_at=True) == manifests[1]
    assert own_checkpoints.newest_before(manifests, 10) is None


@pytest.mark.root
@pytest.mark.parametrize("what", ["", "state", "deep", "deep/state"])
def test_nothing_of_another_user_becomes_a_checkpoint(
    run: RunFolder, tmp_path: Path, what: str
) -> None:
    """The directory, a file in it, a directory in it, and a file in that."""
    folder = _write(tmp_path / "checkpoint-50", state="x")
    _write(folder / "deep", state="y")
    assert _found(folder).problem == ""
    os.chown(folder / what, STRANGER, STRANGER)
    found = _found(folder)
    named = f"contains {what} of another user" if what else "belongs to another user"
    assert found.problem == f"{named} (uid {STRANGER})"
    program = Program(checkpoints="checkpoint-{step}", complete=["state"])
    why = own_checkpoints.why_incomplete(found, program, still_s=1e9, was_seen=True, ended="exited")
    assert why == found.problem
    owned = own_checkpoints.look_at(folder, 50, frozenset({os.geteuid(), STRANGER}))
    assert owned is not None
    assert owned.problem == ""


@pytest.mark.root
def test_a_file_that_another_user_puts_in_place_of_one_is_not_read(tmp_path: Path) -> None:
    folder = _write(tmp_path / "checkpoint-50", state="x")
    found = _found(folder)
    os.chown(folder / "state", STRANGER, STRANGER)
    with pytest.raises(CheckpointError, match=f"state belongs to another user .uid {STRANGER}"):
        own_checkpoints.seal(found, lambda: True)
    _write(tmp_path, **{"m-5.pt": "abc"})
    os.chown(tmp_path / "m-5.pt", STRANGER, STRANGER)
    (one,) = CheckpointPattern(Program(checkpoints="m-{step}.pt"), str(tmp_path)).find()
    assert one.problem == f"belongs to another user (uid {STRANGER})"
