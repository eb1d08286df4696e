"""What the views show for many runs, for runs in trouble, and on a phone."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.runs import RunFolder
from tests.web import testbed
from tests.web.sample_runs import HOUR, LIVE, NEWEST, beat, clock
from tests.web.testbed import Site

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.states import AttemptState, Cause

# More runs than one page of any list holds.
MANY: Final = 60
FIRST: Final = "sweep-00"
UNSUPERVISED: Final = "left-alone"
# The oldest steps of the live run were deleted, and the fork's parent is pinned and verified.
FORK: Final = "gpt-90m-8k"
PHONE: Final = 390
# The height of every window here, pixels.
SCREEN: Final = 900

# Charts are drawn on a canvas: this records all centred labels, and those that it clips.
KEEP_LABELS: Final = """
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
  const { e: moved, b: turned } = this.getTransform();
  if (this.textAlign === "center" && turned === 0) {
    const { dataset } = document.documentElement;
    const at = moved + x, half = this.measureText(text).width / 2;
    const isClipped = at < half || at + half > this.canvas.width;
    dataset.labels = `${dataset.labels ?? ""}[${text}]`;
    dataset.clipped = `${dataset.clipped ?? ""}${isClipped ? `[${text}]` : ""}`;
  }
  return draw.call(this, text, x, ...rest);
};
"""


@pytest.fixture(scope="module")
def many_runs(site: Site) -> Site:
    """The site with sixty older runs, on as many hosts; the first is the oldest."""
    for number in range(MANY):
        name, at = f"sweep-{number:02d}", time.time() - (100 - number) * HOUR
        run = RunFolder(site.root, name, f"{number:032x}", created_at=at)
        with clock(at):
            run.submit(1, 1, at)
            run.claim(1, at + 5, f"host-{number:02d}")
            run.launch(1, 1, 0, None, 1)
            run.commit(100, 1, at=at + 60)
            host = f"host-{number:02d}"
            run.finish(1, AttemptState.COMPLETED, None, 100, at + 70, host=host, started_at=at + 5)
    return site


def fact_of(page: Page, name: str) -> Locator:
    """The value beside a name in the list of facts."""
    fact = page.locator(".facts > div").filter(has=page.get_by_text(name, exact=True))
    return fact.locator("dd")


def value_of(page: Page, name: str) -> str:
    """The text of a fact."""
    return fact_of(page, name).inner_text()


def border_colour(notice: Locator) -> str:
    """The colour of a notice's left border."""
    return str(notice.evaluate("(one) => getComputedStyle(one).borderLeftColor"))


@pytest.mark.more
def test_lists_sort_and_sum_all_rows_not_only_loaded_ones(
    many_runs: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, many_runs) as (page, console_errors):
        page.goto("/storage")
        everything = str(MANY + 5)
        expect(page.locator(".facts")).to_contain_text(everything)
        rows = page.get_by_role("region").locator("tbody tr")
        assert rows.count() < MANY
        page.get_by_role("button", name="Show more").click()
        expect(rows).to_have_count(MANY + 5)

        page.goto("/goodput")
        expect(page.get_by_text("Time of all runs")).to_be_visible()
        assert value_of(page, "Runs") == everything

        page.goto("/nodes")
        expect(page.get_by_role("link", name=f"host-{MANY - 1}")).to_be_visible()
        page.goto(f"/nodes?host=host-{MANY - 1}")
        box = page.get_by_role("complementary").bounding_box()
        assert box
        assert box["y"] + box["height"] < SCREEN

        page.goto("/")
        names = page.get_by_role("region", name="Runs").locator("tbody tr strong")
        expect(names.first).to_have_text("llama-3b-instruct")
        expect(page.get_by_text(FIRST, exact=True)).to_have_count(0)
        # The first click sorts in descending order; the second puts the oldest first.
        page.get_by_role("button", name="Started").click()
        page.get_by_role("button", name="Started").click()
        expect(names.first).to_have_text(FIRST)
        assert not console_errors


