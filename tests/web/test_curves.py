"""Curves of several runs: scale, zoom and cursor, by mouse and keyboard, and from the address."""

from __future__ import annotations

import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.web import testbed
from tests.web.sample_runs import LIVE
from tests.web.testbed import Site

FORK: Final = "gpt-90m-8k"
BOTH: Final = f"/compare?runs={FORK},{LIVE}"
# The zoom in the address: two numbers of steps.
ZOOM: Final = re.compile(r"from=([\d.]+)&to=([\d.]+)")


def chart(page: Page, name: str) -> Locator:
    """The chart of a metric."""
    return page.get_by_role("group", name=re.compile(f"^{name}(:| of )"))


def zoom_of(page: Page) -> tuple[float, float]:
    """The part of the axis that the address names."""
    page.wait_for_url(ZOOM)
    found = ZOOM.search(page.url)
    assert found
    return float(found[1]), float(found[2])


def drag(page: Page, drawn: Locator, low: float, high: float) -> None:
    """Drag over the plot, from one share of its width to another."""
    box = drawn.locator(".u-over").bounding_box()
    assert box
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + low * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + high * box["width"], middle, steps=5)
    page.mouse.up()


@pytest.mark.more
def test_two_runs_have_one_scale_zoom_and_cursor_that_the_address_restores(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto(BOTH)
        loss = chart(page, "loss")
        expect(loss.locator(".u-legend")).to_contain_text(LIVE)
        expect(loss.locator(".u-legend")).to_contain_text(FORK)
        page.get_by_label("Log scale").check()
        page.wait_for_url(re.compile("log=true"))
        drag(page, loss, 0.25, 0.75)
        low, high = zoom_of(page)
        assert 0 < low < high

        # The cursor of one chart is that of all of them.
        loss.locator(".u-over").hover()
        rate = chart(page, "steps per second")
        expect(rate.locator("[data-cursor]")).to_be_visible()
        expect(rate.locator(".u-legend")).to_contain_text(re.compile(r"\d"))

        page.reload()
        expect(page.get_by_label("Log scale")).to_be_checked()
        assert zoom_of(page) == (low, high)
        page.get_by_role("button", name="Reset zoom").click()
        expect(page).not_to_have_url(ZOOM)

        # The same by keys alone.
        loss.focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("status").filter(has_text="loss")).to_contain_text(LIVE)
        page.keyboard.press("+")
        wide, before = zoom_of(page), page.url
        page.keyboard.press("+")
        page.wait_for_url(lambda url: url != before)
        narrow = zoom_of(page)
        assert narrow[1] - narrow[0] < wide[1] - wide[0]
        page.keyboard.press("0")
        expect(page).not_to_have_url(ZOOM)
        assert not console_errors


@pytest.mark.more
def test_a_fork_is_drawn_over_its_parent_and_compared_with_it(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site, width=390, theme="dark") as (page, console_errors):
        page.goto(f"/runs/{FORK}")
        page.get_by_role("button", name=f"Over its parent {LIVE}").click()
        expect(chart(page, "loss").locator(".u-legend")).to_contain_text(LIVE)
        expect(page.get_by_text(f"fork of {LIVE}")).to_be_visible()
        page.get_by_role("link", name="Compare with other runs").click()
        expect(page.get_by_role("heading", name="Compare runs")).to_be_visible()
        table = page.get_by_role("region", name="Comparison of runs")
        expect(table).to_contain_text("Outcome", ignore_case=True)
        # Nothing is wider than the phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not console_errors
