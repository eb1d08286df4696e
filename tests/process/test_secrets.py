"""Secrets reach only the program: runs with real agents and torchrun."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.local_command import Local

from holdfast.contracts.disk.paths import RunPaths

PROGRAM: Final = Path(__file__).with_name("secrets_program.py")
NOBODY: Final = 65534
FILE_VALUE: Final = "file-Zq8vR3mK1xWn"
ENV_VALUE: Final = "env-Lp2tB9sD4yHc"
LINES_VALUE: Final = "first line-Gk5\nsecond line-Jw7"
VARIABLE: Final = "TESTS_OWN_TOKEN"
WAIT_S: Final = 180.0


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    made.environment |= {VARIABLE: ENV_VALUE, "TESTS_LINES": LINES_VALUE}
    yield made
    made.end_all()


class SecretRun:
    """A run whose program gets three secrets and records what it received."""

    def __init__(self, local: Local, name: str = "kept", **asked: Any) -> None:
        self.local, self.seen = local, local.folder / "seen"
        self.paths = RunPaths(local.root / name)
        self.file = local.folder / "token"
        self.file.write_text(FILE_VALUE + "\n")
        self.file.chmod(0o600)
        self.values = {"FROM_A_FILE": FILE_VALUE, "TOKEN": ENV_VALUE, "LINES": LINES_VALUE}
        settings = {"names": [*self.values], "seen": str(self.seen), **asked}
        self.spec = local.write_spec(
            name,
            {},
            command=[PROGRAM.name, json.dumps(settings)],
            environment={
                "OMP_NUM_THREADS": "1",
                "FROM_A_FILE": {"from_file": str(self.file)},
                "TOKEN": {"from_env": VARIABLE},
                "LINES": {"from_env": "TESTS_LINES"},
            },
        )

    def assert_program_saw_all(self, times: int = 1) -> None:
        digests = {k: hashlib.sha256(v.encode()).hexdigest() for k, v in self.values.items()}
        lines = self.seen.read_text().splitlines()
        assert [json.loads(line) for line in lines] == [digests] * times


def leaks(folder: Path, *, but: tuple[Path, ...] = ()) -> list[str]:
    """The files under `folder` that contain a secret's value, plain or JSON-encoded."""
    words = [FILE_VALUE, ENV_VALUE, *LINES_VALUE.splitlines()]
    return [
        str(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in but
        for word in words
        if word.encode() in path.read_bytes()
    ]


def test_program_receives_its_secrets_and_no_file_contains_them(local: Local) -> None:
    run = SecretRun(local)
    told = local.json("submit", str(run.spec), "--wait")
    assert told["state"] == "completed", told
    assert told["warnings"] == []
    run.assert_program_saw_all()
    # The whole home folder: the run, the index, the supervisor's log, Prefect's files.
    found = leaks(local.folder, but=(run.file,))
    assert found == []
    assert not run.paths.private.exists()
    shown = local.json("show", "kept")
    assert shown["spec"]["environment"]["TOKEN"] == {"from_env": VARIABLE}
    again = local.json("submit", str(run.spec), "--wait")
    assert again["created"] is False


@pytest.mark.more
def test_relaunch_without_the_secret_variable_is_refused(local: Local) -> None:
    run = SecretRun(local, fail=["TOKEN"])
    done = local.call("submit", str(run.spec), "--wait", "--json")
    told = json.loads(done.stdout)
    assert told["state"] == "failed", done.stderr
    assert "refused with •••" in run.paths.attempt(1).outcome.read_text()
    assert leaks(run.paths.directory / "journal") == []
    assert leaks(run.paths.attempt(1).journal) == []
    assert ENV_VALUE not in run.paths.attempt(1).outcome.read_text()
    assert not run.paths.private.exists()
    del local.environment[VARIABLE]
    refused = local.call("relaunch", "kept")
    assert refused.returncode != 0
    assert f'environment.TOKEN ({{from_env = "{VARIABLE}"}})' in refused.stderr
    assert json.loads(local.call("show", "kept", "--json").stdout)["state"] == "failed"
    local.environment[VARIABLE] = ENV_VALUE
    local.json("relaunch", "kept")
    _wait(lambda: local.json("show", "kept")["state"] == "completed")
    _wait(lambda: not run.paths.private.exists())
    run.assert_program_saw_all(times=2)


def test_other_users_cannot_read_recorded_secrets(local: Local) -> None:
    """Also while the run is live and every folder above it is open to all users."""
    run = SecretRun(local)
    _record(run)
    assert run.paths.secrets.stat().st_mode & 0o777 == 0o600
    assert run.paths.private.stat().st_mode & 0o777 == 0o700
    for folder in (run.paths.directory, *run.paths.directory.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    assert ENV_VALUE in run.paths.secrets.read_text()
    for command in (f"cat {run.paths.secrets}", f"ls {run.paths.private}", f"cat {run.file}"):
        done = _as_nobody(command)
        assert done.returncode != 0, command
        assert "Permission denied" in done.stderr
        assert done.stdout == ""
    # A parent folder that another user can write to gives no access either.
    assert _as_nobody(f"mv {run.paths.private} /tmp/taken").returncode != 0


@pytest.mark.more
def test_supervisor_without_the_variable_uses_the_recorded_secret(local: Local) -> None:
    run = SecretRun(local)
    _record(run)
    del local.environment[VARIABLE]
    told = local.json("submit", str(run.spec), "--wait")
    assert (told["created"], told["state"]) == (False, "completed")
    run.assert_program_saw_all()
    assert leaks(local.folder, but=(run.file,)) == []


@pytest.mark.more
def test_unreadable_secret_file_fails_the_attempt_and_is_named(local: Local) -> None:
    run = SecretRun(local)
    _record(run)
    run.file.chmod(0o644)
    done = local.call("submit", str(run.spec), "--wait", "--no-preflight")
    assert done.returncode != 0
    assert "has mode 0644" in done.stderr
    # A running supervisor does not read secret files, because only the nodes have them.
    subprocess.run(
        [sys.executable, "-m", "holdfast.flows.detached", str(run.paths.directory)],
        env=local.environment,
        capture_output=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    shown = local.json("show", "kept")
    (attempt,) = shown["attempts"]
    assert (attempt["state"], attempt["cause"]) == ("failed", "user_error")
    said = json.dumps(attempt, ensure_ascii=False)
    assert "environment.FROM_A_FILE" in said
    assert "chmod 600" in said
    assert not run.seen.exists()
    assert leaks(local.folder, but=(run.file,)) == []


@pytest.mark.more
def test_logs_command_masks_secret_values(local: Local) -> None:
    run = SecretRun(local, say=["FROM_A_FILE", "TOKEN"])
    local.json("submit", str(run.spec), "--wait")
    logs = local.call("logs", "kept").stdout
    stars = [f"<{'*' * len(value)}>" for value in (FILE_VALUE, ENV_VALUE)]
    assert all(f"the value is {one}" in logs for one in stars), logs
    assert "the end" in logs
    told = local.call("logs", "kept", "--json").stdout
    assert FILE_VALUE not in told
    assert ENV_VALUE not in told


def _record(run: SecretRun) -> None:
    """Create the run and record its secrets as the command does, without a supervisor."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from holdfast.flows.supervisor import secrets\n"
        "from holdfast.flows.parameters import load_spec\n"
        "from holdfast.workers.runs.run_folders import attach_or_create\n"
        "spec = load_spec(Path(sys.argv[1]))\n"
        "paths, _ = attach_or_create(spec, Path(sys.argv[2]), created_by='tests')\n"
        "secrets.record(paths, refresh=True)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(run.spec), str(run.local.root)],
        env=run.local.environment,
        timeout=WAIT_S,
        check=True,
    )


def _as_nobody(command: str) -> subprocess.CompletedProcess[str]:
    privileges = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return subprocess.run(
        ["setpriv", *privileges, "--inh-caps=-all", "sh", "-c", command],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "LC_ALL": "C"},
        timeout=WAIT_S,
        check=False,
    )


def _wait(look: Any) -> None:
    give_up = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < give_up
        time.sleep(0.5)
