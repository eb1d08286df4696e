"""What .github/workflows/publish.yml does up to the upload, and what users do with the result.

The tools are installed by uv, at the versions of infra/setup/publish.lock, into an environment of
their own. `uv tool install` gives the command `holdfast` an environment with the wheel alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from tests.support.environments import LOCK, run_command

sys.path.append(str(Path(__file__).parents[2] / "infra" / "setup"))

import uv_install

from holdfast.contracts.version import holdfast_version

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PUBLISH_LOCK: Final = CHECKOUT / "infra" / "setup" / "publish.lock"
PRE_COMMIT: Final = "pre-commit==4.7.0"
BASE: Final = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
NOT_SOURCE: Final = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules", "tests", "docs"
)
START_S: Final = 60
REPOSITORY: Final = "https://host.example/team/holdfast"
# A program of a shell, which needs neither torch nor torchrun.
TINY: Final = """\
name = "tiny"
command = ["sh", "-c", "mkdir -p out/checkpoint-3 && echo 1 > out/checkpoint-3/w && echo trained"]
resources = { executor = "local", gpus_per_node = 0, nproc_per_node = 1 }
program = { launcher = "none", checkpoints = "out/checkpoint-{step}", settle_s = 0.5 }
"""

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


def uv(*words: str | Path, cwd: Path, **environment: str) -> str:
    """The output of our uv, which must succeed, with the indexes and settings of our pip."""
    listed = run_command(sys.executable, "-m", "pip", "config", "list", cwd=cwd)
    settings = uv_install.read_settings(listed)
    options = uv_install.options_of(settings) if "install" in words else []
    variables = uv_install.environment_of(settings, os.environ | environment)
    program = Path(sys.executable).with_name("uv")
    assert program.is_file(), "make setup installs it"
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return run_command(program, *words, *options, cwd=cwd, **changed)


def make_environment(folder: Path, *packages: str | Path) -> Path:
    """An environment with these packages alone; the folder of its programs."""
    uv("venv", "-q", "--python", BASE, folder, cwd=folder.parent)
    uv("pip", "install", "-q", "--python", folder / "bin" / "python", *packages, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of publish.lock."""
    return make_environment(tmp_path_factory.mktemp("tools") / "tools", "-r", PUBLISH_LOCK)


