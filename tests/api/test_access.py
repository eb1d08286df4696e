"""Access control of the API: tokens, sessions, allowed hosts, origins, and masked secrets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, serving, wait_for
from tests.process.test_lineage_ingest import dump
from tests.support.runs import RunFolder
from typer.testing import CliRunner

from holdfast.api.security import AccessPolicy
from holdfast.api.sessions import COOKIE, CSRF_HEADER, TRIES_MAX, LoginThrottle
from holdfast.api.tokens import Role, TokenStore
from holdfast.cli.main import app
from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.errors import NotFoundError, SpecError

PIN = "/api/v1/checkpoints/gpt:step-00000200.a0003.l01/pin"
SECRET = "s3cr3t-value-of-a-token"


@pytest.fixture(scope="module")
def guarded(home: Path, sample_runs: dict[str, RunFolder]) -> Iterator[Served]:
    """A server that accepts requests for a public host name."""
    access_policy = AccessPolicy(hosts=frozenset({"holdfast.example"}))
    with serving(home, sample_runs, access_policy) as one:
        yield one


@pytest.fixture
def tokens(guarded: Served) -> Iterator[dict[str, str]]:
    store = guarded.services.tokens
    made = {str(role): store.add(f"the {role}", role)[1] for role in Role}
    yield made
    for token in list(store.tokens()):
        store.revoke(token.id)


def bearer(guarded: Served, text: str) -> httpx.Client:
    return guarded.stranger(Authorization=f"Bearer {text}")


def test_requests_without_a_token_get_no_data(guarded: Served) -> None:
    with guarded.stranger() as client:
        for path in ("runs", "runs/gpt", "events", "compare?a=a&b=b", "nodes", "storage"):
            assert client.get(f"/api/v1/{path}").status_code == 401, path
        assert client.get("/metrics").status_code == 401
        assert client.post(PIN, json={}).status_code == 401
        assert client.get("/healthz").json()["roots"] == {}
        assert client.get("/api/v1/session").json()["name"] is None
        assert client.get("/").status_code == 200


def test_every_write_route_requires_the_operator_role(
    guarded: Served, tokens: dict[str, str]
) -> None:
    document = guarded.stranger().get("/api/v1/openapi.json").json()
    paths = [path for path, item in document["paths"].items() if "post" in item]
    changes = [path for path in paths if not path.endswith("/session")]
    assert len(changes) >= 10
    names = {"run": "gpt", "checkpoint": "gpt:step-00000200.a0003.l01"}
    with bearer(guarded, tokens["reader"]) as client:
        for path in changes:
            body = {"name": "gpt-c"} if path.endswith("/fork") else {}
            assert client.post(path.format(**names), json=body).status_code == 403, path


def test_health_names_a_root_that_is_not_mounted_to_a_reader(
    guarded: Served, tokens: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "not-mounted"
    monkeypatch.setattr(guarded.services, "roots", (guarded.root, gone))
    with bearer(guarded, tokens["reader"]) as client:
        assert client.get("/healthz").json()["roots"] == {str(guarded.root): True, str(gone): False}


def test_a_revoked_token_is_refused(guarded: Served, tokens: dict[str, str]) -> None:
    with bearer(guarded, tokens["operator"]) as client:
        assert client.get("/api/v1/runs").status_code == 200
        assert client.post(PIN, json={}).status_code == 200
        guarded.services.tokens.revoke("the operator")
        assert client.get("/api/v1/runs").status_code == 401


def test_session_writes_require_the_csrf_token(guarded: Served, tokens: dict[str, str]) -> None:
    with guarded.stranger() as client:
        told = client.post("/api/v1/session", json={"token": tokens["operator"]})
        (cookie,) = [c for c in told.headers.get_list("set-cookie") if c.startswith(COOKIE)]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert client.get("/api/v1/runs").status_code == 200
        assert client.post(PIN, json={}).status_code == 403
        assert client.post(PIN, json={}, headers={CSRF_HEADER: "wrong"}).status_code == 403
        word = client.get("/api/v1/session").json()["csrf"]
        assert client.post(PIN, json={}, headers={CSRF_HEADER: word}).status_code == 200
        assert client.delete("/api/v1/session", headers={CSRF_HEADER: word}).status_code == 204
        assert client.get("/api/v1/runs").status_code == 401


def test_wrong_tokens_are_rate_limited_and_valid_ones_still_work(
    guarded: Served, tokens: dict[str, str]
) -> None:
    guarded.services.login_throttle = LoginThrottle()
    wrong = tokens["reader"][:-4] + "AAAA"
    with guarded.stranger() as client, bearer(guarded, tokens["reader"]) as reader:
        answers = [
            client.post("/api/v1/session", json={"token": wrong}) for _ in range(TRIES_MAX + 1)
        ]
        assert [one.status_code for one in answers] == [401] * TRIES_MAX + [429]
        assert int(answers[-1].headers["retry-after"]) > 0
        # The same address with a valid token, with none, and with a wrong one.
        for path in ("/api/v1/runs", "/metrics"):
            assert reader.get(path).status_code == 200
        assert client.get("/healthz").status_code == 200
        assert client.get("/healthz", headers=header(wrong)).status_code == 200
        assert client.get("/api/v1/runs", headers=header(wrong)).status_code == 429
        right = client.post("/api/v1/session", json={"token": tokens["reader"]})
        assert right.status_code == 200
        assert client.get("/api/v1/runs").status_code == 200
    guarded.services.login_throttle = LoginThrottle()
    guarded.services.session_audit.flush()
    lines, _ = read_journal(guarded.home / "journal" / "api.jsonl")
    refused = [line.data for line in lines if "refused" in line.data["outcome"]]
    assert sum(one.get("count", 1) for one in refused) > TRIES_MAX


def header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_only_a_page_with_a_session_asks_for_the_first_rows_early(served: Served) -> None:
    with served.stranger() as client:
        assert "link" not in client.get("/").headers
        client.get(f"/?token={served.token}")
        link = client.get("/").headers["link"]
        address = link.partition("<")[2].partition(">")[0]
        assert client.get(address).json()["items"]
        assert "link" not in client.get("/?state=failed").headers
        assert "link" not in client.get("/queue").headers


@pytest.mark.parametrize("view", ["", "/lineage"])
def test_a_page_of_a_run_asks_for_its_data_early(served: Served, view: str) -> None:
    with served.stranger() as client:
        assert "link" not in client.get(f"/runs/gpt{view}").headers
        client.get(f"/?token={served.token}")
        links = client.get(f"/runs/gpt{view}").headers["link"].split(", ")
        assert len(links) == 2
        for link in links:
            assert client.get(link.partition("<")[2].partition(">")[0]).status_code == 200


def test_printed_url_starts_a_session_and_redirects_without_the_token(served: Served) -> None:
    served.services.login_throttle = LoginThrottle()
    with served.stranger() as client:
        answer = client.get("/", params={"token": served.token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        (cookie,) = answer.headers.get_list("set-cookie")
        assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
        assert served.token not in cookie
        assert client.get("/api/v1/session").json()["role"] == "operator"
    with served.stranger() as client:
        answer = client.get("/", params={"token": "hold_wrong"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/?refused=401")
        assert "set-cookie" not in answer.headers
        assert client.get("/api/v1/runs").status_code == 401


def test_forwarded_headers_count_only_from_a_trusted_proxy(
    home: Path, sample_runs: dict[str, RunFolder]
) -> None:
    told = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
    trusted: dict[str, Any] = {"proxy_headers": True, "forwarded_allow_ips": ["127.0.0.1"]}
    for options, address, is_secure in ((trusted, "203.0.113.9", True), ({}, "127.0.0.1", False)):
        with serving(home, sample_runs, **options) as one, one.stranger(**told) as client:
            answer = client.post("/api/v1/session", json={"token": one.token})
            assert ("Secure" in answer.headers["set-cookie"].split("; ")) is is_secure
            assert client.post("/api/v1/session", json={"token": "no"}).status_code == 401
            assert one.services.login_throttle.addresses() == {address}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "[::1].evil.example"}, 421),
        ({"Host": "[::1]evil.example:80"}, 421),
        ({"Host": "[::1]:80.evil.example"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Origin": "https://evil.example:1", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Origin": "https://127.0.0.1:8443"}, 403),
        ({"Origin": "https://127.0.0.1:8443", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_cross_site_writes_are_refused_even_with_a_token(
    served: Served, headers: dict[str, str], status: int
) -> None:
    with served.client() as client:
        answer = client.post(PIN, content=b"{}", headers={**JSON, **headers})
        assert answer.status_code == status
        assert client.post(PIN, content=b"{}", headers=JSON).status_code == 200


def test_a_page_behind_a_proxy_on_another_port_may_write(served: Served) -> None:
    # nginx's `proxy_set_header Host $host` leaves out the port that the browser used.
    browser = {"Origin": "https://127.0.0.1:8443", "Sec-Fetch-Site": "same-origin"}
    with served.client() as client:
        for host in ("127.0.0.1", "127.0.0.1:8443"):
            headers = {**JSON, **browser, "Host": host}
            assert client.post(PIN, content=b"{}", headers=headers).status_code == 200


JSON = {"Content-Type": "application/json"}


def test_every_response_has_security_headers(served: Served) -> None:
    with served.client() as client:
        for path in ("/", "/api/v1/runs", "/api/v1/runs/nix", "/assets/nix.js"):
            headers = client.get(path).headers
            assert "script-src 'self';" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        refused = client.get("/api/v1/runs", headers={"Host": "evil.example"})
        assert refused.headers["x-frame-options"] == "DENY"
        large = client.post(PIN, content=b" " * 100_000, headers=JSON)
        assert large.status_code == 413


def test_secrets_of_a_spec_never_appear_in_responses_or_the_index(served: Served) -> None:
    run = RunFolder(
        served.root,
        "hidden",
        "c" * 32,
        {
            "environment": {"HF_TOKEN": SECRET, "MODE": "fast"},
            "config": {"store": f"postgresql://user:{SECRET}@db/runs"},
            "launch": {"setup": [f"export MYSQL_PWD={SECRET[::-1]}"]},
        },
    )
    attempt = run.submit(1, 1, run.created_at)
    log = attempt.rank_log(0, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"using {SECRET} and --api-key {SECRET[::-1]}\n")
    run.tell("flow", EventKind.NOTE, text=f"it said {SECRET}")
    name = run.commit(10, 1)
    served.services.watch.touch(run.paths)
    other = "gpt:step-00000200.a0003.l01"
    with served.client() as client:
        wait_for(lambda: client.get(f"/api/v1/checkpoints/hidden:{name}").status_code == 200)
        told = [
            client.get(f"/api/v1/{what}").text
            for what in (
                *("runs/hidden", "runs/hidden/events", "runs/hidden/attempts", "runs"),
                *("runs/hidden/logs/0", "runs/hidden/lineage", "runs/hidden/openlineage"),
                *(f"compare?a=hidden:{name}&b={other}", f"compare?b=hidden:{name}&a={other}"),
                *("runs/hidden/storage", f"checkpoints/hidden:{name}"),
                f"runs/hidden/log-files/download?file={log.relative_to(run.paths.directory)}",
            )
        ]
        size = log.stat().st_size
        path = "/api/v1/runs/hidden/logs/0"
        for limit in (1, 8, 13):
            parts = [
                client.get(path, params={"offset": at, "limit": limit}).json()["text"]
                for at in range(0, size, limit)
            ]
            told.append("".join(parts))
            assert len(told[-1]) >= size
    told.append(json.dumps(dump(served.services.store.index.open()), default=str))
    assert "fast" in told[0]
    assert "using" in told[4]
    for text in told:
        assert SECRET not in text
        assert SECRET[::-1] not in text


def test_tokens_are_stored_as_digests_readable_by_the_owner_only(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    token, text = store.add("ci", Role.READER)
    assert text.rpartition("_")[2] not in store.path.read_text()
    assert store.path.stat().st_mode & 0o077 == 0
    for _ in range(2):
        found = TokenStore(store.path).check(text)
        assert found == token
    assert store.check(text[:-1]) is None
    with pytest.raises(SpecError, match=r"a token named .* exists already; choose another name"):
        store.add("ci", Role.READER)
    store.revoke(token.id)
    assert store.check(text) is None
    with pytest.raises(NotFoundError, match="no token"):
        store.revoke("ci")


def test_an_expired_token_is_refused_and_its_name_is_free(guarded: Served) -> None:
    store = guarded.services.tokens
    _, text = store.add("short", Role.OPERATOR, expires_at=time.time() + 3)
    with bearer(guarded, text) as client:
        assert client.get("/api/v1/runs").status_code == 200
        started = client.post("/api/v1/session", json={"token": text})
        assert started.status_code == 200
    with guarded.stranger() as client:
        client.cookies.update(started.cookies)
        assert client.get("/api/v1/session").json()["name"] == "short"
        wait_for(lambda: client.get("/api/v1/session").json()["name"] is None)
    with bearer(guarded, text) as client:
        assert client.get("/api/v1/runs").status_code == 401
    again, _ = store.add("short", Role.READER)
    assert [one.id for one in store.tokens() if one.name == "short"] == [again.id]
    store.revoke("short")


def test_serving_beyond_loopback_requires_a_token_from_the_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    call = CliRunner().invoke
    refused = call(app, ["serve", "--host", "0.0.0.0", "--port", "0"])
    assert "from other machines, and there is no token yet" in str(refused.exception)
    assert "holdfast token add" in str(refused.exception)
    told = json.loads(call(app, ["token", "add", "ci", "--role", "operator", "--json"]).stdout)
    checked = TokenStore().check(told["token"])
    assert checked is not None
    assert checked.role is Role.OPERATOR
    listed = call(app, ["token", "list", "--json"]).stdout
    assert [one["name"] for one in json.loads(listed)] == ["ci"]
    assert told["token"] not in listed
    assert "expected reader or operator" in str(
        call(app, ["token", "add", "me", "--role", "root"]).exception
    )
    assert call(app, ["token", "revoke", "ci"]).exit_code == 0
    assert TokenStore().check(told["token"]) is None


def test_audit_events_record_each_action_outcome_and_user(served: Served) -> None:
    with served.client() as client:
        client.post(PIN, json={"note": "for the paper"})
        client.post(PIN.replace("/pin", "/unpin"), json={})
        client.post(PIN.replace("/pin", "/unpin"), json={})
    lines, _ = read_journal(served.runs["gpt"].paths.journal_of("api"))
    audits: list[dict[str, Any]] = [one.data for one in lines if one.kind is EventKind.AUDIT]
    assert [one["action"] for one in audits[-3:]] == ["pin", "unpin", "unpin"]
    assert [one["outcome"][:7] for one in audits[-3:]] == ["done", "done", "refused"]
    assert {one["by"] for one in audits[-3:]} == {"ann"}
    assert "127.0.0.1" in json.dumps(audits)
