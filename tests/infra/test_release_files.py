"""The files of a release: metadata, workflows, the conda recipe and pre-commit agree with the code.

tests/process/test_publishing.py builds and checks the packages as the workflow does.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import lock
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
WORKFLOWS: Final = CHECKOUT / ".github" / "workflows"
PYTHON: Final = "Programming Language :: Python :: "
# The name on PyPI → the name on conda-forge, where they differ.
CONDA_NAMES: Final = {"xxhash": "python-xxhash"}
# A commit, and its version as a comment.
PINNED: Final = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    return found


def steps_of(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def test_the_metadata_is_complete() -> None:
    assert {"description", "license", "license-files", "keywords"} <= PROJECT.keys()
    given = PROJECT["classifiers"]
    assert given == sorted(given)
    assert set(given) <= classifiers
    # A license expression replaces these classifiers, and indexes refuse both together.
    assert not [one for one in given if one.startswith("License ::")]
    versions = [one.removeprefix(PYTHON) for one in given if one.startswith(f"{PYTHON}3.")]
    assert versions
    supported = SpecifierSet(PROJECT["requires-python"])
    assert all(supported.contains(version) for version in versions)
    oldest = min(versions, key=lambda version: [*map(int, version.split("."))])
    assert PROJECT["requires-python"] == f">={oldest}"


def test_holdfast_bench_cannot_be_published() -> None:
    bench = tomllib.loads((CHECKOUT / "benchmarks" / "pyproject.toml").read_text())["project"]
    assert bench["classifiers"] == ["Private :: Do Not Upload"]


@pytest.mark.parametrize("name", ["publish", "tests"])
def test_a_workflow_fits_the_published_schema_and_pins_its_actions(name: str) -> None:
    path = WORKFLOWS / f"{name}.yml"
    check = (
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
    )
    done = subprocess.run([*check, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    used = [line.strip() for line in path.read_text().splitlines() if "uses: " in line]
    assert len(used) == sum("uses" in step for step in steps_of(name))
    assert [line for line in used if not PINNED.search(line)] == []
    assert workflow(name)["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow(name)
    assert all("timeout-minutes" in job for job in workflow(name)["jobs"].values())


def test_the_tests_run_the_commands_of_the_readme_and_keep_what_failed() -> None:
    commands = "\n".join(step.get("run", "") for step in steps_of("tests"))
    assert re.search(r"^make test ", commands, re.MULTILINE)
    assert "\nmake test " in (CHECKOUT / "README.md").read_text()
    for job in workflow("tests")["jobs"].values():
        last = job["steps"][-1]
        assert "actions/upload-artifact" in last["uses"]
        assert last["if"] == "failure()"
    # `make` is among the packages that apt installs, too, before `python3`.
    targets = set(re.findall(r"make ((?:[a-z-]+ )*[a-z-]+)", commands))
    names = {target for words in targets for target in words.split()} - {"python"}
    makefile = (CHECKOUT / "Makefile").read_text()
    missing = [name for name in names if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    assert names >= {"check", "test-unit", "test"}
    assert missing == []


def test_only_the_upload_has_an_identity_and_nothing_has_a_secret() -> None:
    jobs = workflow("publish")["jobs"]
    assert {name: job.get("permissions") for name, job in jobs.items()} == {
        "build": None,
        "upload": {"id-token": "write"},
    }
    assert jobs["upload"]["needs"] == "build"
    assert all("run" not in step for step in jobs["upload"]["steps"])
    assert "secrets." not in (WORKFLOWS / "publish.yml").read_text()
    built = [
        step["run"] for step in jobs["build"]["steps"] if "python -m build" in step.get("run", "")
    ]
    assert len(built) == 1


@pytest.mark.parametrize(("tag", "is_right"), [(f"v{PROJECT['version']}", True), ("v9.9.9", False)])
def test_the_tag_must_be_the_version(tmp_path: Path, tag: str, is_right: bool) -> None:
    (step,) = [step for step in steps_of("publish") if step.get("id") == "project"]
    output = tmp_path / "output"
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=CHECKOUT,
        env={"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": str(output)},
        timeout=30,
    )
    assert (done.returncode == 0) is is_right
    if is_right:
        assert output.read_text() == f"python={PROJECT['requires-python'].removeprefix('>=')}\n"


def test_the_packages_that_publish_have_exact_versions() -> None:
    lines = (CHECKOUT / "infra" / "setup" / "publish.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*,]+", str(one.specifier)) for one in pins)
    names = {str(canonicalize_name(one.name)): one for one in pins}
    assert names.keys() >= {"build", "check-wheel-contents", "hatchling", "twine"}
    # The release is built by the backend that the tests build with.
    tested = dict(line.split("==") for line in _pins(CHECKOUT / lock.WHOLE))
    assert names["hatchling"].specifier.contains(tested["hatchling"])


def _pins(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if "==" in line]


def test_the_conda_recipe_has_the_version_and_the_core_dependencies() -> None:
    recipe = yaml.safe_load((CHECKOUT / "infra" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == PROJECT["version"]
    needs = [Requirement(line) for line in PROJECT["dependencies"]]
    expected = {CONDA_NAMES.get(one.name, one.name): one.specifier for one in needs}
    expected["python"] = SpecifierSet(PROJECT["requires-python"])
    given = (line.partition(" ") for line in recipe["requirements"]["run"])
    assert {name: SpecifierSet(limits) for name, _, limits in given} == expected
    backend = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["build-system"]["requires"]
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    assert {*backend} | {f"python{PROJECT['requires-python']}", "pip"} == host
    scripts = [f"{name} = {place}" for name, place in PROJECT["scripts"].items()]
    assert recipe["build"]["noarch"] == "python"
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_hooks_of_pre_commit_are_tools_of_the_environment() -> None:
    config = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    programs = {hook["id"]: hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {
        "ruff": ".venv/bin/ruff",
        "ruff-format": ".venv/bin/ruff",
        "mypy": ".venv/bin/mypy",
    }
    development = {Requirement(one).name for one in PROJECT["optional-dependencies"]["dev"]}
    assert {"ruff", "mypy"} <= development
