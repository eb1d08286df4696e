"""Each header that the server reads: set, with its effect, and with bad values.

The headers are those that the code reads. One without a row fails the test.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.api.conftest import Served

from holdfast import api
from holdfast.api.security import BODY_BYTES_MAX
from holdfast.api.sessions import CSRF_HEADER

API: Final = "/api/v1"
PIN: Final = f"{API}/checkpoints/gpt:step-00000200.a0003.l01/pin"
LARGE: Final = b'{"note": "' + b"x" * BODY_BYTES_MAX + b'"}'
# Of each header that the code reads: a request, its status, a bad one, its status and a word of its
# message. A bad value without a problem is one that HTTP lets a server ignore.
HEADERS: Final[Mapping[str, tuple[dict[str, Any], int, dict[str, Any], int, str]]] = {
    "authorization": ({}, 200, {"Authorization": "Basic YTpi"}, 401, "Authorization: Bearer"),
    "x-holdfast-csrf": ({}, 200, {"X-Holdfast-CSRF": "wrong"}, 403, "x-holdfast-csrf"),
    "accept-encoding": ({"Accept-Encoding": "gzip"}, 200, {"Accept-Encoding": "gzip;q=x"}, 200, ""),
    "if-none-match": ({"If-None-Match": "*"}, 304, {"If-None-Match": "x"}, 200, ""),
    "host": ({"Host": "localhost"}, 200, {"Host": "evil.example"}, 421, "evil.example"),
    "content-length": ({"content": b"{}"}, 200, {"content": LARGE}, 413, "body has"),
    "origin": (
        {"Origin": "http://localhost"},
        200,
        {"Origin": "http://x.example"},
        403,
        "x.example",
    ),
    "sec-fetch-site": (
        {"Sec-Fetch-Site": "same-origin"},
        200,
        {"Sec-Fetch-Site": "cross-site"},
        403,
        "another site",
    ),
    "content-type": ({}, 200, {"Content-Type": "text/plain"}, 415, "Content-Type is 'text/plain'"),
}


def headers_read() -> set[str]:
    """The names of the request's headers that the code reads."""
    found = set()
    for path in Path(api.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_read = "headers" in ast.unparse(node.func.value).lower()
            if is_read and node.func.attr in {"get", "getlist"}:
                (name, *_) = (ast.unparse(one).strip("'") for one in node.args)
                found.add(CSRF_HEADER if name == "CSRF_HEADER" else name)
    # The answer's own header.
    return found - {"etag"}


def test_each_header_that_is_read_has_a_row() -> None:
    assert headers_read() == HEADERS.keys()


@pytest.mark.parametrize("name", HEADERS)
def test_each_header_has_its_effect_and_refuses_bad_values(served: Served, name: str) -> None:
    good, status, bad, refused, word = HEADERS[name]
    is_read = name in {"accept-encoding", "if-none-match"}
    with served.stranger(Host="localhost") as client:
        session = client.post(f"{API}/session", json={"token": served.token}).json()
        answers = []
        for given in (good, bad):
            headers = {"Content-Type": "application/json", "X-Holdfast-CSRF": session["csrf"]}
            headers |= {key: one for key, one in given.items() if key != "content"}
            if name == "authorization":
                client.cookies.clear()
                headers |= {"Authorization": f"Bearer {served.token}"} | given
            content = given.get("content", b"{}")
            method, path = ("GET", f"{API}/runs") if is_read else ("POST", PIN)
            answers.append(
                client.request(method, path, content=b"" if is_read else content, headers=headers)
            )
    assert [one.status_code for one in answers] == [status, refused]
    assert word in answers[1].text
    encodings = [one.headers.get("content-encoding") for one in answers]
    assert name != "accept-encoding" or encodings == ["gzip", None]
