"""What `launch.code = "snapshot"` copies, and that a run has the code of its own submission."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.histories import spec_of

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError, RunConflictError
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs import code_snapshot, run_folders
from holdfast.workers.runs.code_snapshot import find_code, snapshot_warnings

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def git(folder: Path, *arguments: str) -> None:
    words = ["git", "-C", str(folder), *IDENTITY, *arguments]
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")


def spec_in(code: Path) -> RunSpec:
    return spec_of(launch={"code": "snapshot", "working_directory": str(code)})


def create(code: Path, root: Path) -> RunPaths:
    return run_folders.attach_or_create(spec_in(code), root, created_by="ann")[0]


def copied(paths: RunPaths) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(place, name), paths.code)
        for place, _, files in os.walk(paths.code, followlinks=True)
        for name in files
    )


@pytest.fixture(autouse=True)
def no_settings_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A repository with a file, an ignored one, and one that was never added."""
    folder = tmp_path / "code"
    write(folder, "train.py", "sub/model.py", "secret.txt", "new_module.py")
    (folder / ".gitignore").write_text("secret.txt\n")
    git(folder, "init", "-q")
    git(folder, "add", "train.py", "sub/model.py", ".gitignore")
    git(folder, "commit", "-qm", "x")
    return folder


def test_a_snapshot_has_what_git_tracks_or_does_not_ignore(code: Path, tmp_path: Path) -> None:
    paths = create(code, tmp_path / "root")
    assert copied(paths) == [".gitignore", "new_module.py", "sub/model.py", "train.py"]
    (code / "train.py").write_text("changed since")
    assert (paths.code / "train.py").read_text() == "# train.py\n"
    (warning,) = snapshot_warnings(spec_in(code))
    assert warning.startswith("launch.code = 'snapshot': the copy")
    assert warning.endswith("that the program does not need: new_module.py")
    git(code, "add", "-A")
    assert snapshot_warnings(spec_in(code)) == []


def test_a_snapshot_has_submodules_and_names_those_without_files(
    code: Path, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    write(library, "mod.py")
    git(library, "init", "-q")
    git(library, "add", "-A")
    git(library, "commit", "-qm", "x")
    git(code, "submodule", "--quiet", "add", str(library), "lib")
    git(code, "commit", "-qam", "with a submodule")
    write(code, "lib/unadded.py")
    assert {"lib/mod.py", "lib/unadded.py"} < set(copied(create(code, tmp_path / "root")))
    git(tmp_path, "clone", "-q", str(code), "clone")
    (warning,) = snapshot_warnings(spec_in(tmp_path / "clone"))
    assert "git submodule update --init" in warning
    assert warning.endswith(": lib")


@pytest.mark.parametrize("with_git", [True, False])
def test_a_link_to_a_folder_is_the_folder(tmp_path: Path, with_git: bool) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    write(code, "real/deep/y.py", "pkg/z.py", "runs/module.py")
    write(data, "large.bin")
    for name, target in (
        *(("linked", "real"), ("pkg/deep", "../real/deep"), ("data", "../data")),
        *(("pkg/around", ".."), ("file.py", "pkg/z.py"), ("nothing", "nowhere")),
    ):
        (code / name).symlink_to(target)
    if with_git:
        git(code, "init", "-q")
        git(code, "add", "-A")
    paths = create(code, tmp_path / "root")
    for name in ("linked/deep/y.py", "pkg/deep/y.py", "file.py", "runs/module.py"):
        path = paths.code / name
        assert path.is_file()
        assert path.resolve().is_relative_to(paths.code.resolve()), f"{name} is a copy"
    assert (paths.code / "data" / "large.bin").read_text() == "# large.bin\n"
    assert (paths.code / "data").is_symlink()
    links, absent = snapshot_warnings(spec_in(code))
    assert f"data → {data}" in links
    assert absent.endswith(": nothing")


def test_a_root_of_runs_in_the_working_directory_is_no_code(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(code, "train.py")
    first = create(code, code / "output")
    assert copied(first) == ["train.py"]
    git(code, "init", "-q")
    (first.directory / "spec.json").rename(tmp_path / "other.json")
    assert copied(create(code, code / "output")) == ["train.py"]


def test_a_large_folder_is_refused_before_the_runs_folder_exists(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_snapshot, "CODE_BYTES_MAX", 1000)
    (code / "output.bin").write_bytes(bytes(2000))
    with pytest.raises(PreflightError, match=r"the largest files are output\.bin, .*\.gitignore"):
        create(code, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_failed_submissions_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up at `spec.json`, the program is corrected, and submitted again."""
    code, root = tmp_path / "code", tmp_path / "root"
    write(code, "train.py", "dropped_later.py")

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(run_folders, "create_document", full)
        with pytest.raises(OSError, match="No space left"):
            create(code, root)
    (code / "dropped_later.py").unlink()
    (code / "train.py").write_text("corrected")
    (root / "r" / ".code.killed").mkdir()
    paths = create(code, root)
    assert copied(paths) == ["train.py"]
    assert (paths.code / "train.py").read_text() == "corrected"
    assert not list(paths.directory.glob(".code.*"))


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, root = tmp_path / "code", tmp_path / "root"
    write(code, "a.py", "b.py")
    found = find_code(code)
    (code / "b.py").unlink()
    with pytest.raises(FileNotFoundError):
        code_snapshot.copy_code(found, root / "code")
    (root / "r").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        code_snapshot.copy_code(found, root / "r" / "code")
    assert list((root / "r").iterdir()) == []


def test_of_two_submissions_at_the_same_time_the_winner_runs_its_own_code(tmp_path: Path) -> None:
    root, inside, go_on = tmp_path / "root", threading.Event(), threading.Event()
    for name in ("first", "second"):
        write(tmp_path / name, f"{name}.py")

    def slowly(*_: object) -> None:
        inside.set()
        assert go_on.wait(30)

    made: list[RunPaths] = []

    def submit_first() -> None:
        spec = spec_in(tmp_path / "first")
        made.append(run_folders.create_run(spec, root, created_by="ann", fill=slowly))

    thread = threading.Thread(target=submit_first)
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(RunConflictError, match="run the same command again"):
            create(tmp_path / "second", root)
    finally:
        go_on.set()
        thread.join(30)
    (paths,) = made
    assert copied(paths) == ["first.py"]
    assert run_folders.read_record(paths).spec["launch"]["working_directory"].endswith("first")


def test_a_killed_submissions_folder_is_used_again(tmp_path: Path) -> None:
    """The lock ends with the process, and what it copied is replaced."""
    root = tmp_path / "root"
    write(tmp_path / "code", "old.py")
    program = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from tests.unit.test_code_snapshot import spec_in, run_folders\n"
        "run_folders.create_run(spec_in(Path(sys.argv[1])), Path(sys.argv[2]), created_by='ann',\n"
        "                       fill=lambda *_: os._exit(9))\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "code"), str(root), os.getcwd()]
    assert subprocess.run(words, timeout=120, check=False).returncode == 9
    (tmp_path / "code" / "old.py").rename(tmp_path / "code" / "new.py")
    assert copied(create(tmp_path / "code", root)) == ["new.py"]
