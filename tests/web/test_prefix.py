"""The page, the API and their sessions below a path of a proxy, which removes the path or not."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, expect
from tests.web import testbed
from tests.web.sample_runs import LIVE, supervised, write_sample_runs
from tests.web.testbed import Site

PREFIX: Final = "/team/holdfast"
NOW: Final = 1_800_000_000.0


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("prefix")
    write_sample_runs(home / "runs", NOW)
    with (
        supervised(home / "runs"),
        testbed.serving(home, "--prefix", PREFIX, "--trusted-proxy", "127.0.0.1") as served,
    ):
        yield served


@pytest.fixture(params=["kept", "removed"])
def proxied(request: pytest.FixtureRequest, below: Site) -> Iterator[Site]:
    """The server behind a proxy that keeps the path, or removes it as `proxy_pass …/;` does."""
    with proxy(urlsplit(below.url).port or 0, removes=request.param == "removed") as port:
        yield replace(below, url=f"http://127.0.0.1:{port}{PREFIX}")


@contextlib.contextmanager
def proxy(target: int, *, removes: bool) -> Iterator[int]:
    """A proxy of `PREFIX` alone, which passes each answer on as it comes; yields its port."""

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404, "not below the prefix")
                return
            path = self.path.removeprefix(PREFIX) if removes else self.path
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
            asked.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                asked.putheader(name, value)
            asked.endheaders(body)
            with contextlib.closing(asked), contextlib.suppress(OSError):
                answer = asked.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"transfer-encoding", "connection"}:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()
            self.close_connection = True

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.more
def test_api_and_session_work_below_a_prefix(proxied: Site) -> None:
    with httpx.Client(base_url=proxied.url, timeout=60) as client:
        opened = client.get(f"/?token={proxied.token}")
        assert (opened.status_code, opened.headers["location"]) == (303, f"{PREFIX}/")
        assert f"path={PREFIX};" in opened.headers["set-cookie"].lower()
        session = client.get("/api/v1/session").json()
        assert session["role"] == "operator"
        document = client.get("/api/v1/openapi.json").json()
        assert document["servers"] == [{"url": PREFIX}]
        assert client.get("/healthz").json()["ok"] in {True, False}
        page = client.get("/runs/any/lineage").text
        for address in ("/icon.svg", "/theme.js", "/assets/"):
            assert f'="{PREFIX}{address}' in page
        assert '="./' not in page
        with client.stream("GET", "/api/v1/events") as stream:
            assert "event: hello" in next(stream.iter_text())
        headers = {"X-Holdfast-CSRF": session["csrf"]}
        left = client.delete("/api/v1/session", headers=headers)
        assert f"path={PREFIX};" in left.headers["set-cookie"].lower()
        assert client.get("/api/v1/runs").status_code == 401


@pytest.mark.more
def test_page_works_below_a_prefix_in_a_browser(proxied: Site, browser: Browser) -> None:
    with testbed.page_of(browser, proxied, logged_in=False) as (page, console_errors):
        failed: list[str] = []
        page.on("response", lambda one: failed.append(one.url) if one.status >= 400 else None)
        page.goto(f"{proxied.url}/?token={proxied.token}")
        expect(page).to_have_url(f"{proxied.url}/")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.get_by_role("link", name=LIVE, exact=True).click()
        expect(page.get_by_text("Where the time went").first).to_be_visible()
        expect(page).to_have_url(f"{proxied.url}/runs/{LIVE}")
        # Each is loaded from the start. The lineage has a style sheet, a chunk and a worker.
        for path, text in (
            (f"/runs/{LIVE}/lineage", "preemption · 8 ranks"),
            (f"/runs/{LIVE}/checkpoints", "keep.last 4: it is older"),
        ):
            page.goto(proxied.url + path)
            expect(page.get_by_text(text).first).to_be_visible()
        assert not failed
        assert not console_errors, "\n".join(console_errors)


@pytest.mark.more
@pytest.mark.parametrize("wrong", ["holdfast", "/holdfast/", "/a/../b", '/"', "//evil"])
def test_wrong_prefix_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(
        AssertionError, match=r"--prefix .*expected a path that begins with a slash"
    ):
        testbed.call(tmp_path, "serve", "--port", "0", "--prefix", wrong)