@pytest.mark.more
def test_live_runs_are_listed_before_newer_ended_runs(site: Site, browser: Browser) -> None:
    run = RunFolder(site.root, "just-ended", "5" * 32, created_at=time.time() + 60)
    run.submit(1, 1, time.time())
    run.finish(1, AttemptState.COMPLETED, None, 5, time.time())
    with testbed.page_of(browser, site) as (page, _):
        page.goto("/")
        names = page.get_by_role("region", name="Runs").locator("tbody tr strong")
        expect(page.get_by_text("just-ended")).to_be_visible()
        shown = names.all_inner_texts()
        assert shown.index(LIVE) < shown.index("just-ended")


@pytest.mark.more
@pytest.mark.parametrize(
    ("width", "shown"), [(width, {"": "Duration", "/": "Last checkpoint"}) for width in (820, 1024)]
)
def test_tables_show_all_their_columns_in_a_window_of_medium_width(
    site: Site, browser: Browser, width: int, shown: dict[str, str]
) -> None:
    with testbed.page_of(browser, site, width=width) as (page, _):
        for path, name in {**shown, "/checkpoints": "Committed"}.items():
            page.goto(path if path == "/" else f"/runs/{LIVE}{path}")
            last = page.get_by_role("columnheader", name=name)
            expect(last).to_be_visible()
            hidden = "(one) => { const area = one.closest('.table-wrap');"
            assert last.evaluate(f"{hidden} return area.scrollWidth - area.clientWidth; }}") <= 0


@pytest.mark.more
def test_a_medium_window_names_ranks_attempts_and_goodput_below_each_run(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site, width=820) as (page, _):
        page.goto("/")
        row = page.get_by_role("region", name="Runs").get_by_role("row").filter(has_text=LIVE).first
        expect(row).to_contain_text(re.compile(r"\d+ ranks · \d+ attempts? · goodput \d"))
        expect(page.get_by_role("columnheader", name="Ranks")).to_be_hidden()
        page.set_viewport_size({"width": PHONE, "height": SCREEN})
        expect(row.get_by_text(re.compile("· checkpoint"))).to_be_visible()
        page.set_viewport_size({"width": 1440, "height": SCREEN})
        expect(page.get_by_role("columnheader", name="Ranks")).to_be_visible()


@pytest.mark.more
def test_a_token_revoked_while_a_dialog_is_open_is_stated(browser: Browser, tmp_path: Path) -> None:
    token = testbed.call(tmp_path, "token", "add", "ann", "--role", "operator")
    RunFolder(tmp_path / "runs", "only", "e" * 32)
    with (
        testbed.serving(tmp_path) as site,
        testbed.page_of(browser, site, logged_in=False) as (page, _),
    ):
        page.goto(f"/?token={token}")
        page.goto("/runs/only")
        page.get_by_role("button", name="Stop").click()
        testbed.call(tmp_path, "token", "revoke", "ann")
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        # Beside the alert that the run has no supervisor.
        ended = page.get_by_role("alert").filter(has_text="The session has ended.")
        expect(ended).to_be_visible()
        page.get_by_label("Token").fill(site.token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="only")).to_be_visible()
        expect(page.get_by_text("The session has ended.")).to_have_count(0)


@pytest.mark.more
def test_ages_are_by_the_clock_of_the_server(site: Site, browser: Browser) -> None:
    shift = "const now = Date.now; Date.now = () => now() - 3 * 3600_000;"
    with testbed.page_of(browser, site) as (page, _):
        page.add_init_script(shift)
        page.goto(f"/runs/{LIVE}")
        expect(page.locator(".facts time").first).to_have_text(re.compile(r"ago$"))


