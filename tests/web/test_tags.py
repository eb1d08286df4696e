"""Tags, notes and saved views in a real browser, by keyboard, on a phone and on a desktop."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.web import testbed
from tests.web.sample_runs import LIVE
from tests.web.test_page import AXE, LAST, violations
from tests.web.testbed import Site

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events


def fits(page: Page) -> bool:
    """True if nothing is wider than the window."""
    found: Any = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return bool(found)


def press_until_focused(page: Page, name: str, presses_max: int = 60) -> None:
    for _ in range(presses_max):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement?.textContent") == name:
            return
    raise AssertionError(f"{name!r} cannot be reached by Tab")


@pytest.mark.more
@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_tags_note_and_view_by_keyboard(
    site: Site, browser: Browser, width: int, theme: str
) -> None:
    tag, note = f"kept-{width}", "the loss of shard 7\n" + "x" * 300
    with testbed.page_of(browser, site, width=width, theme=theme) as (page, console_errors):
        page.goto(f"/runs/{LIVE}")
        expect(page.get_by_role("button", name="Tags and note")).to_be_visible()
        press_until_focused(page, "Tags and note")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Tags, separated by spaces").focus()
        page.keyboard.press("Control+a")
        page.keyboard.type(f"{tag} llm")
        page.keyboard.press("Tab")
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(note)
        page.evaluate(AXE.read_text())
        assert fits(page)
        assert violations(page) == []
        press_until_focused(page, "Save")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("status")).to_contain_text(tag)
        press_until_focused(page, "Close")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("the loss of shard 7")).to_be_visible()
        assert fits(page)
        assert violations(page) == []
        page.get_by_role("link", name=tag).focus()
        page.keyboard.press("Enter")
        rows = page.get_by_role("region", name="Runs").locator("tbody tr")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text(LIVE)
        page.get_by_role("button", name="Views").focus()
        page.keyboard.press("Enter")
        dialog.get_by_label("Save the current filters as").focus()
        page.keyboard.type("what we keep")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("link", name="what we keep")).to_be_visible()
        assert fits(page)
        page.evaluate(AXE.read_text())
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.goto("/")
        expect(rows).not_to_have_count(1)
        # The view has survived the load of the page.
        page.get_by_role("button", name="Views").click()
        dialog.get_by_role("link", name="what we keep").click()
        expect(page.get_by_role("button", name="View: what we keep")).to_be_visible()
        expect(rows).to_have_count(1)
        assert not console_errors
    lines = [e for e in load_events(RunPaths(site.root / LIVE)) if e.kind is EventKind.ANNOTATED]
    assert set(lines[-1].data["tags_added"]) <= {tag, "llm"}


@pytest.mark.more
def test_a_checkpoint_gets_a_note_on_its_page(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site, width=390) as (page, console_errors):
        page.goto(f"/checkpoints/{LAST}")
        page.get_by_role("button", name="Tags and note").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Tags, separated by spaces").fill("paper")
        dialog.get_by_label("Note").fill("figure 3")
        dialog.get_by_role("button", name="Save").click()
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_text("figure 3")).to_be_visible()
        assert fits(page)
        assert not console_errors
