"""What is loaded before the first step, and when."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.cli_calls import Call
from tests.support.forked_child import start_child

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError
from holdfast.flows import start
from holdfast.flows.loaded_supervisor import LoadedSupervisor
from holdfast.workers.agent.launch import loaded_torchrun
from holdfast.workers.agent.launch.loaded_torchrun import LoadedTorchrun
from holdfast.workers.executors.local_launch import _AgentExecutor

WAIT_S = 120.0
PROGRAM = """
import gc, json, os, sys
assert not gc.isenabled()
def main():
    assert gc.isenabled()
    print("begins", flush=True)
    with open("began.tmp", "w") as file:
        json.dump([sys.argv[1:], os.environ.get("GIVEN"), os.environ.get("BEFORE")], file)
    os.rename("began.tmp", "began")
print("loaded", flush=True)
"""


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("holdfast.flows.detached", {"prefect", "sqlalchemy"}),
        ("holdfast.flows.supervisor.carry", {"prefect", "sqlalchemy", "submitit", "torch"}),
        ("holdfast.workers.executors.local_launch", {"holdfast.workers.agent", "pydantic"}),
        ("holdfast.workers.agent.main", {"numpy", "psutil", "pydantic", "submitit"}),
    ],
)
def test_what_a_process_before_the_first_step_does_not_load(
    module: str, unwanted: set[str]
) -> None:
    code = f"import sys, {module}; print(sorted({unwanted!r} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", f"{module} loads more than it needs"


def test_a_local_job_starts_the_agent_without_what_submitit_starts_first() -> None:
    executor = _AgentExecutor.__new__(_AgentExecutor)
    executor.python, executor.request = "python", Path("/runs/a b/attempts/0001/request.json")
    module, path = executor._submitit_command_str.removeprefix("python -u -m ").split(" ", 1)
    assert module == "holdfast.workers.agent.main"
    assert path == "'/runs/a b/attempts/0001/request.json'"


def import_a_session(is_on: bool) -> None:
    """Import the trainer in a process that has torch, with the collector on or off before."""
    (gc.enable if is_on else gc.disable)()
    for name in [one for one in sys.modules if one.partition(".")[0] == "holdfast"]:
        del sys.modules[name]
    while_imported: list[bool] = []

    class Recorder:
        def find_spec(self, *_: object) -> None:
            while_imported.append(gc.isenabled())

    sys.meta_path.insert(0, Recorder())
    from holdfast.trainer import Session

    assert Session.__module__ in sys.modules
    assert not while_imported[-1]
    assert gc.isenabled() == is_on
    with pytest.raises(ImportError):
        from holdfast.trainer import Missing  # noqa: F401
    assert gc.isenabled() == is_on


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_pauses_while_a_session_is_imported(is_on: bool) -> None:
    _, status = os.waitpid(start_child(lambda: import_a_session(is_on)), 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.fixture
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Prefect creates its home when it is loaded.
    import_module("holdfast.flows.deployments")
    for name in [one for one in os.environ if one.upper().startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_prefect_is_not_asked_for_an_api_where_nothing_configures_it(
    nothing_configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "holdfast.flows.deployments", None)
    (nothing_configured / "pyproject.toml").write_text("[project]\nname = 'training'\n")
    assert not start.has_service()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("home/.prefect/profiles.toml", 'active = "local"'),
        ("prefect.toml", "[api]\nurl = 'http://127.0.0.1:4200/api'"),
        (".env", "PREFECT_API_URL=http://127.0.0.1:4200/api"),
        ("pyproject.toml", "[tool.prefect.api]\nurl = 'http://127.0.0.1:4200/api'"),
    ],
)
def test_prefect_is_asked_for_an_api_where_a_file_may_name_one(
    path: str, text: str, nothing_configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.flows import deployments

    monkeypatch.setattr(deployments, "api_url", lambda: "http://127.0.0.1:4200/api")
    file = nothing_configured / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert start.has_service()


def test_prefect_is_asked_for_an_api_where_a_variable_may_name_one(
    nothing_configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.flows import deployments

    monkeypatch.setattr(deployments, "api_url", lambda: "http://127.0.0.1:4200/api")
    monkeypatch.setenv("PREFECT_PROFILE", "local")
    assert start.has_service()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A request whose torchrun is a small module."""
    (tmp_path / "small_torchrun.py").write_text(PROGRAM)
    monkeypatch.setattr(loaded_torchrun, "TORCHRUN", "small_torchrun")
    return {
        "program": {"launcher": "torchrun"},
        "launch": {"node_setup": ""},
        "working_directory": str(tmp_path),
        "environment": {"BEFORE": "1", "TOKEN": {"secret": "env:NAME"}},
    }


@pytest.fixture
def loaded(tmp_path: Path, attempt: dict[str, Any]) -> Iterator[LoadedTorchrun]:
    one = _load(tmp_path, attempt)
    assert one is not None
    yield one
    one.discard()


def _load(folder: Path, attempt: dict[str, Any]) -> LoadedTorchrun | None:
    path = folder / "request.json"
    path.write_text(json.dumps(attempt))
    return LoadedTorchrun.of(path)