@pytest.mark.more
def test_a_lineage_whose_layout_did_not_load_says_so_and_tries_again(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site) as (page, _):
        page.route("**/elk-worker*", lambda route: route.abort())
        page.goto(f"/runs/{LIVE}/lineage")
        expect(page.get_by_role("alert")).to_contain_text("layout of graphs could not be loaded")
        page.unroute("**/elk-worker*")
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".react-flow__node").first).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.more
def test_times_and_numbers_have_the_format_of_the_reader(site: Site, browser: Browser) -> None:
    context = browser.new_context(
        base_url=site.url, locale="de-DE", timezone_id="Europe/Berlin", viewport=None
    )
    try:
        context.request.get(f"/?token={site.token}")
        page = context.new_page()
        page.goto(f"/runs/{LIVE}/events")
        expect(
            page.get_by_text(re.compile(r"^\d\d\.\d\d\.\d{4}, \d\d:\d\d:\d\d$")).first
        ).to_be_visible()
        exact = page.get_by_role("time").first.get_attribute("title")
        assert exact
        assert re.fullmatch(r"\d\d\.\d\d\.\d{4}, \d\d:\d\d:\d\d (MEZ|MESZ|GMT.*)", exact)
        page.goto(f"/runs/{LIVE}")
        expect(fact_of(page, "Committed step")).to_have_text("16.000")
    finally:
        context.close()


@pytest.mark.more
def test_heartbeats_update_steps_and_curves_and_silent_ranks_are_marked(
    site: Site, browser: Browser
) -> None:
    paths, step = RunPaths(site.root / LIVE), NEWEST + 40
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{LIVE}")
        loss = page.locator(".curves h3").first
        expect(loss).to_contain_text("loss")
        with open(paths.metrics_of(3, 1), "a") as metrics:
            metrics.write(json.dumps({"step": step, "time": time.time(), "loss": 7.25}) + "\n")
        beat(paths, 3, step, time.time())
        expect(loss).to_contain_text("7.25")
        page.get_by_role("link", name="Runs", exact=True).first.click()
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=LIVE, exact=True))
        expect(row).to_contain_text(f"{step:,}")
        expect(row).to_contain_text("left")
        # The agent fell silent just after it heard from its ranks.
        beat(paths, 3, step, time.time() - 90)
        page.goto(f"/runs/{LIVE}/ranks")
        expect(page.get_by_text("silent", exact=True)).to_be_visible()
        expect(page.get_by_text(re.compile(r"^1 min \d+ s ago$")).first).to_be_visible()
        expect(page.get_by_text("ms ago")).to_have_count(0)


@pytest.mark.more
def test_long_attempt_lists_are_collapsed(site: Site, browser: Browser) -> None:
    began = time.time() - 100 * HOUR
    run = RunFolder(site.root, "unlucky", "8" * 32, created_at=began)
    for number in range(1, 9):
        at = began + number * HOUR
        run.submit(number, 2, at)
        run.claim(number, at + 5)
        ended: dict[str, Any] = {"started_at": at + 5, "stop_requested_at": at + 50}
        state, cause = AttemptState.CANCELLED, Cause.OPERATOR
        run.finish(number, state, cause, number, at + 60, **ended)
        asked: dict[str, Any] = {"action": "pause", "by": "mia", "gpus": None}
        run.tell("cli", EventKind.OPERATOR_REQUEST, after_attempt=number, **asked)
    with testbed.page_of(browser, site) as (page, _):
        page.goto("/runs/unlucky")
        attempts = page.get_by_role("region", name="Attempts").get_by_role(
            "cell", name="paused by mia", exact=True
        )
        expect(attempts.first).to_be_visible()
        few = attempts.count()
        page.get_by_role("button", name="Show all 8 attempts").click()
        expect(attempts).not_to_have_count(few)
        expect(page.get_by_text("#1 · 2 GPUs")).to_be_visible()


