"""Notifications of a real run by webhook and e-mail, without Prefect."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import RANK_FORKS
from tests.support.receivers import MailServer, Webhook, receiving

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import PreflightError, SpecError
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor import secrets
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs.run_folders import create_run

LOG = logging.getLogger("holdfast.test")


def spec_of(folder: Path, program: str, alerts: dict[str, Any]) -> RunSpec:
    (folder / "program.py").write_text(program)
    spec = {
        "name": "kelp",
        "command": ["program.py"],
        "launch": {"working_directory": str(folder)},
        "environment": {"PYTHONPATH": str(RANK_FORKS)},
        "supervision": {
            "poll_s": 0.2,
            "heartbeat_s": 0.3,
            "restarts_in_place": 0,
            "standby_after_s": "off",
        },
        "alerts": alerts,
    }
    return RunSpec.model_validate(spec)


def test_people_are_told_of_a_failed_run_and_addresses_stay_secret(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, mail = Webhook(failing=2), MailServer()
    address = tmp_path / "mail-address"
    address.touch(mode=0o600)
    with receiving(hook, mail):
        monkeypatch.setenv("TEAM_HOOK", hook.address)
        address.write_text(mail.address)
        targets = {"team": {"from_env": "TEAM_HOOK"}, "mail": {"from_file": str(address)}}
        program = f"raise ValueError('tell nobody {hook.address}')\n"
        spec = spec_of(tmp_path, program, {"targets": targets, "on": ["failed", "decision"]})
        secrets.require(spec)
        paths = create_run(spec, tmp_path / "runs", created_by="tester")
        secrets.record(paths, refresh=True)
        monkeypatch.delenv("TEAM_HOOK")
        history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert history.state is RunState.FAILED
    told = [(one["title"], one["type"]) for one in hook.got]
    assert told == [("kelp: decision", "info")] * 2 + [("kelp: failed", "failure")]
    assert "ValueError" in hook.got[-1]["message"]
    assert "token-of-the-receiver" not in json.dumps(hook.got)
    assert len(mail.got) == 3
    assert "Subject: kelp: failed" in mail.got[-1]
    assert not paths.secrets.exists()
    kept = [paths.spec, paths.attempt(1).request, *paths.deliveries.iterdir()]
    files = b"".join(path.read_bytes() for path in [*kept, *(tmp_path / "home").glob("*.db*")])
    for secret in (hook.address, mail.address):
        assert secret.encode() not in files


@pytest.mark.more
def test_limit_is_told_once_when_it_is_passed(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.flows.supervisor.limits.LOOK_S", 0.1)
    hook = Webhook()
    with receiving(hook):
        monkeypatch.setenv("TEAM_HOOK", hook.address)
        limits = {"gpu_hours_max": 1e-6, "targets": {"team": {"from_env": "TEAM_HOOK"}}}
        spec = spec_of(tmp_path, "import time; time.sleep(3)\n", limits)
        paths = create_run(spec, tmp_path / "runs", created_by="tester")
        secrets.record(paths, refresh=True)
        Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    (line,) = [one.data for one in load_events(paths) if one.kind is EventKind.LIMIT_PASSED]
    assert (line["limit"], line["passed"], line["attempt"]) == ("gpu_hours_max", True, 1)
    assert [(one["title"], one["type"]) for one in hook.got] == [("kelp: limit", "warning")]


@pytest.mark.parametrize("is_set", [False, True])
def test_target_without_a_usable_address_is_refused_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    monkeypatch.delenv("TEAM_HOOK", raising=False)
    if is_set:
        monkeypatch.setenv("TEAM_HOOK", "no-such-service://hidden-part")
    spec = spec_of(tmp_path, "", {"targets": {"team": {"from_env": "TEAM_HOOK"}}})
    with pytest.raises(PreflightError, match=r"alerts\.targets\.team") as refused:
        secrets.require(spec)
    assert ("not an address of Apprise" in str(refused.value)) == is_set
    assert "hidden-part" not in str(refused.value)


def test_address_in_plain_text_is_refused_and_not_repeated() -> None:
    given = {"name": "kelp", "command": ["a.py"], "alerts": {"targets": {"team": "slack://hidden"}}}
    with pytest.raises(SpecError, match="expected a reference to a secret") as refused:
        load_spec(given)
    assert "hidden" not in str(refused.value)
