"""The web page in a real browser, with a real server and a real database."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect
from tests.support.runs import RunFolder
from tests.web import testbed
from tests.web.sample_runs import LIVE
from tests.web.testbed import CHECKOUT, Site

from holdfast.api.routes.page import FIRST_ROWS, LINEAGE_ASKS, RUN_ASKS
from holdfast.contracts.disk.durable import write_bytes
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.records.history import load_events

AXE: Final = CHECKOUT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PINNED: Final = f"{LIVE}:step-00005000.a0001.l01"
LAST: Final = f"{LIVE}:step-00008500.a0002.l01"
# Each page, and a text that appears once its data have loaded.
PAGES: Final = {
    "/": "vit-l-ablation",
    f"/runs/{LIVE}": "Where the time went",
    f"/runs/{LIVE}/checkpoints": "keep.last 4: it is older",
    f"/runs/{LIVE}/lineage": "preemption · 8 ranks",
    f"/runs/{LIVE}/ranks": "Median step",
    f"/runs/{LIVE}/logs": "Following",
    f"/runs/{LIVE}/events": "a preemption is always forgiven",
    "/runs/bert-classifier": "Traceback of rank 1",
    "/runs/bert-classifier/errors": "Errors in order",
    f"/checkpoints/{PINNED}": "Ancestry",
    f"/compare?a={PINNED}&b={LAST}": "Differences",
    "/goodput": "Productive",
    "/nodes": "gpu-11",
    "/storage": "Prunable",
    "/queue": "Expected start",
    f"/compare?runs={LIVE},gpt-90m-8k": "Differences",
}
RULES: Final = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
View = tuple[Literal["light", "dark"], ViewportSize]
NARROW: Final[ViewportSize] = {"width": 390, "height": 844}
MIDDLE: Final[ViewportSize] = {"width": 1024, "height": 768}
WIDE: Final[ViewportSize] = {"width": 1440, "height": 900}
TABS: Final = 8
# Contrast depends on the theme and layout on the width. Three views cover both; six, all pairs.
THREE: Final[tuple[View, ...]] = (("light", WIDE), ("dark", NARROW), ("light", MIDDLE))
SIX: Final[tuple[View, ...]] = (*THREE, ("light", NARROW), ("dark", WIDE), ("dark", MIDDLE))


def violations(page: Page) -> list[str]:
    """The WCAG AA violations that axe finds on the page as it is now."""
    found: dict[str, Any] = page.evaluate("rules => axe.run(document, rules)", RULES)
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]}"
        for one in found["violations"]
        for node in one["nodes"][:3]
    ]


@pytest.mark.more
@pytest.mark.parametrize(
    "views",
    [pytest.param(THREE, id="three"), pytest.param(SIX, id="six", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("path", PAGES)
def test_each_page_is_accessible_in_every_theme_and_width(
    site: Site, browser: Browser, path: str, views: tuple[View, ...]
) -> None:
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto(path)
        expect(page.get_by_text(PAGES[path]).first).to_be_visible()
        # The content security policy blocks foreign scripts in the page, but not `evaluate`.
        page.evaluate(AXE.read_text())
        found = []
        for theme, size in views:
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=theme)
            seen = f"{theme} {size['width']}"
            found += [f"{seen}: {one}" for one in violations(page)]
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found += [f"{seen}: {overflow} px too wide"] if overflow > 0 else []
        assert not found, "\n".join(found)
        assert not console_errors, "\n".join(console_errors)


def test_new_commit_appears_on_an_open_page(site: Site, browser: Browser) -> None:
    paths = RunPaths(site.root / "gpt-90m-8k")
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto("/runs/gpt-90m-8k/checkpoints")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        expect(page.get_by_role("link", name="5,500", exact=True)).to_be_visible()
        fresh = page.get_by_role("link", name="90,000", exact=True)
        expect(fresh).to_have_count(0)
        commit_again(paths, 90_000)
        expect(fresh).to_be_visible()
        assert not console_errors


def commit_again(paths: RunPaths, step: int) -> None:
    """Commit the newest checkpoint's files again as a later step."""
    newest = max(paths.list_checkpoints(), key=lambda path: path.name)
    name = CheckpointName(step, 1, 1)
    document = json.loads((newest / MANIFEST).read_bytes())
    document |= {"name": str(name), "step": step, "parent": f"{paths.name}:{newest.name}"}
    target = paths.checkpoint(name)
    target.mkdir()
    for path in newest.glob("*.distcp"):
        (target / path.name).hardlink_to(path)
    write_bytes(target / MANIFEST, json.dumps(document).encode())
    with JournalWriter(paths.attempt(1).journal / "rank0.jsonl") as journal:
        journal.append(EventKind.COMMITTED, attempt=1, checkpoint=str(name), step=step, bytes=18)


