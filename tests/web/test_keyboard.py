"""The page by keyboard alone, in every state that axe checks, and in other languages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final, Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.runs import RunFolder
from tests.web import testbed
from tests.web.sample_runs import LIVE
from tests.web.test_page import AXE, LAST, NARROW, PINNED, WIDE, violations
from tests.web.testbed import Site

from holdfast.contracts.states import AttemptState

LONG: Final = "a-name-of-a-hundred-characters-" + "x" * 69
IS_LOST: Final = "() => document.activeElement.matches('body')"

pytestmark = pytest.mark.more


def press(page: Page, role: Literal["button", "link"], name: str) -> None:
    """Focus a control and press Enter, as a keyboard does."""
    control = page.get_by_role(role, name=name).first
    control.focus()
    control.press("Enter")


def run_field(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Add a run")


# What is opened before axe looks: the address, and how.
STATES: Final[dict[str, tuple[str, Callable[[Page], object]]]] = {
    "filters": ("/", lambda page: page.get_by_text("Filters", exact=True).click()),
    "views": ("/", lambda page: press(page, "button", "Views")),
    "keys": ("/", lambda page: press(page, "button", "Keys")),
    "no match": ("/?search=nothing", lambda page: page.get_by_text("No matching").wait_for()),
    "relaunch": (f"/runs/{LIVE}", lambda page: press(page, "button", "Relaunch")),
    "refused": ("/runs/vit-l-ablation", lambda page: press(page, "button", "Pause")),
    "tags": (f"/runs/{LIVE}", lambda page: press(page, "button", "Tags and note")),
    "unknown": ("/runs/unknown", lambda page: page.get_by_role("alert").wait_for()),
    "queued": (
        "/runs/llama-3b-instruct/ranks",
        lambda page: page.get_by_role("heading", name="of the ranks yet").wait_for(),
    ),
    "columns": (f"/runs/{LIVE}/checkpoints", lambda page: page.get_by_text("Columns (").click()),
    "card": (
        f"/runs/{LIVE}/lineage?at={PINNED}",
        lambda page: page.get_by_text("Shards").wait_for(),
    ),
    "matches": ("/runs/bert-classifier/logs", lambda page: press(page, "button", "Find errors")),
    "pin": (f"/checkpoints/{LAST}", lambda page: press(page, "button", "Pin")),
    "fork": (f"/checkpoints/{PINNED}", lambda page: press(page, "button", "Fork")),
    "choices": ("/compare", lambda page: run_field(page).click()),
    "no choice": ("/compare", lambda page: run_field(page).fill("nothing")),
    "failures": ("/nodes?host=gpu-11", lambda page: page.get_by_text("attributed").wait_for()),
    "prunable": ("/storage", lambda page: press(page, "button", "Details of")),
    "no address": ("/nothing", lambda page: page.get_by_text("Page not found").wait_for()),
}


@pytest.mark.parametrize("state", STATES)
def test_dialogs_menus_and_empty_states_are_accessible(
    site: Site, browser: Browser, state: str
) -> None:
    path, act = STATES[state]
    found = []
    for theme, size in (("light", WIDE), ("dark", NARROW)):
        with testbed.page_of(browser, site, width=size["width"], theme=theme) as (page, _):
            page.goto(path)
            act(page)
            page.wait_for_timeout(500)
            page.evaluate(AXE.read_text())
            found += [f"{theme}: {one}" for one in violations(page)]
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found += [f"{theme}: {wide} px too wide"] if wide > 0 else []
    assert not found, "\n".join(found)


def test_focus_stays_when_the_focused_control_vanishes(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto(f"/runs/{LIVE}")
        press(page, "link", "Checkpoints")
        expect(page.get_by_role("link", name="Checkpoints")).to_be_focused()
        page.goto("/nodes?host=gpu-11")
        press(page, "link", "Close")
        expect(page.get_by_text("attributed")).to_have_count(0)
        expect(page.get_by_role("heading", name="Nodes")).to_be_visible()
        assert not page.evaluate(IS_LOST)
        page.goto("/")
        page.get_by_role("checkbox", name=f"Select {LIVE}", exact=True).press("Space")
        press(page, "button", "Clear")
        expect(page.get_by_role("toolbar")).to_have_count(0)
        assert not page.evaluate(IS_LOST)
        assert not console_errors


def test_single_keys_can_be_turned_off_and_leave_dialogs_alone(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{LIVE}")
        press(page, "button", "Keys")
        page.get_by_role("dialog").get_by_role("button", name="Close").focus()
        page.keyboard.type("gq")
        page.get_by_role("checkbox", name="Use these keys").press("Space")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Keys")).to_be_focused()
        page.keyboard.type("gq")
        page.reload()
        expect(page.get_by_role("heading", name=LIVE)).to_be_visible()
        page.keyboard.type("gq?")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page).to_have_url(f"{site.url}/runs/{LIVE}")


def test_a_long_name_does_not_push_columns_out_of_the_window(site: Site, browser: Browser) -> None:
    run = RunFolder(site.root, LONG, "7" * 32, created_at=time.time())
    run.submit(1, 1, time.time())
    run.finish(1, AttemptState.COMPLETED, None, 5, time.time())
    with testbed.page_of(browser, site) as (page, _):
        for width in (1440, 1024, 390):
            page.set_viewport_size({"width": width, "height": 900})
            for path in ("/", "/goodput", f"/runs/{LONG}"):
                page.goto(path)
                expect(page.get_by_text(LONG).locator("visible=true").first).to_be_visible()
                for area in page.get_by_role("region").all():
                    hidden = area.evaluate("(one) => one.scrollWidth - one.clientWidth")
                    assert hidden <= 0, f"{width} {path}: {hidden} px of a table are hidden"


def test_dates_of_a_right_to_left_language_keep_their_order(site: Site, browser: Browser) -> None:
    context = browser.new_context(
        base_url=site.url, locale="ar-EG", timezone_id="Africa/Cairo", viewport=None
    )
    try:
        context.request.get(f"/?token={site.token}")
        page = context.new_page()
        page.goto(f"/runs/{LIVE}/events")
        date = page.locator("td .second").first
        # Isolated, and with the digits of the other numbers of the page.
        expect(date).to_have_text(re.compile("^\u2068[^\u0660-\u0669]*20\\d\\d.*\u2069$"))
    finally:
        context.close()
