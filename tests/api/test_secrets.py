"""Secret references over the API: shown as written, values masked, checked before a relaunch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api.conftest import Served, wait_for
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind

VALUE = "Zq8vR3mK1xWn"
VARIABLE = "TESTS_API_TOKEN"


@pytest.fixture
def run(served: Served, tmp_path: Path) -> RunFolder:
    """A cancelled run with two references and output that contains the value of one."""
    token = tmp_path / "token"
    token.write_text(f"{VALUE}\n")
    token.chmod(0o600)
    environment = {"TOKEN": {"from_file": str(token)}, "OTHER": {"from_env": VARIABLE}}
    made = RunFolder(served.root, "referring", "9" * 32, {"environment": environment})
    log = made.submit(1, 1, made.created_at).rank_log(0, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"the value is <{VALUE}>\n")
    made.tell(
        "flow", EventKind.ATTEMPT_ENDED, attempt=1, state="cancelled", cause="operator", evidence=[]
    )
    made.tell("cli", EventKind.OPERATOR_REQUEST, action="cancel", by="t", after_attempt=1)
    served.services.watch.touch(made.paths)
    wait_for(lambda: served.services.store.count_runs().get("cancelled", 0) >= 1)
    return made


def test_secret_references_are_shown_and_their_values_are_masked(
    served: Served, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with served.client() as api:
        shown = api.get("/api/v1/runs/referring").json()
        assert shown["spec"]["environment"]["OTHER"] == {"from_env": VARIABLE}
        told = api.get("/api/v1/runs/referring/logs/0").json()["text"]
        assert told == f"the value is <{'*' * len(VALUE)}>\n"
        refused = api.post("/api/v1/runs/referring/relaunch", json={})
    assert refused.status_code == 422, refused.text
    assert refused.json()["code"] == "preflight"
    assert f"the variable {VARIABLE} is not set here" in refused.json()["message"]
    # No request was recorded: it would stay pending for ever.
    assert f'"{EventKind.OPERATOR_REQUEST}"' not in run.paths.journal_of("api").read_text()
