"""The heat map of 4,096 ranks: its frames per second, its cursor, and the GPUs below it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.runs import RunFolder
from tests.support.series import sample_gpu, write_gpus, write_scene
from tests.web import testbed
from tests.web.testbed import Site

from holdfast.workers.nodes.series import RankTimes

RUN: Final = "many-ranks"
NODES: Final = 512
PER_NODE: Final = 8
BUCKETS: Final = 500
SLOW: Final = 2741
FRAME_S: Final = 1 / 60
# A frame is drawn at the display's next refresh, so one that is a little late takes two.
FRAME_S_MAX: Final = 1.1 * FRAME_S

# Moves the pointer, or scrolls, before each frame for some seconds. Returns the milliseconds
# between the frames.
FRAMES: Final = """
async ([seconds, scrolls]) => {
  const map = document.querySelector(".heat"), inside = map.firstElementChild;
  const box = map.getBoundingClientRect(), times = [];
  const began = performance.now();
  for (let at = began, n = 0; at - began < 1000 * seconds; n += 1) {
    if (scrolls) map.scrollTop = (n * 37) % (map.scrollHeight - map.clientHeight);
    inside.dispatchEvent(new MouseEvent("mousemove", { bubbles: true,
      clientX: box.left + (n * 7) % box.width, clientY: box.top + (n * 5) % box.height }));
    const next = await new Promise(requestAnimationFrame);
    times.push(next - at);
    at = next;
  }
  return times.slice(1);
}
"""

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home, began = tmp_path_factory.mktemp("heat"), time.time() - 6000
    folder = RunFolder(home / "runs", RUN, "a" * 32, created_at=began)
    folder.submit(1, NODES * PER_NODE, began)
    folder.claim(1, began + 5)
    attempt, draw = folder.paths.attempt(1), random.Random(7)

    def times(rank: int, bucket: int) -> RankTimes:
        is_slow = rank == SLOW and 200 <= bucket < 320
        step_s = (1.9 if 200 <= bucket < 320 else 1.0) * draw.gauss(1.0, 0.02)
        return RankTimes(step_s, 1.0 if is_slow else 0.02, 0.0 if is_slow else step_s - 0.8)

    write_scene(attempt, times, start=began, nodes=NODES, per_node=PER_NODE, buckets=BUCKETS)
    beats = (
        tuple(sample_gpu(index, bucket, 300 if index == 3 else None) for index in range(8))
        for bucket in range(BUCKETS)
    )
    write_gpus(attempt, beats, start=began)
    with testbed.serving(home) as served:
        yield served


def open_map(page: Page) -> None:
    page.goto(f"/runs/{RUN}/ranks")
    expect(page.get_by_role("application")).to_be_visible()


def rate(page: Page, **options: Any) -> float:
    """The median time between two frames, in seconds."""
    times = page.evaluate(FRAMES, [3, options.get("scrolls", False)])
    ordered = sorted(times)
    middle, late = ordered[len(ordered) // 2] / 1000, ordered[len(ordered) * 99 // 100] / 1000
    print(f"{options}: {len(times)} frames, median {middle * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms")
    return float(middle)


def test_4096_ranks_are_drawn_at_60_frames_a_second(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, errors):
        open_map(page)
        assert rate(page) <= FRAME_S_MAX
        page.get_by_label("Zoom").select_option("64")
        assert rate(page, scrolls=True) <= FRAME_S_MAX
        assert errors == []


def test_the_straggler_is_named_and_found_by_keyboard(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site, width=390, theme="dark") as (page, errors):
        open_map(page)
        host = f"node-{SLOW // PER_NODE}"
        expect(page.get_by_text(f"rank {SLOW} on {host} (24.0 % of the time)")).to_be_visible()
        page.get_by_role("button", name=f"Show rank {SLOW}").press("Enter")
        page.get_by_role("combobox", name="Show").select_option("data")
        heat = page.get_by_role("application", name="Wait for data of 4,096 ranks over time")
        heat.press("Home")
        reading = page.locator(".heat-read")
        expect(reading).to_contain_text(f"Rank {SLOW} on {host} · wait for data 20 ms")
        heat.press("ArrowDown")
        expect(reading).to_contain_text(f"Rank {SLOW + 1} on {host}")
        expect(page.get_by_text("GPU 3: Xid 79")).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390
        assert errors == []


def test_the_whole_map_is_small_on_the_wire(site: Site, browser: Browser) -> None:
    with testbed.page_of(browser, site) as (page, _):
        began = time.monotonic()
        answer = page.request.get(
            f"/api/v1/runs/{RUN}/heat-map", headers={"Accept-Encoding": "gzip"}
        )
        took_s = time.monotonic() - began
        sent = answer.headers_array
        found = json.loads(answer.body())
        assert (len(found["rows"]), found["buckets"]) == (NODES * PER_NODE, BUCKETS)
        size = next((int(h["value"]) for h in sent if h["name"].lower() == "content-length"), 0)
        print(f"{size} bytes in {took_s:.2f} s")
        assert 0 < size <= 300_000
