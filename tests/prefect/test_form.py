"""The form for a run in Prefect's own UI, in Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.demo_service import PrefectService
from playwright.sync_api import Page, sync_playwright
from tests.support.flow_runs import FlowRuns

LOAD_MS = 60_000


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(LOAD_MS)
        yield page
        browser.close()


@pytest.mark.more
def test_the_form_shows_every_part_of_a_spec_and_marks_what_is_wrong(
    runs: FlowRuns, service: PrefectService, page: Page
) -> None:
    deployment = runs.ask("deployments/name/submit/holdfast")["id"]
    page.goto(f"{service.api.removesuffix('/api')}/deployments/deployment/{deployment}/run")
    page.get_by_text("arguments that torchrun gets").wait_for()
    text = page.inner_text("body")
    for part in ("Resources", "Elastic", "Checkpoint", "Supervision", "Alerts", "Blocks"):
        assert part in text
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("'name' is a required property").wait_for()
    page.get_by_text("'command' is a required property").wait_for()
    assert page.url.endswith("/run"), "nothing was started"
    assert runs.ask("flow_runs/count", flows={"name": {"any_": ["submit"]}}) == 0