@pytest.mark.more
def test_pin_and_unpin_are_confirmed_and_recorded(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto(f"/checkpoints/{LAST}")
        page.get_by_role("button", name="Pin", exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Reason (optional)").fill("the last before the node was lost")
        dialog.get_by_role("button", name="Pin").click()
        expect(dialog.get_by_role("status")).to_be_visible()
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_text("the last before the node was lost")).to_be_visible()
        page.get_by_role("button", name="Unpin").click()
        dialog.get_by_role("button", name="Unpin").click()
        dialog.get_by_role("button", name="Close").click()
        # The reason is optional.
        page.get_by_role("button", name="Pin", exact=True).click()
        dialog.get_by_role("button", name="Pin").click()
        expect(dialog.get_by_role("status")).to_be_visible()
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_role("button", name="Unpin")).to_be_visible()
        assert not console_errors
    events = [e for e in load_events(RunPaths(site.root / LIVE)) if e.kind is EventKind.PINNED]
    assert [e.data["note"] for e in events[-2:]] == ["the last before the node was lost", ""]
    assert events[-1].data["checkpoint"] == LAST.partition(":")[2]


@pytest.mark.more
def test_keyboard_shortcuts_reach_search_lists_and_views(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto("/")
        expect(page.get_by_role("link", name="vit-l-ablation")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("vit")
        expect(page.get_by_role("link", name=LIVE, exact=True)).to_have_count(0)
        expect(page).to_have_url(f"{site.url}/?search=vit")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{site.url}/runs/vit-l-ablation")
        page.keyboard.press("g")
        page.keyboard.press("n")
        expect(page.get_by_role("heading", name="Nodes")).to_be_visible()
        page.go_back()
        expect(page.get_by_role("heading", name="vit-l-ablation")).to_be_visible()
        page.keyboard.press("/")
        expect(page.get_by_role("searchbox")).to_be_focused()
        assert not console_errors


def test_page_is_not_shown_as_live_while_the_server_is_frozen(site: Site, browser: Browser) -> None:
    live = "live"
    with testbed.page_of(browser, site) as (page, _):
        page.clock.install()
        page.goto("/")
        expect(page.get_by_text(live, exact=True)).to_be_visible()
        site.process.send_signal(signal.SIGSTOP)
        try:
            # The connection stays open, but nothing arrives.
            page.clock.fast_forward(20_000)
            expect(page.get_by_text(live, exact=True)).to_have_count(0)
        finally:
            site.process.send_signal(signal.SIGCONT)
        expect(page.get_by_text(live, exact=True)).to_be_visible()


@pytest.mark.more
def test_view_and_stream_recover_from_a_failed_request(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, _):
        page.goto("/")
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.route("**/api/v1/storage*", lambda route: route.abort())
        page.get_by_role("link", name="Storage").click()
        expect(page.get_by_role("alert")).to_be_visible()
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.unroute_all()
        # The request is repeated although the stream sends no event.
        expect(page.get_by_text("Prunable").first).to_be_visible()


def test_traceback_and_timeline_fit_a_phone_screen(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site, width=NARROW["width"]) as (page, _):
        page.goto("/runs/bert-classifier")
        # Nobody has to open the traceback of a failed run.
        expect(page.get_by_text("Traceback of rank 1")).to_be_visible()
        trace = page.locator("pre.log", has_text="ValueError: Expected input batch_size")
        expect(trace).to_be_visible()
        page.goto(f"/runs/{LIVE}")
        timeline = page.locator("svg.timeline")
        expect(timeline).to_be_visible()
        box = timeline.bounding_box()
        assert box
        assert box["x"] + box["width"] <= NARROW["width"]
        table = page.get_by_role("region", name="Attempts")
        expect(table.get_by_text("#1", exact=False).first).to_be_visible()
        clipped = table.evaluate("(one) => one.scrollWidth - one.clientWidth")
        assert clipped == 0
        # An error of the program does not count as a fault of the node.
        page.goto("/nodes?host=gpu-05")
        expect(page.get_by_text("None so far.")).to_be_visible()


def test_printed_url_logs_in_and_removes_the_token_from_the_address(
    browser: Browser, site: Site
) -> None:
    with testbed.page_of(browser, site, logged_in=False) as (page, console_errors):
        page.goto(f"/?token={site.token}")
        expect(page.get_by_role("link", name="vit-l-ablation")).to_be_visible()
        expect(page).to_have_url(f"{site.url}/")
        assert not console_errors


def test_list_asks_for_the_rows_that_the_browser_loads_early(browser: Browser, site: Site) -> None:
    with testbed.page_of(browser, site) as (page, _):
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url.removeprefix(site.url)))
        page.goto("/")
        page.get_by_role("table").wait_for()
        early = "() => performance.getEntriesByType('resource').find(e => e.name.includes('/runs'))"
        assert page.evaluate(f"({early})().initiatorType") == "link"
        assert {one for one in asked if "/api/v1/runs" in one} == {FIRST_ROWS}
        # Few visits need the values of the filters.
        assert "/api/v1/filters" not in asked
        page.get_by_text("Filters", exact=True).click()
        expect(page.get_by_label("User").get_by_role("option")).not_to_have_count(1)


