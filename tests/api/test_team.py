"""A team's server: PostgreSQL, https and tokens; the database goes down and comes back."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trustme
from tests.api.conftest import WAIT_S, wait_for
from tests.process.local_command import Local
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.runs import RunFolder, build_sample_runs

from holdfast.lineage.database.schema_changes import upgrade

LOG: Final = "serve.log"
SERVING: Final = re.compile(r"serving (https://\S+)/")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def database() -> Iterator[tuple[PostgresServer, str]]:
    with postgres_server() as server, server.database() as url:
        upgrade(url)
        try:
            yield server, url
        finally:
            # Only a running server can drop the database.
            server.stop()
            server.start()


@pytest.fixture
def local(tmp_path: Path, database: tuple[PostgresServer, str]) -> Local:
    made = Local(tmp_path)
    made.environment["HOLDFAST_DATABASE_URL"] = database[1]
    return made


@pytest.fixture
def api(tmp_path: Path, local: Local) -> Iterator[httpx.Client]:
    """An operator's client of `holdfast serve`; it trusts the server's certificate."""
    token = local.json("token", "add", "ann", "--role", "operator")["token"]
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in own.cert_chain_pems:
        part.write_to_path(tmp_path / "certificate.pem", append=True)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--port", "0"]
    command += ["--key", str(tmp_path / "key.pem")]
    command += ["--certificate", str(tmp_path / "certificate.pem")]
    log = tmp_path / LOG
    with open(log, "wb") as stream:
        server = subprocess.Popen(command, env=local.environment, stderr=stream)
    try:
        wait_for(lambda: SERVING.search(log.read_text()))
        url = SERVING.findall(log.read_text())[0]
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, verify=trusted, headers=headers, timeout=WAIT_S) as client:
            yield client
    finally:
        server.terminate()
        server.wait(WAIT_S)


def listed(api: httpx.Client, run: RunFolder) -> list[dict[str, Any]]:
    answer = api.get(f"/api/v1/runs/{run.uid}/checkpoints")
    rows: list[dict[str, Any]] = answer.json().get("items", []) if answer.is_success else []
    return rows


@pytest.mark.more
def test_server_survives_a_database_outage(
    local: Local, database: tuple[PostgresServer, str], api: httpx.Client, tmp_path: Path
) -> None:
    server, _ = database
    *_, fork = build_sample_runs(local.root)
    wait_for(lambda: listed(api, fork))
    known = len(listed(api, fork))
    assert api.get("/api/v1/runs", headers={"Authorization": "Bearer no"}).status_code == 401
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{api.base_url}/healthz".replace("https", "http"), timeout=WAIT_S)

    server.stop()
    wait_for(lambda: api.get("/healthz").status_code == 503)
    refused = api.get("/api/v1/runs")
    assert (refused.status_code, refused.json()["code"]) == (503, "database_away")
    assert "Retry-After" in refused.headers
    wait_for(lambda: "\ndatabase: " in (tmp_path / LOG).read_text())
    name = fork.commit(160, 1, parent="gpt-b:step-00000150.a0001.l01", at=time.time())

    assert server.start()
    wait_for(lambda: len(listed(api, fork)) == known + 1)
    assert api.get(f"/api/v1/checkpoints/{fork.uid}:{name}").json()["step"] == 160
    wait_for(lambda: api.get("/healthz").status_code == 200)
    wait_for(lambda: "\ndatabase: works again" in (tmp_path / LOG).read_text())
    assert (tmp_path / LOG).read_text().count("\ndatabase: ") == 2