@pytest.fixture(scope="module")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and with the wheel that was built from it."""
    work = tmp_path_factory.mktemp("built")
    shutil.copytree(CHECKOUT, work / "source", symlinks=True, ignore=NOT_SOURCE)
    builder = (tools / "python", "-m", "build", "--no-isolation", "-o", work / "dist")
    run_command(*builder, work / "source", cwd=work, HOLDFAST_REPOSITORY_URL=REPOSITORY)
    return work / "dist"


@pytest.fixture
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_an_index_accepts_both_files(tools: Path, built: Path, wheel: Path) -> None:
    files = sorted(built.iterdir())
    name = f"holdfast-{holdfast_version()}"
    assert [file.name for file in files] == [f"{name}-py3-none-any.whl", f"{name}.tar.gz"]
    said = run_command(tools / "twine", "check", "--strict", *files, cwd=built, NO_COLOR="1")
    assert said.count("PASSED") == 2
    check = (tools / "check-wheel-contents", "--config", CHECKOUT / "pyproject.toml")
    assert run_command(*check, wheel, cwd=built).endswith(": OK\n")


def test_the_links_of_a_release_lead_to_files_of_its_version(wheel: Path) -> None:
    (information,) = [one for one in zipfile.Path(wheel).iterdir() if one.name.endswith("-info")]
    description = metadata.PathDistribution(information).metadata
    # The body of the message is under this name too.
    links = re.findall(r"\]\(([^)\s]+)\)", str(description.json["description"]))
    files = f"{REPOSITORY}/blob/v{holdfast_version()}/"
    own = [link.removeprefix(files).partition("#")[0] for link in links if link.startswith(files)]
    readme = re.findall(r"\]\(([^)\s]+)\)", (CHECKOUT / "README.md").read_text())
    here = [link for link in readme if not link.startswith(("https://", "#"))]
    assert own == [link.partition("#")[0] for link in here] != []
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    urls = dict(line.split(", ") for line in description.get_all("Project-URL") or ())
    assert urls.pop("Repository") == REPOSITORY
    own += [url.removeprefix(files) for url in urls.values()]
    assert [name for name in own if not (CHECKOUT / name).exists()] == []


def test_the_wheel_has_only_the_exception_that_pyproject_allows(tools: Path, wheel: Path) -> None:
    done = subprocess.run(
        [tools / "check-wheel-contents", "--no-config", wheel],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(re.findall(r"\b[WE]\d{3}\b", done.stdout)) == {"W004"}
    names = re.findall(r"^ +(\S+\.py)$", done.stdout, re.MULTILINE)
    assert names
    assert all(name.startswith("holdfast/lineage/migrations/versions/") for name in names)


@contextmanager
def served(holdfast: Path, cwd: Path, environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The (URL, token) of `holdfast serve` on a free port."""
    log = cwd / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [holdfast, "serve", "--port", "0"],
            cwd=cwd,
            env={"PATH": os.defpath, **environment},
            stdout=output,
            stderr=output,
        )
    try:
        ends_at = time.monotonic() + START_S
        while not (found := re.search(r"serving (http://\S+)/\?token=(\S+)\s", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends_at, log.read_text()
            time.sleep(0.1)
        yield found[1], found[2]
    finally:
        process.terminate()
        process.wait(START_S)


def get(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        body: bytes = answer.read()
    return body


def test_a_tool_of_uv_submits_shows_and_serves_a_run(wheel: Path, tmp_path: Path) -> None:
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    words = ("tool", "install", "-q", "--python", BASE, "--constraints", LOCK, f"{wheel}[server]")
    uv(*words, cwd=tmp_path, **places)
    holdfast = tmp_path / "bin" / "holdfast"
    environment = {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_ROOT": str(tmp_path / "runs"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }

    def call(*arguments: str) -> str:
        return run_command(holdfast, *arguments, cwd=tmp_path, **environment)

    assert json.loads(call("schema"))["required"] == ["name", "command"]
    (tmp_path / "run.toml").write_text(TINY)
    call("submit", "run.toml", "--wait")
    run = json.loads(call("show", "tiny", "--json"))
    assert (run["state"], run["committed_step"]) == ("completed", 3)
    assert call("logs", "tiny") == "trained\n"
    with served(holdfast, tmp_path, environment) as (url, token):
        page = get(f"{url}/", token).decode()
        parts = re.findall(r'(?:src|href)="(/[^"]+)"', page)
        assert any(part.endswith(".js") for part in parts)
        assert any(part.endswith(".css") for part in parts)
        assert all(get(f"{url}{part}", token) for part in parts)
        assert '"tiny"' in get(f"{url}/api/v1/runs", token).decode()


def test_the_hooks_of_pre_commit_find_and_fix_what_ruff_finds(tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "tools", PRE_COMMIT)
    place = tmp_path / "checkout"
    place.mkdir()
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, place)
    # The hooks use the programs of the checkout's own environment.
    (place / ".venv").symlink_to(Path(sys.executable).parents[1])
    (place / "bad.py").write_text("import os\nx = {  'a':1 }\n")
    run_command("git", "init", "-q", cwd=place)
    run_command("git", "add", "bad.py", "pyproject.toml", ".pre-commit-config.yaml", cwd=place)
    hooks: list[str | Path] = [programs / "pre-commit", "run", "--all-files", "--color", "never"]
    environment = os.environ | {"PRE_COMMIT_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        hooks, cwd=place, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^(ruff.*?)\.{3,}(\w+)$", done.stdout, re.MULTILINE) == [
        ("ruff", "Failed"),
        ("ruff format", "Failed"),
    ]
    assert (place / "bad.py").read_text() == 'x = {"a": 1}\n'
    run_command("git", "add", "bad.py", cwd=place)
    assert run_command(*hooks, cwd=place).count("Passed") == 2
