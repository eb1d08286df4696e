"""HTTP itself: HEAD, conditional requests, encodings, chunked bodies, and the security schemes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import Served, wait_for

from holdfast.api.routes import page
from holdfast.api.routes.checkpoints import export_name
from holdfast.api.schemas import AskExport
from holdfast.api.security import BODY_BYTES_MAX
from holdfast.workers.checkpoints.exports import ExportFormat

LISTED = "/api/v1/runs"


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def test_head_answers_as_get_without_a_body(api: httpx.Client, served: Served) -> None:
    paths = ["/", LISTED, f"{LISTED}/gpt", "/healthz", "/metrics", "/api/v1/openapi.json"]
    for path in paths:
        head, full = api.head(path), api.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == full.headers["content-type"]
        assert "content-length" in head.headers
    assert api.head(f"{LISTED}/nobody").status_code == 404
    assert served.stranger().head(LISTED).status_code == 401
    # The event stream never ends by itself.
    assert api.head("/api/v1/events", timeout=10).status_code == 200
    wait_for(lambda: served.services.hub.readers == 0)


def test_an_asset_is_sent_as_the_build_compressed_it(
    api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, packed = b"let one = 1;\n" * 500, gzip.compress(b"let one = 1;\n" * 500, 9)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "one-1a2b.js").write_bytes(script)
    (tmp_path / "assets" / "one-1a2b.js.gz").write_bytes(packed)
    monkeypatch.setattr(page, "STATIC", tmp_path)
    answer = api.get("/assets/one-1a2b.js")
    assert answer.content == script
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-length"] == str(len(packed))
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["vary"].lower() == "accept-encoding"
    plain = api.get("/assets/one-1a2b.js", headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in plain.headers
    assert plain.content == script
    assert plain.headers["vary"].lower() == "accept-encoding"


def test_an_unchanged_answer_is_not_sent_again(api: httpx.Client) -> None:
    for path in (f"{LISTED}/gpt/checkpoints", "/api/v1/openapi.json", "/"):
        first = api.get(path)
        etag = first.headers["etag"]
        again = api.get(path, headers={"If-None-Match": f'"other", {etag}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
        assert "content-security-policy" in again.headers
        assert api.get(path, headers={"If-None-Match": '"other"'}).content == first.content
    # A 304 is for an answer that there is.
    missing = api.get(f"{LISTED}/nobody", headers={"If-None-Match": "*"})
    assert missing.status_code == 404


@pytest.mark.parametrize("path", [LISTED, "/api/v1/openapi.json", "/"])
@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("br;q=1.0, GZIP;q=0.2", "gzip"),
        ("*", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.0, *", None),
        ("*;q=0", None),
        ("identity", None),
        ("", None),
    ],
)
def test_only_an_accepted_encoding_is_used(
    api: httpx.Client, path: str, accepted: str, encoding: str | None
) -> None:
    answer = api.get(path, headers={"Accept-Encoding": accepted})
    assert answer.status_code == 200
    is_long = len(answer.content) >= 1000
    assert answer.headers.get("content-encoding") == (encoding if is_long else None)
    assert is_long or path == "/"


def test_a_chunked_body_has_the_limit_of_any_other(api: httpx.Client) -> None:
    def body(size: int) -> Iterator[bytes]:
        yield b'{"note": "'
        for _ in range(size // 1024):
            yield b"x" * 1024
        yield b'"}'

    path, headers = f"{LISTED}/gpt/stop", {"Content-Type": "application/json"}
    large = api.post(path, content=body(2 * BODY_BYTES_MAX), headers=headers)
    assert (large.status_code, large.json()["code"]) == (413, "too_large")
    small = api.post(path, content=body(1024), headers=headers)
    assert small.status_code == 422


def test_the_document_names_the_security_schemes(api: httpx.Client) -> None:
    document = api.get("/api/v1/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert (schemes["token"]["type"], schemes["token"]["scheme"]) == ("http", "bearer")
    assert (schemes["session"]["type"], schemes["session"]["in"]) == ("apiKey", "cookie")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs = served_without_token(path)
            assert ("security" not in operation) == needs, (path, method)


def served_without_token(path: str) -> bool:
    return path in {"/healthz", "/api/v1/session"}


def test_exports_of_different_keys_do_not_collide() -> None:
    choices: list[list[str]] = [[], ["model"], ["optimizer"], ["model", "optimizer"]]
    asked = [AskExport(to=ExportFormat.DCP, include=one) for one in choices]
    asked += [AskExport(to=ExportFormat.DCP, dtype="float16"), AskExport(to=ExportFormat.HF)]
    names = [export_name("step-1", one) for one in asked]
    assert len(set(names)) == len(asked)
    assert (names[0], names[-1]) == ("step-1.dcp", "step-1.hf")
