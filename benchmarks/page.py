"""Speed of the web page: first view, size, live updates, and a graph of ten thousand checkpoints.

It also measures how the memory of an open page grows.

    PYTHONPATH=. .venv/bin/python benchmarks/page.py [--checkpoints 10000] [--runs 10000]

The first view and the navigation are also measured with an index of `--runs` runs, of which one in
twenty is live. They have no folders on disk.

It uses a real server and a headless Chromium. Run it on a quiet machine. The times are those of
this machine, and include drawing without a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.lineage_fill import fill
from playwright.sync_api import Browser, Page
from tests.support.runs import RunFolder
from tests.web import testbed
from tests.web.sample_runs import write_sample_runs

from holdfast.contracts.disk.journal import EventKind
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import open_database

ROUNDS: Final = 5
# Longer than a frame takes.
FRAME_MS: Final = 300.0
STEPS: Final = 20
ROWS: Final = 10
PAN_S: Final = 5.0
PANS: Final = 60
# The newest checkpoints that a page shows are at most as many.
FULL: Final = 600
# Until the caches of the page are full.
WARM_S: Final = 600
# The least heap in each of as many parts of the time counts: more is what the page still works on.
HEAP_PARTS: Final = 10
DEEP: Final = "deep"
# Counts the frames that the page draws while the mouse drags it.
COUNT_FRAMES: Final = """() => {
    window.frames_ = [];
    const note = (now) => { window.frames_.push(now); requestAnimationFrame(note); };
    requestAnimationFrame(note);
}"""

ROW: Final = "tbody tr"
CARD: Final = ".react-flow__node"
# Notes the milliseconds from the navigation to the first frame with an element.
NOTE_FIRST: Final = """
    const watch = new MutationObserver(() => {
        if (!document.querySelector("SELECTOR")) return;
        watch.disconnect();
        requestAnimationFrame(() => setTimeout(() => window.first_ = performance.now()));
    });
    watch.observe(document, { subtree: true, childList: true });
"""


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=20, help="how long the heap is watched")
    given = parser.parse_args()
    count = given.checkpoints
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_sample_runs(home / "runs", time.time())
        make_deep(home / "runs", count)
        live = RunFolder(home / "runs", "committing", "8" * 32, created_at=time.time())
        live.submit(1, 2, time.time())
        live.claim(1, time.time())
        with testbed.serving(home) as site, testbed.chromium() as browser:
            figures: dict[str, Any] = {
                "first_load_script_bytes_gzip": script_bytes(browser, site),
                "first_view_s": first_view(browser, site),
                "graph": graph(browser, site, count),
                "news_s": news(browser, site, live),
                "heap_growth_mib_per_h": heap_growth(
                    browser, site, live, WARM_S + 60 * given.minutes
                ),
            }
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/holdfast.db"
        upgrade(url)
        with open_database(url) as database:
            fill(database, given.runs, 20 * given.runs)
        with testbed.serving(Path(folder)) as site, testbed.chromium() as browser:
            figures["many_runs"] = {
                "runs": given.runs,
                "first_view_s": first_view(browser, site),
                "navigation_s": navigation(browser, site),
            }
    print(json.dumps(figures, indent=1))


def make_deep(root: Path, count: int) -> None:
    """Create a run of one attempt with `count` checkpoints, one of them pinned."""
    run = RunFolder(root, DEEP, "9" * 32, created_at=time.time())
    run.submit(1, 2, time.time())
    run.claim(1, time.time())
    run.launch(1, 1, 0, None)
    parent = None
    for step in range(10, 10 * count + 1, 10):
        parent = f"{DEEP}:{run.commit(step, 1, parent=parent, at=time.time())}"
    name = f"step-{count // 2 * 10:08d}.a0001.l01"
    run.tell("cli", EventKind.PINNED, checkpoint=name, by="bench", note="")


def script_bytes(browser: Browser, site: testbed.Site) -> int:
    """Return the compressed bytes of the scripts that the first page loads."""
    loaded: list[bytes] = []
    with testbed.page_of(browser, site) as (page, _):
        page.on(
            "response", lambda got: loaded.append(got.body()) if got.url.endswith(".js") else None
        )
        page.goto("/")
        page.get_by_role("table").wait_for()
    return sum(len(gzip.compress(content, 9)) for content in loaded)


def first_view(browser: Browser, site: testbed.Site, path: str = "/", seen: str = ROW) -> float:
    """Return the median seconds from an empty cache until the first element `seen` is drawn.

    By the clock of the page, because the driver of the browser looks only now and then.
    """
    found: list[float] = []
    for _ in range(ROUNDS):
        with testbed.page_of(browser, site) as (page, _console_errors):
            page.add_init_script(NOTE_FIRST.replace("SELECTOR", seen))
            page.goto(path)
            page.locator(seen).first.wait_for()
            page.wait_for_timeout(FRAME_MS)
            found.append(page.evaluate("window.first_") / 1000)
    return statistics.median(found)


def navigation(browser: Browser, site: testbed.Site) -> dict[str, float]:
    """Return the seconds from a click on a run to its page, and back to the list: p50 and p95."""
    found = []
    with testbed.page_of(browser, site) as (page, _):
        page.goto("/")
        for turn in range(STEPS):
            link = page.get_by_role("table").get_by_role("link").nth(turn % ROWS)
            name = link.inner_text()
            row = page.get_by_role("table").get_by_role("link", name=name, exact=True)
            for act, seen in (
                (link.click, page.get_by_role("heading", name=name)),
                (page.go_back, row),
            ):
                began = time.monotonic()
                act()
                seen.wait_for()
                found.append(time.monotonic() - began)
    cuts = statistics.quantiles(found, n=20)
    return {"p50": statistics.median(found), "p95": cuts[-1]}


def graph(browser: Browser, site: testbed.Site, count: int) -> dict[str, Any]:
    """Measure the deep run's graph: seconds until it is shown, and frames per second."""
    seen_s = first_view(browser, site, f"/runs/{DEEP}/lineage", CARD)
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{DEEP}/lineage")
        page.locator(CARD).first.wait_for()
        folded = page.locator(CARD).count()
        folded_rate = pan(page)
        # Unfold everything, as a person does who searches for one checkpoint.
        while page.locator(".kind-fold").count() and page.locator(".kind-fold").count() < 200:
            before = page.locator(CARD).count()
            page.locator(".kind-fold").first.click()
            page.wait_for_timeout(700)
            if page.locator(CARD).count() <= before:
                break
        opened = page.locator(CARD).count()
        return {
            "checkpoints": count,
            "seen_after_s": seen_s,
            "cards": folded,
            "frames_per_s": folded_rate,
            "cards_opened": opened,
            "frames_per_s_opened": pan(page),
        }