def _wait_for(loaded: LoadedTorchrun, text: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while text.encode() not in os.pread(loaded.log, 4096, 0):
        assert time.monotonic() < give_up, f"the log has no {text!r}"
        time.sleep(0.01)


def test_a_loaded_torchrun_begins_with_the_launch(tmp_path: Path, loaded: LoadedTorchrun) -> None:
    _wait_for(loaded, "loaded")
    assert loaded.is_ready
    assert not (tmp_path / "began").exists(), "it began before the launch"
    guard = loaded.start(["--nnodes=1", "train.py"], {"GIVEN": "2", "PATH": os.environ["PATH"]})
    assert guard.wait(WAIT_S) == 0
    began = json.loads((tmp_path / "began").read_text())
    assert began == [["--nnodes=1", "train.py"], "2", None], "it has another environment"
    assert not loaded.is_ready, "another launch may not use it"


def test_a_loaded_torchrun_without_a_launch_ends_and_begins_nothing(
    tmp_path: Path, attempt: dict[str, Any]
) -> None:
    loaded = _load(tmp_path, attempt)
    assert loaded is not None
    loaded.discard()
    assert not loaded.is_ready
    assert not (tmp_path / "began").exists()


def test_a_loaded_torchrun_that_has_ended_is_not_used(
    tmp_path: Path, attempt: dict[str, Any]
) -> None:
    (tmp_path / "small_torchrun.py").write_text("raise ImportError('no torch here')")
    loaded = _load(tmp_path, attempt)
    assert loaded is not None
    give_up = time.monotonic() + WAIT_S
    while loaded.is_ready and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not loaded.is_ready
    loaded.discard()


@pytest.mark.parametrize(
    "changed",
    [
        {"program": {"launcher": "none"}},
        {"launch": {"node_setup": "module load cuda"}},
        {"program": None},
    ],
)
def test_a_launch_that_needs_more_starts_torchrun_itself(
    changed: dict[str, Any], tmp_path: Path, attempt: dict[str, Any]
) -> None:
    assert _load(tmp_path, attempt | changed) is None


def test_a_missing_request_is_left_to_the_agent(tmp_path: Path) -> None:
    assert LoadedTorchrun.of(tmp_path / "request.json") is None


def test_a_request_that_leads_out_of_the_run_is_left_to_the_agent(
    tmp_path: Path, attempt: dict[str, Any]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(attempt))
    path = tmp_path / "run" / "attempts" / "0001" / "request.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(other)
    assert LoadedTorchrun.of(path) is None


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """The folder of a run that does not exist yet."""
    return RunPaths(tmp_path / "runs" / "kelp")


def test_a_loaded_supervisor_waits_only_once_it_is_loaded() -> None:
    code = """
import sys
from holdfast.flows import detached
wanted = {"holdfast.flows.supervisor.supervise", "holdfast.workers.runs.attempts"}
detached.wait_until_told = lambda log: print(wanted <= {*sys.modules}, log)
sys.exit(detached.main(["--when-told", "/runs/kelp"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True /runs/kelp/flow.log"


def test_a_loaded_supervisor_that_no_run_needs_ends_and_writes_nothing(run: RunPaths) -> None:
    with LoadedSupervisor(run) as loaded:
        process = loaded._process
        assert loaded.begin(run.directory.with_name("kelp.r2")) is None, "it is another run's"
        assert process.poll() is None
    assert process.returncode == 0
    assert not run.directory.parent.exists()


def test_a_loaded_supervisor_ends_with_a_killed_command(run: RunPaths) -> None:
    code = f"""
import os
from pathlib import Path
from holdfast.contracts.disk.paths import RunPaths
from holdfast.flows.loaded_supervisor import LoadedSupervisor
print(LoadedSupervisor(RunPaths(Path({str(run.directory)!r})))._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(WAIT_S)
    assert not run.directory.parent.exists()


def test_a_loaded_supervisor_that_has_ended_is_replaced(run: RunPaths) -> None:
    with LoadedSupervisor(run) as loaded:
        loaded._process.kill()
        loaded._process.wait()
        assert loaded.begin(run.directory) is None


def test_a_loaded_supervisor_begins_with_the_run_and_writes_its_log(run: RunPaths) -> None:
    run.directory.mkdir(parents=True)
    with LoadedSupervisor(run) as loaded:
        started = start.start_here(run, loaded)
        assert started.process is loaded._process
        assert loaded.begin(run.directory) is None, "it is used already"
    # There is no run in the folder.
    assert started.process.wait(WAIT_S) == 1
    assert str(run.spec) in run.flow_log.read_text()


@pytest.mark.parametrize("is_refused", [True, False])
def test_submit_loads_the_supervisor_of_its_run_before_the_checks(
    is_refused: bool, call: Call, nothing_configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.flows import forks

    seen: list[str] = []

    class Recorded:
        def __init__(self, paths: RunPaths) -> None:
            seen.append(f"load {paths.name}")

        def begin(self, directory: Path) -> Any:
            seen.append(f"begin {directory.name}")
            return subprocess.Popen(["true"])

        def close(self) -> None:
            seen.append("close")

        def __enter__(self) -> "Recorded":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    def check(*_: object) -> None:
        seen.append("check")
        if is_refused:
            raise PreflightError("no")

    monkeypatch.setattr(start, "LoadedSupervisor", Recorded)
    monkeypatch.setattr(forks, "check_everything", check)
    spec = nothing_configured / "run.yaml"
    spec.write_text(json.dumps({"name": "kelp", "command": ["t.py"]}))
    answer = call("submit", spec, "--root", nothing_configured / "runs")
    expected = ["load kelp", "check"] + ([] if is_refused else ["begin kelp"])
    assert [one for one in seen if one != "close"] == expected
    assert seen[-1] == "close"
    assert answer.status == (5 if is_refused else 0)
