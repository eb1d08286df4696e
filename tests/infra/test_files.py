"""The files for operators in infra: each is checked by the program that reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast_docs.metrics_page import families

CHECKOUT = Path(__file__).resolve().parents[2]
INFRA = CHECKOUT / "infra"
COMPOSE = INFRA / "compose" / "compose.yaml"
CHECKERS = CHECKOUT / ".setup" / "checkers"
PROGRAMS = Path(sys.executable).parent
CLOUD_SCHEMA = "usr/lib/python3/dist-packages/cloudinit/config/schemas/schema-cloud-config-v1.json"


def check(*words: str | Path, **environment: str) -> str:
    """Run a checker, which must succeed; its output."""
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def test_the_compose_file_fits_the_published_schema() -> None:
    check(
        *(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"),
        COMPOSE,
    )


def test_every_variable_of_the_compose_file_is_in_the_example() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE.read_text()))
    given = re.findall(r"^([A-Z_]+)=", (INFRA / "compose" / "example.env").read_text(), re.M)
    assert used == set(given)


def test_mounted_files_and_dockerfiles_exist() -> None:
    for service in compose()["services"].values():
        build = service.get("build")
        if build:
            place = COMPOSE.parent / build["context"]
            assert (place / build["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (COMPOSE.parent / source).is_file()


def holdfast_commands() -> list[list[str]]:
    """The calls of `holdfast` in compose and systemd files, without the name of the program."""
    commands = [
        [word.replace("${SERVER_NAME:?}", "runs.lab.example") for word in service["command"][1:]]
        for service in compose()["services"].values()
        if service.get("command", [""])[0] == "holdfast"
    ]
    for unit in (INFRA / "systemd").glob("*.service"):
        (start,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.M)
        program, *words = start.split()
        if program.endswith("/holdfast"):
            commands.append(words)
    return commands


@pytest.mark.parametrize("words", holdfast_commands(), ids=" ".join)
def test_commands_have_the_options_that_are_used(words: list[str]) -> None:
    text = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200"}).output
    for word in words:
        assert not word.startswith("--") or word in text, f"{words[0]} has no {word}"


def test_dockerfiles_follow_the_rules() -> None:
    hadolint = shutil.which("hadolint", path=f"{PROGRAMS}:{os.environ['PATH']}")
    assert hadolint, "make setup installs it"
    check(hadolint, *sorted((INFRA / "images").glob("*.Dockerfile")))


def test_images_install_extras_that_exist() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    for path in (INFRA / "images").glob("*.Dockerfile"):
        named = re.findall(r"holdfast-\*\.whl\)\[([a-z0-9,]+)\]", path.read_text())
        assert named
        for extras in named:
            assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_images_install_the_tested_versions() -> None:
    for path in (INFRA / "images").glob("*.Dockerfile"):
        text = path.read_text()
        assert re.search(r"/src/requirements.lock.* /wheels", text)
        (install,) = re.findall(r"RUN pip install (.*)", text)
        assert "--constraint /wheels/requirements.lock" in install


def test_prometheus_accepts_the_alert_rules_and_holdfast_has_their_metrics() -> None:
    rules = INFRA / "grafana" / "alerts.yaml"
    check(CHECKERS / "usr/bin/promtool", "check", "rules", rules)
    has = {one.name for one in families()}
    dashboard = json.loads((INFRA / "grafana" / "holdfast.json").read_text())
    asked = rules.read_text() + json.dumps(dashboard["panels"])
    names = set(re.findall(r"\b(holdfast_[a-z_]+?)(?:_bucket)?\b(?=[{\[ )\\])", asked))
    assert len(names) > 10
    assert names <= has


def test_each_alert_fires_when_it_should_and_not_for_healthy_runs(tmp_path: Path) -> None:
    rules = INFRA / "grafana" / "alerts.yaml"
    tests = Path(__file__).with_name("alert_tests.yaml")
    for path in (rules, tests):
        shutil.copy(path, tmp_path)
    check(CHECKERS / "usr/bin/promtool", "test", "rules", tmp_path / tests.name)
    names = {
        rule["alert"] for g in yaml.safe_load(rules.read_text())["groups"] for rule in g["rules"]
    }
    cases = [c for t in yaml.safe_load(tests.read_text())["tests"] for c in t["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_caddy_accepts_its_file(tmp_path: Path) -> None:
    shutil.copy(INFRA / "compose" / "Caddyfile", tmp_path)
    check(
        *(CHECKERS / "usr/bin/caddy", "validate", "--adapter", "caddyfile"),
        *("--config", tmp_path / "Caddyfile"),
        SERVER_NAME="runs.lab.example",
        XDG_DATA_HOME=str(tmp_path),
        XDG_CONFIG_HOME=str(tmp_path),
    )


def test_cloud_init_accepts_the_spot_node() -> None:
    path = INFRA / "cloud" / "spot-node.yaml"
    assert path.read_text().startswith("#cloud-config\n")
    check(
        *(sys.executable, "-m", "check_jsonschema", "--schemafile", CHECKERS / CLOUD_SCHEMA),
        path,
    )


@pytest.mark.parametrize(
    "unit", sorted((INFRA / "systemd").glob("*.service")), ids=lambda p: p.stem
)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    # Only the path of the programs is not that of this machine.
    text = unit.read_text().replace("/shared/holdfast/bin", str(PROGRAMS))
    own = tmp_path / unit.name
    own.write_text(text)
    assert "Unknown" not in check("systemd-analyze", "verify", own)


@pytest.mark.parametrize(
    ("name", "exposure_max"), [("serve", 50), ("prefect", 50), ("supervise", 90), ("worker", 90)]
)
def test_units_restart_for_ever_wait_for_mounts_and_are_sandboxed(
    name: str, exposure_max: int, tmp_path: Path
) -> None:
    unit = INFRA / "systemd" / f"holdfast-{name}.service"
    text = unit.read_text()
    head, _, service = text.partition("[Service]")
    assert "\nStartLimitIntervalSec=0\n" in head, "it is a setting of [Unit]"
    (mounts,) = re.findall(r"^RequiresMountsFor=(.+)$", head, re.M)
    (program,) = re.findall(r"^ExecStart=(\S+)", service, re.M)
    assert any(program.startswith(f"{one}/") for one in mounts.split())
    assert "\nProtectSystem=" in service
    own = tmp_path / unit.name
    own.write_text(text.replace("/shared/holdfast/bin", str(PROGRAMS)))
    words = ("systemd-analyze", "security", "--offline=true", "--no-pager")
    check(*words, f"--threshold={exposure_max}", own)