def pan(page: Page) -> float:
    """Return the frames per second while the graph is dragged back and forth."""
    box = page.locator(".react-flow__pane").bounding_box()
    assert box is not None
    page.evaluate(COUNT_FRAMES)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] - 20
    page.mouse.move(x, y)
    page.mouse.down()
    began = time.monotonic()
    turn = 0
    while time.monotonic() - began < PAN_S and turn < PANS * 100:
        page.mouse.move(x + (turn % PANS - PANS / 2) * 6, y)
        turn += 1
    page.mouse.up()
    moments: list[float] = page.evaluate("window.frames_")
    return (len(moments) - 1) / ((moments[-1] - moments[0]) / 1000)


def news(browser: Browser, site: testbed.Site, run: RunFolder) -> float:
    """Return the worst of several times from a commit to its line on the run's open page."""
    worst = 0.0
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{run.name}/checkpoints")
        page.get_by_text("live", exact=True).wait_for()
        for turn in range(ROUNDS):
            step = 90_000 + turn
            began = time.monotonic()
            run.commit(step, 1, at=time.time())
            shown = f"{step:,}"
            page.get_by_role("link", name=shown, exact=True).wait_for()
            worst = max(worst, time.monotonic() - began)
    return worst


def heap_growth(browser: Browser, site: testbed.Site, run: RunFolder, open_s: float) -> float:
    """Return the MiB per hour by which the heap of a run's page grows that is open for `open_s`.

    The run commits every second, the shortest time after which a page updates, and every list on
    the page is full. The rate is that of a line through the least sizes after garbage collections.
    """
    steps = itertools.count(100_000)
    for step in itertools.islice(steps, FULL):
        run.commit(step, 1, at=time.time())
    sizes: list[tuple[float, float]] = []
    with testbed.page_of(browser, site) as (page, _):
        page.goto(f"/runs/{run.name}")
        page.get_by_text("live", exact=True).wait_for()
        session = page.context.new_cdp_session(page)
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < open_s:
            run.commit(next(steps), 1, at=time.time())
            page.wait_for_timeout(1000)
            if passed_s > WARM_S:
                session.send("HeapProfiler.collectGarbage")
                used = session.send("Runtime.getHeapUsage")["usedSize"]
                sizes.append((passed_s / 3600, used / 2**20))
    each = max(1, len(sizes) // HEAP_PARTS)
    parts = [sizes[at : at + each] for at in range(0, len(sizes), each)]
    least = [min(part, key=lambda size: size[1]) for part in parts]
    return statistics.linear_regression(*zip(*least, strict=True)).slope


if __name__ == "__main__":
    main()
