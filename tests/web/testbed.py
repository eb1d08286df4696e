"""A real `holdfast serve` in a separate process, and a real Chromium that opens its page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHECKOUT: Final = Path(__file__).resolve().parents[2]
BUILT: Final = CHECKOUT / "src" / "holdfast" / "api" / "static" / "index.html"
WAIT_S: Final = 120.0
WAIT_MS: Final = WAIT_S * 1000
POLL_S: Final = 0.05
END_S: Final = 20.0
# Root needs the first; the second stops the browser's own background requests.
BROWSER_ARGUMENTS: Final = ["--no-sandbox", "--disable-background-networking"]
FOREIGN: Final = ("HOLDFAST_", "PREFECT_")


@dataclass
class Site:
    """A server at `url` with the operator token `token`; it shows the runs under `root`."""

    url: str
    token: str
    home: Path
    root: Path
    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """Stop the server with SIGTERM; may be called twice."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)


def environment(home: Path) -> dict[str, str]:
    """This process's environment without variables of another home, database or server."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return own | {
        "HOLDFAST_HOME": str(home),
        "HOLDFAST_ROOT": str(home / "runs"),
        "PREFECT_HOME": str(home / "prefect"),
    }


def call(home: Path, *arguments: str) -> str:
    """Run `holdfast`, check that it succeeds, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout.strip()


@contextlib.contextmanager
def serving(home: Path, *options: str) -> Iterator[Site]:
    """`holdfast serve` on a free port, until the context ends."""
    assert BUILT.is_file(), f"{BUILT} does not exist: `make page` builds it"
    root = home / "runs"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=home) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "serve", "--port", "0", *options],
            env=environment(home),
            stdout=log,
            stderr=log,
        )
        site = Site("", "", home, root, process)
        try:
            site.url, site.token = _address(process, log.fileno())
            yield site
        finally:
            site.end()


def _address(process: subprocess.Popen[bytes], log: int) -> tuple[str, str]:
    """(URL, token) as the server prints them."""
    ends_at = time.monotonic() + WAIT_S
    while True:
        text = os.pread(log, 65536, 0).decode(errors="replace")
        found = re.search(r"serving (http://\S+)/\?token=(\S+)\s", text)
        if found:
            return found[1], found[2]
        assert process.poll() is None, f"the server ended: {text}"
        assert time.monotonic() < ends_at, f"the server did not start: {text}"
        time.sleep(POLL_S)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no Chromium: apt-get install chromium (make setup-cluster does)"
    with sync_playwright() as playwright:
        # A busy machine is slow, which is not an error of the page.
        expect.set_options(timeout=WAIT_MS)
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(
    browser: Browser,
    site: Site,
    *,
    width: int = 1440,
    theme: str = "light",
    logged_in: bool = True,
) -> Iterator[tuple[Page, list[str]]]:
    """(a browser page, the errors on its console); the list grows while the page is used.

    Unless `logged_in` is false, the page has a session from the URL that the server printed.
    """
    context = browser.new_context(
        base_url=site.url,
        viewport={"width": width, "height": 900},
        color_scheme="dark" if theme == "dark" else "light",
    )
    context.set_default_timeout(WAIT_MS)
    if logged_in:
        context.request.get(f"/?token={site.token}")
    page = context.new_page()
    console_errors: list[str] = []
    page.on(
        "console", lambda said: console_errors.append(said.text) if said.type == "error" else None
    )
    page.on("pageerror", lambda error: console_errors.append(str(error)))
    try:
        yield page, console_errors
    finally:
        context.close()
