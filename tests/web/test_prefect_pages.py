"""A run in the pages of Prefect's own UI: its state, its tag and its artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.support.flow_runs import (
    FlowRuns,
    deployed_service,
    state_of,
    step_of,
    supervisions,
    wait_for,
)

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

PAGE = "http://holdfast.example:8470"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlowRuns]:
    monkeypatch.setenv("HOLDFAST_PAGE_URL", PAGE)
    with deployed_service(tmp_path) as service:
        made = FlowRuns(service, tmp_path)
        yield made
        made.end_flows()
        made.end_all()


def test_prefect_s_pages_tell_of_a_run_what_ours_do(runs: FlowRuns, browser: Browser) -> None:
    spec = runs.write_spec("kelp", {"steps": 6000, "sleep_s": 0.2}, config={"steps": 6000})
    paths = runs.deploy_run(spec)
    wait_for("a checkpoint", lambda: step_of(paths) >= 15)
    flow_run = supervisions(paths)[0]["flow_run"]
    site = runs.service.api.removesuffix("/api")
    context = browser.new_context(base_url=site, viewport={"width": 1440, "height": 1000})
    try:
        page = context.new_page()
        page.goto(f"/runs/flow-run/{flow_run}")
        expect(page.get_by_text("Running", exact=True).first).to_be_visible()
        expect(page.get_by_text("kelp", exact=True).first).to_be_visible()
        found = {one["key"].rpartition("-")[2]: one for one in _artifacts(runs, flow_run)}
        page.goto(f"/artifacts/artifact/{found['attempts']['id']}")
        for text in ("resumed from", "running"):
            expect(page.get_by_text(text, exact=True).first).to_be_visible()
        page.goto(f"/artifacts/artifact/{found['run']['id']}")
        link = page.get_by_role("link", name="kelp", exact=True)
        expect(link).to_have_attribute("href", f"{PAGE}/runs/kelp")
        expect(page.get_by_text("attempt 1 (2 ranks)")).to_be_visible()
        runs.holdfast("cancel", "kelp")
        wait_for("the end", lambda: state_of(paths) == "cancelled")
        page.goto(f"/runs/flow-run/{flow_run}")
        expect(page.get_by_text("Cancelled", exact=True).first).to_be_visible()
    finally:
        context.close()


def _artifacts(runs: FlowRuns, flow_run: str) -> list[dict[str, str]]:
    chosen = {"flow_run_id": {"any_": [flow_run]}}

    def with_checkpoints() -> list[dict[str, str]]:
        found = runs.ask("artifacts/filter", artifacts=chosen, limit=20)
        texts = [str(one["data"]) for one in found if one["type"] == "markdown"]
        return list(found) if any("step-" in text for text in texts) else []

    return list(wait_for("artifacts with a checkpoint", with_checkpoints, 90))
