"""The wheel, in empty environments outside the checkout: the operator's side, and the job's.

One environment has `holdfast[server]` and no torch, the other `holdfast[trainer]` and neither
Prefect nor SQL. The first submits a run whose ranks use the second, as on a cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALL_S = 400
COMMAND_S = 180
STEPS = 6
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "node_modules", "tests"
)

pytestmark = pytest.mark.timeout(900)


def run_command(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, run without a trace of this checkout."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOLDFAST_", "PREFECT_", "PYTHON", "VIRTUAL_ENV"))
    }
    # pip itself may take long on a slow line; nothing else does.
    limit_s = INSTALL_S if "pip" in str(command[0]) else COMMAND_S
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays as it is."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(CHECKOUT, work / "source", symlinks=True, ignore=NOT_SOURCE)
    builder: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "-o",
        work,
    ]
    run_command(*builder, work / "source", cwd=work)
    (built,) = work.glob("*.whl")
    return built


def make_environment(wheel: Path, extra: str) -> Path:
    """An empty environment beside the wheel with `holdfast[extra]`, at the lock's versions."""
    folder = wheel.parent / extra
    # The interpreter that our own environment was made from, not the environment.
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    run_command(base, "-m", "venv", folder, cwd=wheel.parent)
    lock = CHECKOUT / "requirements.lock"
    run_command(
        *(folder / "bin/pip", "install", "-qq", "-c", lock, f"{wheel}[{extra}]"), cwd=wheel.parent
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def server(wheel: Path) -> Path:
    """`bin` of the operator's environment."""
    return make_environment(wheel, "server")


@pytest.fixture(scope="module")
def trainer(wheel: Path) -> Path:
    """`bin` of the job's environment."""
    return make_environment(wheel, "trainer")


@pytest.fixture
def program(tmp_path: Path, trainer: Path) -> Path:
    """The folder of examples/gpt, copied, with a spec of two ranks and a few steps."""
    folder = tmp_path / "gpt"
    shutil.copytree(CHECKOUT / "examples" / "gpt", folder, ignore=NOT_SOURCE)
    text = (folder / "spec.toml").read_text()
    settings = text[text.index("[config]") :]
    settings = re.sub(r"(?m)^steps = .*$", f"steps = {STEPS}", settings)
    head = f"""\
name = "wheel"
command = ["train.py", "spec.toml"]
environment = {{ OMP_NUM_THREADS = "1" }}
resources = {{ gpus_per_node = 2 }}
checkpoint = {{ interval = {STEPS // 2} }}
launch = {{ python = "{trainer / "python"}" }}
"""
    (folder / "spec.toml").write_text(f"{head}\n{settings}")
    return folder


def test_the_wheel_carries_every_source_and_what_goes_with_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        f"holdfast/{path.relative_to(CHECKOUT / 'src' / 'holdfast')}"
        for part in ("contracts", "lineage", "api", "cli")
        for path in (CHECKOUT / "src" / "holdfast" / part).rglob("*.py")
    }
    expected |= {
        f"holdfast/{path.relative_to(CHECKOUT)}"
        for part in ("flows", "workers", "trainer")
        for path in (CHECKOUT / part).rglob("*.py")
    }
    expected |= {
        f"holdfast/lineage/migrations/{path.relative_to(CHECKOUT / 'alembic')}"
        for pattern in ("*.py", "*.mako")
        for path in (CHECKOUT / "alembic").rglob(pattern)
    }
    expected |= {"holdfast/py.typed", "holdfast/flows/templates/prefect.yaml"}
    # The page is built by the set-up, so that users need no Node.
    page = CHECKOUT / "src" / "holdfast" / "api" / "static"
    assert (page / "index.html").is_file(), f"{page}: no page; `make page` builds it"
    expected |= {
        f"holdfast/api/static/{path.relative_to(page)}"
        for path in page.rglob("*")
        if path.is_file()
    }
    assert expected <= names, sorted(expected - names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"holdfast"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_operators_side_needs_no_torch(server: Path, tmp_path: Path, program: Path) -> None:
    home = {"HOLDFAST_HOME": str(tmp_path / "home"), "HOLDFAST_ROOT": str(tmp_path / "runs")}
    installed = run_command(server / "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not re.search(r"(?m)^(torch|numpy)==", installed)
    run_command(server / "holdfast", "db", "upgrade", cwd=tmp_path, **home)
    assert (tmp_path / "home" / "holdfast.db").is_file()
    printed = run_command(
        *(server / "holdfast", "submit", program / "spec.toml", "--dry-run"), cwd=tmp_path, **home
    )
    request = json.loads(printed)
    assert (request["run"], request["gpus_per_node"]) == ("wheel", 2)
    assert request["working_directory"] == str(program)
    assert not (tmp_path / "runs" / "wheel").exists()
    assert (
        json.loads(run_command(server / "holdfast", "runs", "--json", cwd=tmp_path, **home)) == []
    )


def test_the_jobs_side_needs_no_prefect_and_no_sql(
    trainer: Path, tmp_path: Path, program: Path
) -> None:
    installed = run_command(trainer / "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not re.search(r"(?im)^(prefect|sqlalchemy|alembic|fastapi|typer)==", installed)
    launcher: list[str | Path] = [trainer / "torchrun", "--standalone", "--nproc-per-node", "2"]
    environment = {"HOLDFAST_ROOT": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    # torchrun leaves a folder in the temporary one.
    environment["TMPDIR"] = str(tmp_path)
    run_command(*launcher, "train.py", "spec.toml", cwd=program, **environment)
    (manifest,) = tmp_path.glob(f"runs/train/checkpoints/step-{STEPS:08d}.*/manifest.json")
    document = json.loads(manifest.read_bytes())
    assert (document["step"], document["world_size"]) == (STEPS, 2)


def test_one_side_submits_a_run_that_the_other_side_trains(
    server: Path, tmp_path: Path, program: Path
) -> None:
    environment = {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_ROOT": str(tmp_path / "runs"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command: list[str | Path] = [server / "holdfast", "submit", program / "spec.toml", "--wait"]
    run_command(*command, cwd=tmp_path, **environment)
    shown = run_command(server / "holdfast", "show", "wheel", "--json", cwd=tmp_path, **environment)
    run = json.loads(shown)
    assert (run["state"], run["step"]) == ("completed", STEPS)
    assert [attempt["world_size"] for attempt in run["attempts"]] == [2]
    (newest,) = json.loads(
        run_command(
            *(server / "holdfast", "checkpoints", "wheel", "--json"), cwd=tmp_path, **environment
        )
    )[-1:]
    assert (newest["step"], newest["state"]) == (STEPS, "committed")
    verdict = run_command(
        *(server / "holdfast", "verify", newest["path"], "--json"), cwd=tmp_path, **environment
    )
    assert json.loads(verdict)["ok"] is True
