"""The wheel in empty environments outside the checkout: the operator's side and the job's side.

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
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.environments import install, link, pip, run_command

from holdfast.cli.shared.exit_status import REFUSED

CHECKOUT = Path(__file__).resolve().parents[2]
STEPS = 6
PARTS = {"api", "cli", "contracts", "flows", "lineage", "trainer", "workers"}
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules", "tests"
)

pytestmark = pytest.mark.timeout(900)


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


@pytest.fixture(scope="module")
def bench_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of holdfast-bench, built in the same way."""
    work = tmp_path_factory.mktemp("bench-wheel")
    shutil.copytree(CHECKOUT / "benchmarks", work / "source", ignore=NOT_SOURCE)
    builder = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", work)
    run_command(*builder, work / "source", cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=[link, pytest.param(install, marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Callable[[Path, str, Path], None]:
    """How environments are created: with links, which is quick, or with pip, as users do."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(make: Callable[[Path, str, Path], None], wheel: Path) -> Path:
    """The operator's environment."""
    folder = wheel.parent / f"server-{make.__name__}"
    make(wheel, "server", folder)
    return folder


@pytest.fixture(scope="module")
def trainer(make: Callable[[Path, str, Path], None], wheel: Path) -> Path:
    """The job's environment."""
    folder = wheel.parent / f"trainer-{make.__name__}"
    make(wheel, "trainer", folder)
    return folder


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
launch = {{ python = "{trainer / "bin" / "python"}" }}
"""
    (folder / "spec.toml").write_text(f"{head}\n{settings}")
    return folder


def test_wheel_contains_all_sources_and_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        str(path.relative_to(CHECKOUT / folder))
        for folder in ("src", "flows", "workers", "trainer")
        for pattern in ("*.py", "*.yaml", "py.typed")
        for path in (CHECKOUT / folder).rglob(pattern)
    }
    assert {name.split("/")[1] for name in expected if name.endswith("py.typed")} == PARTS
    expected |= {
        f"holdfast/lineage/migrations/{path.relative_to(CHECKOUT / 'alembic')}"
        for pattern in ("*.py", "*.mako")
        for path in (CHECKOUT / "alembic").rglob(pattern)
    }
    # The wheel contains the built web page, so that users do not need Node.
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


@pytest.mark.more
def test_bench_wheel_contains_only_the_benchmarks(bench_wheel: Path) -> None:
    names = set(zipfile.ZipFile(bench_wheel).namelist())
    source = CHECKOUT / "benchmarks" / "src"
    expected = {str(path.relative_to(source)) for path in source.glob("holdfast_bench/**/*.py")}
    assert expected <= names, sorted(expected - names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"holdfast_bench"}


@pytest.mark.more
@pytest.mark.parametrize("command", ["bench", "drill"])
def test_commands_without_the_bench_package_name_what_to_install(
    server: Path, tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [server / "bin" / "holdfast", command],
        cwd=tmp_path,
        env={"PATH": os.defpath, "NO_COLOR": "1", "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert "pip install ./benchmarks" in done.stderr


@pytest.mark.more
def test_server_environment_needs_no_torch(server: Path, tmp_path: Path, program: Path) -> None:
    home = {"HOLDFAST_HOME": str(tmp_path / "home"), "HOLDFAST_ROOT": str(tmp_path / "runs")}
    installed = pip(server, "list", "--format=freeze")
    assert not re.search(r"(?m)^torch==", installed)
    run_command(server / "bin" / "holdfast", "db", "upgrade", cwd=tmp_path, **home)
    assert (tmp_path / "home" / "holdfast.db").is_file()
    printed = run_command(
        *(server / "bin" / "holdfast", "submit", program / "spec.toml", "--dry-run"),
        cwd=tmp_path,
        **home,
    )
    request = json.loads(printed)
    assert (request["run"], request["gpus_per_node"]) == ("wheel", 2)
    assert request["working_directory"] == str(program)
    assert not (tmp_path / "runs" / "wheel").exists()
    assert (
        json.loads(run_command(server / "bin" / "holdfast", "runs", "--json", cwd=tmp_path, **home))
        == []
    )


@pytest.mark.more
def test_trainer_environment_needs_neither_prefect_nor_sql(
    trainer: Path, tmp_path: Path, program: Path
) -> None:
    installed = pip(trainer, "list", "--format=freeze")
    assert not re.search(r"(?im)^(prefect|sqlalchemy|alembic|fastapi|typer)==", installed)
    launcher: list[str | Path] = [trainer / "bin" / "python", "-m", "torch.distributed.run"]
    launcher += ["--standalone", "--nproc-per-node", "2"]
    environment = {"HOLDFAST_ROOT": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    # torchrun leaves a folder in the temporary directory.
    environment["TMPDIR"] = str(tmp_path)
    run_command(*launcher, "train.py", "spec.toml", cwd=program, **environment)
    (manifest,) = tmp_path.glob(f"runs/train/checkpoints/step-{STEPS:08d}.*/manifest.json")
    document = json.loads(manifest.read_bytes())
    assert (document["step"], document["world_size"]) == (STEPS, 2)


@pytest.mark.more
def test_server_environment_submits_a_run_that_the_trainer_one_runs(
    server: Path, tmp_path: Path, program: Path
) -> None:
    environment = {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_ROOT": str(tmp_path / "runs"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command: list[str | Path] = [
        server / "bin" / "holdfast",
        "submit",
        program / "spec.toml",
        "--wait",
    ]
    run_command(*command, cwd=tmp_path, **environment)
    shown = run_command(
        server / "bin" / "holdfast", "show", "wheel", "--json", cwd=tmp_path, **environment
    )
    run = json.loads(shown)
    assert (run["state"], run["step"]) == ("completed", STEPS)
    assert [attempt["world_size"] for attempt in run["attempts"]] == [2]
    (newest,) = json.loads(
        run_command(
            *(server / "bin" / "holdfast", "checkpoints", "wheel", "--json"),
            cwd=tmp_path,
            **environment,
        )
    )[-1:]
    assert (newest["step"], newest["state"]) == (STEPS, "committed")
    verdict = run_command(
        *(server / "bin" / "holdfast", "verify", newest["path"], "--json"),
        cwd=tmp_path,
        **environment,
    )
    assert json.loads(verdict)["ok"] is True


def test_wheel_without_the_web_page_is_built_only_on_request(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "static", "web")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    shutil.copytree(CHECKOUT / "src", source / "src", symlinks=True, ignore=ignore)
    for name in ("flows", "trainer", "workers", "alembic"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=ignore)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "HOLDFAST_WHEEL_WITHOUT_PAGE"}
    for wanted in (environment, environment | {"HOLDFAST_WHEEL_WITHOUT_PAGE": "1"}):
        done = subprocess.run(
            [*build, str(source)], env=wanted, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode == 0) is (wanted is not environment), done.stderr
        if wanted is environment:
            assert "make page" in done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if "/static/" in name]
