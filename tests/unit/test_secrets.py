"""Secret references: which are accepted, where values come from, and who may read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ForeignFileError, PreflightError, SecretError, SpecError
from holdfast.contracts.redaction import places_of_secrets, redact, secrets_of
from holdfast.contracts.spec import secrets
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.parameters import load_spec
from holdfast.flows.start import flow_parameters
from holdfast.flows.supervisor import secrets as submitted
from holdfast.workers.runs.provenance import take_provenance
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import attach_or_create, read_record

VALUE: Final = "Zq8vR3mK1xWn"
NOT_ROOT: Final = 65534


def spec_of(environment: dict[str, Any], **keys: Any) -> RunSpec:
    return RunSpec(name="r", command=("t.py",), environment=environment, **keys)


def run_of(root: Path, environment: dict[str, Any]) -> RunPaths:
    return attach_or_create(spec_of(environment), root, created_by="tests")[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"from_file": "/a", "from_env": "A"}, "exactly one"),
        ({}, "exactly one"),
        ({"value": VALUE}, "unknown key value"),
        ({"from_file": "relative"}, "from_file is not an absolute path"),
        ({"from_file": "/a\nb"}, "from_file is not an absolute path"),
        ({"from_file": ""}, "from_file is not"),
        ({"from_file": 3}, "from_file is not"),
        ({"from_env": "A B"}, "from_env is not the name of a variable"),
        ({"from_env": f"{VALUE}=="}, "from_env is not the name of a variable"),
        ({"prefect_secret": "a/b"}, "prefect_secret is not the name of a block"),
        ([VALUE], "type list"),
        (4, "type int"),
    ],
)
def test_an_invalid_reference_is_refused_without_showing_its_value(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        load_spec({"name": "r", "command": ["t.py"], "environment": {"TOKEN": given}})
    assert "environment.TOKEN" in str(caught.value)
    assert VALUE not in str(caught.value)


def test_a_spec_keeps_references_as_they_were_given() -> None:
    given = {
        "A": {"from_file": "~/.token"},
        "B": {"from_env": "B"},
        "C": {"prefect_secret": "block"},
        "D": "plain",
    }
    spec = spec_of(given)
    assert spec.model_dump(mode="json")["environment"] == given
    assert spec.given["environment"] == given
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.digest != spec_of({**given, "B": {"from_env": "OTHER"}}).digest
    assert secrets_of(spec.model_dump(mode="json")) == ()
    assert redact(spec.model_dump(mode="json"))["environment"] == given
    again = load_spec(
        {"name": "r", "command": ["t.py"]}, ["environment.A={from_env='X'}", "environment.B=4"]
    )
    assert again.model_dump(mode="json")["environment"] == {"A": {"from_env": "X"}, "B": "4"}


def test_digests_depend_on_the_reference_and_not_on_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of({"TOKEN": {"from_env": "TESTS_TOKEN"}})
    found = []
    for value in (VALUE, "another"):
        monkeypatch.setenv("TESTS_TOKEN", value)
        found.append((spec.digest, take_provenance(spec, tmp_path).environment_digest))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (f"{VALUE}\n", VALUE),
        (f"{VALUE}\r\n", VALUE),
        (f"{VALUE}\n\n", f"{VALUE}\n"),
        ("one\ntwo\n", "one\ntwo"),
        ("é\n", "é"),
    ],
)
def test_a_file_gives_its_value_without_the_last_newline(
    tmp_path: Path, content: str, value: str
) -> None:
    path = private_file(tmp_path, content.encode())
    assert secrets.read_secret_file(str(path)) == value
    link = tmp_path / "link"
    link.symlink_to(path)
    assert secrets.read_secret_file(str(link)) == value


def private_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (VALUE.encode() + b"\0x", "NUL"),
        (VALUE.encode() * 6000, "expected at most 65536"),
    ],
)
def test_a_value_that_a_variable_cannot_have_is_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    with pytest.raises(SecretError, match=words) as caught:
        secrets.read_secret_file(str(private_file(tmp_path, content)))
    assert VALUE not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_file_that_others_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    path = private_file(tmp_path, VALUE.encode(), mode)
    with pytest.raises(SecretError, match=r"chmod 600") as caught:
        secrets.read_secret_file(str(path))
    assert VALUE not in str(caught.value)


@pytest.mark.root
def test_a_file_of_another_user_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    path = private_file(tmp_path, VALUE.encode())
    os.chown(path, NOT_ROOT, -1)
    with pytest.raises(SecretError, match=f"belongs to user {NOT_ROOT}"):
        secrets.read_secret_file(str(path))
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    for place in (tmp_path, pipe):
        with pytest.raises(SecretError, match="regular file"):
            secrets.read_secret_file(str(place))
    for place in (circle, tmp_path / "absent"):
        with pytest.raises(SecretError, match="cannot be read here"):
            secrets.read_secret_file(str(place))


def test_the_record_is_private_and_each_value_belongs_to_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_TOKEN", VALUE)
    environment = {"TOKEN": {"from_env": "TESTS_TOKEN"}, "PLAIN": "p"}
    run = run_of(tmp_path, environment)
    spec = spec_of(environment)
    old = os.umask(0)
    try:
        submitted.record(run, refresh=False)
    finally:
        os.umask(old)
    assert run.secrets.stat().st_mode & 0o777 == 0o600
    assert run.private.stat().st_mode & 0o777 == 0o700
    resolved = secrets.resolve_environment(spec.environment, run)
    assert resolved == {"TOKEN": VALUE, "PLAIN": "p"}
    other = spec_of({"TOKEN": {"from_env": "ANOTHER"}})
    with pytest.raises(SecretError, match=r"environment\.TOKEN .*was not recorded"):
        secrets.resolve_environment(other.environment, run)
    run.secrets.chmod(0o644)
    with pytest.raises(SecretError, match="mode 0644"):
        secrets.resolve_environment(spec.environment, run)
    run.secrets.chmod(0o600)
    run.secrets.write_text(f'{{"values": {VALUE}')
    with pytest.raises(SecretError, match="damaged") as caught:
        secrets.resolve_environment(spec.environment, run)
    assert VALUE not in str(caught.value)


@pytest.mark.root
def test_secrets_are_not_written_through_a_link_or_into_a_foreign_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_TOKEN", VALUE)
    run = run_of(tmp_path / "root", {"TOKEN": {"from_env": "TESTS_TOKEN"}})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    run.private.symlink_to(elsewhere)
    with pytest.raises(SecretError, match="a link"):
        submitted.record(run, refresh=True)
    with pytest.raises(ForeignFileError, match="a link"):
        secrets.write_record(run, {}, {})
    run.private.unlink()
    run.private.mkdir()
    os.chown(run.private, NOT_ROOT, -1)
    with pytest.raises(SecretError, match=f"belongs to user {NOT_ROOT}"):
        submitted.record(run, refresh=True)
    assert list(elsewhere.iterdir()) == list(run.private.iterdir()) == []


def test_a_later_submission_replaces_the_value_and_a_supervisor_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, {"TOKEN": {"from_env": "TESTS_TOKEN"}})
    spec = spec_of({"TOKEN": {"from_env": "TESTS_TOKEN"}})

    def now() -> str:
        return secrets.resolve_environment(spec.environment, run)["TOKEN"]

    monkeypatch.delenv("TESTS_TOKEN", raising=False)
    with pytest.raises(SecretError, match=r"environment\.TOKEN .*TESTS_TOKEN is not set"):
        submitted.record(run, refresh=True)
    monkeypatch.setenv("TESTS_TOKEN", "")
    with pytest.raises(SecretError, match="is empty"):
        submitted.record(run, refresh=True)
    monkeypatch.setenv("TESTS_TOKEN", "first-value")
    submitted.record(run, refresh=False)
    monkeypatch.setenv("TESTS_TOKEN", "second-value")
    submitted.record(run, refresh=False)
    assert now() == "first-value"
    submitted.record(run, refresh=True)
    assert now() == "second-value"
    monkeypatch.delenv("TESTS_TOKEN")
    submitted.record(run, refresh=True)
    assert now() == "second-value"
    assert submitted.require(spec, run) == []
    with pytest.raises(PreflightError, match=r"secrets have no value. Nothing was queued"):
        submitted.require(spec)


def test_recorded_secrets_are_deleted_when_the_run_has_ended(tmp_path: Path) -> None:
    environment = {"TOKEN": {"from_env": "TESTS_TOKEN"}}
    folder = RunFolder(tmp_path, "r", "a" * 32, {"environment": environment})
    references = secrets.references_in(folder.spec.environment)
    secrets.write_record(folder.paths, references, {"TOKEN": VALUE})
    (folder.paths.private / ".secrets.json.0a1b2c").write_text(VALUE)
    reconcile(folder.paths)
    assert folder.paths.secrets.exists()
    folder.tell("cli", EventKind.OPERATOR_REQUEST, action="cancel", by="t", after_attempt=0)
    reconcile(folder.paths)
    assert not folder.paths.private.exists()
    # A relaunch that was requested meanwhile keeps its recorded values.
    folder.tell("cli", EventKind.OPERATOR_REQUEST, action="relaunch", by="t", after_attempt=0)
    secrets.write_record(folder.paths, references, {"TOKEN": VALUE})
    submitted.forget(folder.paths)
    assert folder.paths.secrets.exists()


def test_only_the_secrets_file_contains_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_TOKEN", VALUE)
    environment = {"TOKEN": {"from_env": "TESTS_TOKEN"}}
    run = run_of(tmp_path, environment)
    submitted.record(run, refresh=True)
    request = build_request(read_record(run), spec_of(environment), attempt=1, gpus=1, reason="x")
    assert request.model_dump(mode="json")["environment"] == environment
    assert json.loads(json.dumps(flow_parameters(run)))["spec"]["environment"] == environment
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and VALUE.encode() in p.read_bytes()]
    assert holders == [run.secrets]


@pytest.mark.root
def test_values_are_masked_only_for_the_owner_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private_file(tmp_path, VALUE.encode())
    monkeypatch.setenv("TESTS_SHORT", "five5")
    environment = {"T": {"from_file": str(path)}, "S": {"from_env": "TESTS_SHORT"}}
    run = run_of(tmp_path / "root", environment)
    document = read_record(run).spec
    assert secrets.known_secrets(document, run) == (VALUE,)
    # Another user's spec could name files of the reader, and masks would reveal their contents.
    os.chown(run.directory, NOT_ROOT, -1)
    assert secrets.known_secrets(document, run) == ()


def test_a_plain_secret_in_a_spec_is_warned_about_without_its_value() -> None:
    spec = spec_of(
        {"HF_TOKEN": VALUE, "URL": f"postgresql://u:{VALUE}@h/d", "SHORT_TOKEN": "abc", "A": "b"},
        launch={"setup": (f"export WANDB_API_KEY={VALUE}",)},
        config={"data": {"password": VALUE}, "tokenizer": "gpt2-large"},
    )
    places = ("environment.HF_TOKEN", "environment.URL", "config.data.password", "launch.setup")
    assert set(places_of_secrets(spec.given)) == set(places)
    warnings = submitted.plain_secret_warnings(spec)
    assert len(warnings) == len(places)
    assert all("looks like a secret in plain text" in line for line in warnings)
    assert all("from_file" in line and "from_env" in line for line in warnings)
    assert VALUE not in "".join(warnings)


def test_references_are_checked_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESTS_TOKEN", raising=False)
    absent = {"from_file": str(tmp_path / "absent")}
    spec = spec_of({"A": absent, "B": {"from_env": "TESTS_TOKEN"}, "C": {"prefect_secret": "c"}})
    monkeypatch.setattr("holdfast.flows.deployments.api_url", lambda: None)
    with pytest.raises(PreflightError) as caught:
        submitted.require(spec)
    assert [line.split(" ")[0] for line in caught.value.problems] == [
        "environment.A",
        "environment.B",
        "environment.C",
    ]
    # A node of a cluster may have a file that this machine does not.
    elsewhere = spec_of({"A": absent}, resources={"executor": "slurm"})
    (warning,) = submitted.require(elsewhere)
    assert "the node must be able to read it" in warning


def test_an_invalid_variable_name_with_a_reference_is_refused() -> None:
    with pytest.raises(ValidationError, match="OMP_NUM_THREADS"):
        spec_of({"A B": {"from_env": "A"}})
