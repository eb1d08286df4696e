"""A default is never passed on as if somebody had written it."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.cli_calls import Call
from tests.support.histories import record_of, spec_of

from holdfast import trainer
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.errors import RunConflictError, SpecError
from holdfast.contracts.records.documents import Request, RunRecord
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.part import RECORDED
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.written import OF_PROGRAM
from holdfast.flows import forks
from holdfast.flows.parameters import load_spec
from holdfast.flows.start import flow_parameters
from holdfast.flows.supervisor import carry
from holdfast.trainer.config import config
from holdfast.trainer.frameworks.torchtitan import settings as of_torchtitan
from holdfast.trainer.session.settings import Settings
from holdfast.workers.agent.launch.command import build_environment
from holdfast.workers.runs import run_folders
from holdfast.workers.runs.request import build_request

PLAIN = {"name": "r", "command": ["t.py"]}
OTHER = {"checkpoint": {"keep": {"last": 3}}, "supervision": {"grace_s": 60.0}}
VALUES = ("HOLDFAST_CHECKPOINT_INTERVAL", "HOLDFAST_CHECKPOINT_SNAPSHOTS")


def environment_of(request: Request, inherited: dict[str, str] | None = None) -> dict[str, str]:
    context: Any = SimpleNamespace(
        request=request, run=SimpleNamespace(directory=Path("/r")), node=0, nodes=1
    )
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    given = {name: str(value) for name, value in request.environment.items()}
    return build_environment(context, 1, handles, inherited or {}, given)


def passed(record: RunRecord, spec: RunSpec, *, says: bool = True) -> Any:
    """What ranks get of the interval and the snapshots, by way of `request.json`."""
    request = build_request(record, spec, attempt=1, gpus=spec.gpus, reason="x")
    document = json.loads(request.model_dump_json())
    if not says:
        # Requests of older versions have no sources.
        del document["sources"]
    found = environment_of(Request.model_validate(document, context=RECORDED))
    sources = json.loads(found["HOLDFAST_SOURCES"])
    keys = [key for key, name in OF_PROGRAM.items() if name in found]
    return {key: (found[OF_PROGRAM[key]], sources[key]) for key in keys}


def test_only_written_values_reach_the_ranks_on_every_way(tmp_path: Path) -> None:
    written = {"checkpoint": {"interval": "auto", "snapshots": 5}}
    both = {"checkpoint.interval": ("auto", "--set"), "checkpoint.snapshots": ("5", "spec")}
    for given, overrides, expected in (
        ({**PLAIN, **OTHER}, [], {}),
        ({**PLAIN, **written}, ["checkpoint.interval=auto"], both),
    ):
        root = tmp_path / str(len(expected))
        spec = load_spec(given, overrides, base=tmp_path)
        paths = run_folders.create_run(spec, root, created_by="t")
        record = run_folders.read_record(paths)
        assert passed(record, spec) == expected, "as it was submitted"
        assert passed(record, record.read_spec()) == expected, "a relaunch reads the record"
        parameters = json.loads(json.dumps(flow_parameters(paths)))
        flow = carry.given_spec(parameters["spec"], (), root, paths.name)
        assert passed(record, flow) == expected, "a flow run gets it as a parameter"
        # A flow run that an older version made has the spec with its defaults.
        assert passed(record, carry.given_spec(record.spec, (), root, paths.name)) == expected
        fork = forks._spec_of_fork(paths, "f", [], None)
        assert passed(record, fork) == expected, "a fork has what its parent's user wrote"
        assert fork.given == {**spec.given, "name": "f"}
        changed = forks._spec_of_fork(paths, "f", ["checkpoint.interval=7"], None)
        assert passed(record, changed)["checkpoint.interval"] == ("7", "--set")


def test_documents_of_older_versions_take_a_default_as_not_written() -> None:
    plain, spec = spec_of(**OTHER), spec_of(checkpoint={"interval": 7})
    for one, expected in ((plain, {}), (spec, {"checkpoint.interval": ("7", "spec")})):
        record = record_of(one)
        assert record.given is None
        assert passed(record, record.read_spec()) == expected
        assert passed(record, one, says=False) == expected
        assert record.read_spec() == one, "the values are the recorded ones"


def test_a_spec_that_now_has_a_key_of_the_program_is_another_spec(tmp_path: Path) -> None:
    plain = load_spec(PLAIN, base=tmp_path)
    paths, _ = run_folders.attach_or_create(plain, tmp_path / "root", created_by="t")
    edited = load_spec({**PLAIN, "checkpoint": {"interval": "auto"}}, base=tmp_path)
    assert edited.digest == plain.digest
    with pytest.raises(RunConflictError, match=r"only one of them has checkpoint\.interval"):
        run_folders.attach_or_create(edited, tmp_path / "root", created_by="t")
    assert run_folders.attach_or_create(plain, tmp_path / "root", created_by="t") == (paths, False)


@pytest.mark.parametrize(
    ("variables", "argument", "steps", "source", "warns"),
    [
        ({}, None, None, "default", False),
        ({}, 20, 20, "program", False),
        ({VALUES[0]: "7"}, None, 7, "environment", False),
        ({VALUES[0]: "7"}, 20, 7, "environment", True),
        ({VALUES[0]: "7", "HOLDFAST_RUN_DIR": "/r"}, 20, 7, "spec", True),
        ({VALUES[0]: "20", "HOLDFAST_RUN_DIR": "/r"}, 20, 20, "spec", False),
        (
            {VALUES[0]: "7", "HOLDFAST_SOURCES": '{"checkpoint.interval": "--set"}'},
            20,
            7,
            "--set",
            True,
        ),
    ],
)
def test_the_trainer_says_which_value_counts(
    variables: dict[str, str],
    argument: int | None,
    steps: int | None,
    source: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in (*VALUES, "HOLDFAST_SOURCES", "HOLDFAST_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, events = Settings.of(argument, None), []
    assert found.interval.steps == steps
    found.announce(lambda *kind, **data: events.append(data), 0)
    said = capfd.readouterr().out
    assert f"checkpoint.interval = {steps or 'auto'} ({source})" in said
    lost = f"= 7 ({source}) counts, and not 20 (program)"
    assert (lost in said) == (lost in str(events[1:])) == warns
    assert events[0]["settings"]["checkpoint.interval"] == {
        "value": steps or "auto",
        "source": source,
    }
    found.announce(lambda *kind, **data: events.append(data), 1)
    assert capfd.readouterr().out == "", "only rank 0 says it"


@pytest.mark.parametrize("staging", ["single", "disk"])
def test_a_program_that_saves_memory_is_refused_where_neighbours_hold_copies(
    staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4}
    for neighbour in (False, True):
        spec = spec_of(resources=two, checkpoint={"neighbour": neighbour})
        request = build_request(record_of(spec), spec, attempt=1, gpus=spec.gpus, reason="x")
        for name, value in environment_of(request).items():
            if name.startswith("HOLDFAST_CHECKPOINT_"):
                monkeypatch.setenv(name, value)
        if not neighbour:
            assert Settings.of(None, None, staging=staging).staging.mode == staging
    assert Settings.of(None, None, staging="memory").staging.slots == 2
    given = rf"checkpoint\.staging is '{staging}' \(program\), .* is true: expected 'memory'"
    with pytest.raises(SpecError, match=given):
        Settings.of(None, None, staging=staging)


@pytest.mark.parametrize("staging", ["memory", "single", "disk"])
def test_a_staging_directory_that_is_not_used_is_stated(
    staging: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOLDFAST_SOURCES", "HOLDFAST_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_STAGING_DIRECTORY", "/scratch")
    Settings.of(None, None, staging=staging).announce(lambda *_, **__: None, 0)
    warning = f"(environment) is not used, because checkpoint.staging is {staging!r}"
    assert (warning in capfd.readouterr().out) is (staging != "disk")


def test_numbers_of_numpy_are_recorded_as_numbers() -> None:
    """A line of the journal that JSON cannot have would be lost."""
    found, events = Settings.of(np.int64(20), np.int64(7)), []  # type: ignore[arg-type]
    found.announce(lambda *kind, **data: events.append(json.loads(json.dumps(data))), 0)
    recorded = events[0]["settings"]
    assert [recorded[f"checkpoint.{key}"]["value"] for key in ("interval", "snapshots")] == [20, 7]
    assert found.interval.steps == 20


def test_a_session_without_snapshots_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VALUES[1], "5")
    Settings.without_snapshots(None, "DeepSpeed").announce(lambda *_, **__: None, 0)
    assert "checkpoint.snapshots = off (DeepSpeed) counts, and not 5" in capfd.readouterr().out


@pytest.mark.more
def test_no_signature_in_the_trainer_writes_a_default() -> None:
    names = {key.rpartition(".")[2] for key in OF_PROGRAM}
    found = []
    for path in Path(trainer.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                found += [
                    (f"{path.name}: {node.name}({one.arg})", ast.unparse(value))
                    for one, value in given
                    if one.arg in names and value is not None
                ]
    assert len(found) >= 6, "Session, FileSession, DeepSpeedSession and Lightning's callback"
    assert [one for one in found if one[1] != "None"] == []


def test_the_interval_of_torchtitan_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import dataclass

    @dataclass
    class Config:
        interval: int = 500

    for name in (*VALUES, "HOLDFAST_SOURCES", "HOLDFAST_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    for config_, steps in ((Config(), 500), (Config(10), 10)):
        given = of_torchtitan.given(config_, "interval")
        assert Settings.of(given, None).interval.steps == steps
    monkeypatch.setenv(VALUES[0], "7")
    default, own = (of_torchtitan.given(one, "interval") for one in (Config(), Config(10)))
    assert Settings.of(default, None).chosen[0].warning is None, "nobody wrote the 500"
    assert "and not 10 (Trainer.Config)" in str(Settings.of(own, None).chosen[0].warning)


def test_a_form_does_not_fill_in_what_the_program_can_give() -> None:
    found = Checkpointing.model_json_schema()["properties"]
    assert all("default" not in found[key.rpartition(".")[2]] for key in OF_PROGRAM)
    assert Checkpointing().interval == "auto"


def test_settings_of_a_spec_without_any_do_not_hide_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[config]\nsteps = 4\n")
    request = build_request(record_of(spec_of()), spec_of(), attempt=1, gpus=4, reason="x")
    monkeypatch.setitem(os.environ, "HOLDFAST_CONFIG", environment_of(request)["HOLDFAST_CONFIG"])
    assert config(own) == {"steps": 4}
    assert config() == config(tmp_path / "absent.toml") == {}
    monkeypatch.setenv("HOLDFAST_CONFIG", '{"steps": 5}')
    assert config(own) == {"steps": 5}


def test_written_cores_count_before_the_threads_of_the_shell() -> None:
    shell = {"OMP_NUM_THREADS": "3"}

    def threads(spec: RunSpec, inherited: dict[str, str]) -> str:
        request = build_request(record_of(spec), spec, attempt=1, gpus=4, reason="x")
        return environment_of(request, inherited)["OMP_NUM_THREADS"]

    assert threads(spec_of(), {}) == "1"
    assert threads(spec_of(), shell) == "3"
    cores = spec_of(resources={"gpus_per_node": 4, "cpus_per_gpu": 6})
    assert threads(cores, shell) == "6"
    own = cores.model_copy(update={"environment": {"OMP_NUM_THREADS": "2"}})
    assert threads(own, shell) == "2"


def test_the_dry_run_and_show_name_the_source_of_each_value(call: Call, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    path = tmp_path / "run.toml"
    path.write_text('name = "kelp"\ncommand = ["t.py"]\n[checkpoint]\nsnapshots = "auto"\n')
    dry = call("submit", path, "--dry-run", "--set", "supervision.grace_s=60").json["settings"]
    root = tmp_path / "home" / "runs"
    spec = load_spec(path, ["supervision.grace_s=60"])
    paths = run_folders.create_run(spec, root, created_by="t")
    shown = call("show", "kelp", "--spec", "--json").json["settings"]
    assert shown == dry
    expected = {
        "name": ("kelp", "spec"),
        "supervision.grace_s": (60.0, "--set"),
        "supervision.poll_s": (5.0, "default"),
        "checkpoint.snapshots": ("auto", "spec"),
        "checkpoint.interval": ("auto", "program or default"),
        "launch.working_directory": (str(tmp_path), "default"),
    }
    assert {key: (dry[key]["value"], dry[key]["source"]) for key in expected} == expected
    assert len(dry) > 90
    with JournalWriter(paths.journal_of("rank")) as journal:
        told = {"checkpoint.interval": {"value": 20, "source": "program"}}
        journal.append(EventKind.NOTE, text="x", settings=told)
    text = call("show", "kelp", "--spec").out
    (line,) = [line for line in text.splitlines() if "checkpoint.interval" in line]
    assert line.split()[-2:] == ["20", "program"]
    assert call("show", "kelp", "--spec", "--watch").status == 2