@pytest.mark.parametrize(("view", "asks"), [("", RUN_ASKS), ("/lineage", LINEAGE_ASKS)])
def test_views_of_a_run_ask_for_what_the_browser_loads_early(
    browser: Browser, site: Site, view: str, asks: tuple[str, ...]
) -> None:
    with testbed.page_of(browser, site) as (page, _):
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url.removeprefix(site.url)))
        page.goto(f"/runs/bert-classifier{view}")
        last = page.locator(".react-flow__node") if view else page.locator("svg.timeline")
        expect(last.first).to_be_visible()
        # The stream continues where the page began, so nothing is requested again.
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.wait_for_timeout(500)
        for ask in asks:
            path = f"/api/v1/runs/bert-classifier{ask}"
            found = "name => performance.getEntriesByName(name).map((one) => one.initiatorType)"
            assert page.evaluate(found, site.url + path) == ["link"]
            assert asked.count(path) == 1


def test_tabs_of_one_browser_share_a_stream(browser: Browser, site: Site) -> None:
    """A browser allows six connections to a server, and each stream would hold one."""
    with testbed.page_of(browser, site) as (page, _):

        def streams() -> int:
            return int(page.request.get("/healthz").json()["streams"])

        before = streams()
        tabs = [page, *(page.context.new_page() for _ in range(TABS - 1))]
        for tab in tabs:
            tab.goto("/runs/bert-classifier")
            expect(tab.get_by_role("heading", name="bert-classifier")).to_be_visible()
            expect(tab.get_by_text("live", exact=True)).to_be_visible()
        assert streams() <= before + 1
        tabs[0].close()
        tabs[1].reload()
        expect(tabs[1].get_by_text("live", exact=True)).to_be_visible()


def test_every_built_script_has_its_compressed_form() -> None:
    scripts = [*(testbed.BUILT.parent / "assets").glob("*.js")]
    assert scripts
    for script in scripts:
        packed = script.with_name(f"{script.name}.gz")
        assert gzip.decompress(packed.read_bytes()) == script.read_bytes()


def test_page_offers_a_login_and_reports_a_stopped_server(browser: Browser, tmp_path: Path) -> None:
    token = testbed.call(tmp_path, "token", "add", "ann")
    RunFolder(tmp_path / "runs", "only", "e" * 32)
    with (
        testbed.serving(tmp_path) as site,
        testbed.page_of(browser, site, logged_in=False) as (page, _),
    ):
        page.goto("/")
        page.get_by_label("Token").fill("hold_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("region", name="Runs").get_by_role("link", name="only").click()
        # A reader cannot change anything.
        expect(page.get_by_text("Read-only")).to_be_visible()
        # A view that was not loaded before the server stopped cannot be shown; the page stays.
        page.route("**/assets/Events-*.js", lambda route: route.abort())
        site.end()
        expect(page.get_by_text("The server has not answered since")).to_be_visible()
        page.get_by_role("link", name="Events").click()
        expect(page.get_by_text("This view could not be loaded.")).to_be_visible()
        expect(page.get_by_role("heading", name="only")).to_be_visible()