@pytest.mark.more
def test_fork_dialog_ends_with_a_link_to_the_new_run(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/checkpoints/{LIVE}:step-00005000.a0001.l01")
        # A real fork starts a process, and other tests cover that.
        answer = {"run": "my-fork", "uid": "", "directory": "", "forked_from": ""}
        page.route("**/fork", lambda route: route.fulfill(status=201, json=answer))
        page.get_by_role("button", name="Fork", exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Fork").click()
        expect(dialog.get_by_role("link", name="my-fork")).to_be_visible()


@pytest.mark.more
def test_cancel_dialog_says_that_a_final_checkpoint_is_saved(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{LIVE}")
        page.get_by_role("button", name="Cancel", exact=True).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("saves a final checkpoint")
        expect(dialog).to_contain_text("Relaunch continues it")
        expect(dialog).not_to_contain_text("without")


@pytest.mark.more
def test_notices_show_time_and_attempt_and_earlier_ones_are_collapsed(
    site: Site, browser: Browser
) -> None:
    paths, now = RunPaths(site.root / LIVE), time.time()
    for number, at, finding in ((1, now - 5 * HOUR, "rank 2 reads"), (3, now, "rank 3 waits")):
        with clock(at), JournalWriter(paths.attempt(number).node_journal(0)) as journal:
            journal.append(EventKind.HANG_SUSPECTED, attempt=number, finding=finding)
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{LIVE}")
        current = page.get_by_text("rank 3 waits")
        expect(current).to_have_text(re.compile(r"rank 3 waits attempt 3, (just now|.* ago)$"))
        earlier = page.get_by_text("rank 2 reads")
        expect(earlier).to_be_hidden()
        page.get_by_text("1 earlier notice", exact=True).click()
        expect(earlier).to_be_visible()
        expect(earlier).to_have_text(re.compile(r"rank 2 reads attempt 1, 5 h.* ago$"))
        # The earlier notice is no longer current, so it has another colour.
        assert border_colour(earlier) != border_colour(current)


@pytest.mark.more
def test_axis_labels_are_not_clipped(site: Site, browser: Browser) -> None:
    began = time.time() - 3 * HOUR
    run = RunFolder(site.root, "round-number", "4" * 32, created_at=began)
    run.submit(1, 1, began)
    run.claim(1, began + 5)
    run.launch(1, 1, 0, None, 1)
    lines = [json.dumps({"step": n * 1000, "time": began + n, "loss": 1 / n}) for n in range(1, 11)]
    metrics = run.paths.metrics_of(1, 1)
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text("\n".join([*lines, ""]))
    run.finish(1, AttemptState.COMPLETED, None, 10_000, began + 60, started_at=began + 5)
    with testbed.page_of(browser, site) as (page, _):
        page.add_init_script(KEEP_LABELS)
        # The last step has a tick at the right edge of the chart.
        page.goto("/runs/round-number")
        document = page.locator("html")
        expect(document).to_have_attribute("data-labels", re.compile(r"\[10.000\]"))
        expect(document).to_have_attribute("data-clipped", "")


@pytest.mark.more
def test_run_whose_processes_were_all_killed_is_shown_as_unsupervised(
    site: Site, browser: Browser
) -> None:
    began = time.time() - HOUR
    run = RunFolder(site.root, UNSUPERVISED, "6" * 32, created_at=began)
    with clock(began):
        run.tell("flow", EventKind.SUPERVISED, host="", pid=7, flow_run="")
        run.submit(1, 2, began)
        run.claim(1, began + 5)
        run.launch(1, 1, 0, None)
        run.commit(40, 1, at=began + 30)
        run.finish(1, AttemptState.LOST, Cause.UNKNOWN, 60, began + 90, started_at=began + 5)
    with testbed.page_of(browser, site) as (page, console_errors):
        page.goto(f"/runs/{UNSUPERVISED}")
        expect(page.get_by_role("alert")).to_contain_text("No supervisor is running")
        assert value_of(page, "Committed step") == "40"
        page.get_by_role("button", name="Relaunch").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("No attempt is running.")
        expect(dialog).not_to_contain_text("saves")
        page.keyboard.press("Escape")
        page.goto("/runs/llama-3b-instruct")
        expect(page.get_by_text("none yet")).to_be_visible()
        assert not console_errors


@pytest.mark.more
def test_operator_requests_and_restarts_in_place_appear_without_reload(
    site: Site, browser: Browser
) -> None:
    paths = RunPaths(site.root / FORK)
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{FORK}")
        head = page.locator(".head")
        expect(head).to_contain_text("running")
        with JournalWriter(paths.attempt(1).node_journal(0)) as journal:
            facts: dict[str, Any] = {"attempt": 1, "ending": "crashed", "last_step": 7_186}
            journal.append(EventKind.LAUNCH_ENDED, launch=1, **facts)
            journal.append(EventKind.LAUNCH_STARTED, attempt=1, launch=2)
        with JournalWriter(paths.attempt(1).journal / "rank0.jsonl") as journal:
            resumed: dict[str, Any] = {"step": 7_000, "skipped": [], "world_size": 2}
            journal.append(EventKind.RESUMED, attempt=1, launch=2, **resumed)
        expect(page.get_by_text("launch 1 crashed at step")).to_be_visible()
        with JournalWriter(paths.journal_of("cli")) as journal:
            asked: dict[str, Any] = {
                "action": "pause",
                "by": "mia",
                "gpus": None,
                "after_attempt": 1,
            }
            journal.append(EventKind.OPERATOR_REQUEST, **asked)
        expect(head).to_contain_text("pausing")


@pytest.mark.more
def test_lineage_cards_open_by_key_and_show_that_the_parent_was_verified(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site) as (page, _):
        card = page.locator(f'.react-flow__node[data-id="{LIVE}:step-00005000.a0001.l01"]')
        for key in ("Enter", "Space"):
            page.goto(f"/runs/{FORK}/lineage")
            expect(card).to_contain_text("verified")
            card.focus()
            page.keyboard.press(key)
            expect(page.get_by_role("complementary")).to_contain_text("Step 5")


@pytest.mark.more
def test_arrow_keys_reach_cards_that_are_outside_of_the_window(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site, width=PHONE) as (page, console_errors):
        page.goto(f"/runs/{LIVE}/lineage")
        newest = page.locator(f'.react-flow__node[data-id="{LIVE}:step-00016000.a0003.l01"]')
        run = page.locator(".react-flow__node").filter(has=page.locator(".kind-run"))
        expect(newest).to_be_visible()
        expect(run).to_have_count(0)
        newest.focus()
        for _ in range(40):
            page.keyboard.press("ArrowUp")
            page.wait_for_timeout(50)
        focused = page.locator(".react-flow__node:focus-visible .graph-node")
        expect(focused).to_have_class(re.compile("kind-run"))
        expect(focused).to_be_in_viewport()
        assert "solid" in focused.evaluate("(one) => getComputedStyle(one).outline")
        assert not console_errors


@pytest.mark.more
def test_timeline_opened_before_the_first_attempt_fits_the_screen(
    site: Site, browser: Browser
) -> None:
    run = RunFolder(site.root, "not-begun", "7" * 32, created_at=time.time())
    with testbed.page_of(browser, site, width=PHONE) as (page, _):
        page.goto("/runs/not-begun")
        expect(page.get_by_text("No attempt yet")).to_be_visible()
        run.submit(1, 2, time.time() - 60)
        run.claim(1, time.time() - 30)
        timeline = page.locator("svg.timeline")
        expect(timeline).to_be_visible()
        box = timeline.bounding_box()
        assert box
        assert box["width"] < PHONE


def test_errors_are_found_in_all_logs_and_shown_in_their_place(
    site: Site, browser: Browser
) -> None:
    with testbed.page_of(browser, site, width=390) as (page, console_errors):
        page.goto("/runs/bert-classifier/logs")
        page.get_by_role("button", name="Find errors").press("Enter")
        expect(page.get_by_text("2 lines found; searched all")).to_be_visible()
        page.get_by_role("button", name="ValueError: Expected input").press("Enter")
        expect(page.locator("mark")).to_have_text(re.compile("^ValueError: Expected input"))
        expect(page.get_by_label(re.compile("^File"))).to_have_value(re.compile("stderr"))
        page.get_by_role("button", name="First error").press("Enter")
        expect(page.locator("mark")).to_have_text("Traceback (most recent call last):")
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download").click()
        name = downloading.value.suggested_filename
        assert name == "bert-classifier-attempts-0001-logs-node-0000-l01-rank-00001.stderr.log"
        assert "ValueError" in downloading.value.path().read_text()
        assert console_errors == []
