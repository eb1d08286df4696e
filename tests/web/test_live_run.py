"""A real training run is relaunched from the page and continues at the new size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from safetensors import safe_open
from tests.process.local_command import Local
from tests.web import testbed

STEPS: Final = 100_000
# An attempt imports torch in each rank, on a machine that may be busy.
ATTEMPT_MS: Final = 300_000.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


def ask(page: Page, word: str, *, gpus: str | None = None) -> None:
    """Press an operator's button, confirm the dialog, and check that it was accepted."""
    page.get_by_role("button", name=word).click()
    dialog = page.get_by_role("dialog")
    if gpus is not None:
        dialog.get_by_label("GPUs of the next attempt").fill(gpus)
    dialog.get_by_role("button", name=word).click()
    told = dialog.get_by_role("status").or_(dialog.get_by_role("alert"))
    expect(told).to_be_visible()
    assert dialog.get_by_role("alert").count() == 0, told.inner_text()
    dialog.get_by_role("button", name="Close").click()


def export_newest(page: Page, table: Locator) -> str:
    """Export the newest checkpoint from its page in the default format; returns the path."""
    table.get_by_role("link").first.click()
    form = page.locator(".export")
    form.get_by_role("button", name="Export").click()
    expect(form.locator("code")).to_contain_text(".safetensors", timeout=ATTEMPT_MS)
    return form.locator("code").inner_text()


def test_relaunch_from_the_page_resumes_at_the_new_size(local: Local, browser: Browser) -> None:
    spec = local.write_spec(
        "resized",
        {"steps": STEPS, "sleep_s": 0.05},
        resources={"gpus_per_node": 2},
        elastic={"min_gpus": 1},
    )
    local.json("submit", str(spec))
    with (
        testbed.serving(local.folder / "home") as site,
        testbed.page_of(browser, site) as (page, console_errors),
    ):
        page.goto("/runs/resized")
        attempts = page.get_by_role("region", name="Attempts").get_by_role("row")
        expect(attempts.filter(has_text="#1")).to_contain_text("running", timeout=ATTEMPT_MS)
        page.get_by_role("link", name="Checkpoints").click()
        table = page.get_by_role("region", name="Checkpoints")
        expect(table).to_contain_text("10", timeout=ATTEMPT_MS)
        page.get_by_role("link", name="Overview").click()

        ask(page, "Relaunch", gpus="1")
        second = attempts.filter(has_text="#2")
        expect(second).to_contain_text("1 GPU", timeout=ATTEMPT_MS)
        expect(second).to_contain_text("running", timeout=ATTEMPT_MS)
        # The second attempt trains: it commits a checkpoint, and the page shows it.
        page.get_by_role("link", name="Checkpoints").click()
        expect(table).to_contain_text("2.1", timeout=ATTEMPT_MS)

        ask(page, "Cancel")
        expect(page.get_by_text("cancelled").first).to_be_visible(timeout=ATTEMPT_MS)
        written = export_newest(page, table)
        assert not console_errors
    with safe_open(written, framework="pt") as weights:
        assert list(weights.keys())
    shown = local.json("show", "resized")
    first, second_attempt = shown["attempts"]
    assert (first["world_size"], second_attempt["world_size"]) == (2, 1)
    assert second_attempt["resumed_step"] >= 10
    assert second_attempt["first_step"] == second_attempt["resumed_step"] + 1
