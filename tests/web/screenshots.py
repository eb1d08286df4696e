"""`make screenshots`: pictures of the web page and of the documentation site.

A real server shows the runs of `sample_runs` in a real Chromium. The site is the one that was built
last. Each view is taken twice: wide with the light theme, and narrow with the dark theme. The site
is taken once in each look.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser
from tests.web import testbed
from tests.web.sample_runs import (
    LIVE,
    MINUTE,
    NEWEST,
    beat,
    supervised,
    write_held_run,
    write_sample_runs,
)

from holdfast.contracts.disk.paths import RunPaths

PINNED: Final = f"{LIVE}:step-00005000.a0001.l01"
LAST: Final = f"{LIVE}:step-00008500.a0002.l01"
# File name: path, and a text that appears once the view has loaded.
VIEWS: Final = {
    "runs": ("/", "vit-l-ablation"),
    "queue": ("/queue", "llama-3b-instruct"),
    "run": (f"/runs/{LIVE}", "Where the time went"),
    "checkpoints": (f"/runs/{LIVE}/checkpoints", "keep.last"),
    "lineage": (f"/runs/{LIVE}/lineage", "A dashed card"),
    "ranks": (f"/runs/{LIVE}/ranks", "Rank"),
    "errors": ("/runs/bert-classifier/errors", "Errors in order"),
    "logs": (f"/runs/{LIVE}/logs", "Following"),
    "events": (f"/runs/{LIVE}/events", "Details"),
    "checkpoint": (f"/checkpoints/{PINNED}", "Ancestry"),
    "compare": (f"/compare?a={PINNED}&b={LAST}", "Differences"),
    "compare-runs": (f"/compare?runs={LIVE},{LIVE}-8k", "Differences"),
    "goodput": ("/goodput", "Productive"),
    "nodes": ("/nodes", "gpu-11"),
    "storage": ("/storage", "Prunable"),
}
# Page of the documentation site and the look of its picture.
SITE: Final = Path(__file__).parents[2] / "build" / "docs" / "dev"
SITE_PAGES: Final = {
    "site": ("index.html", ""),
    "site-first-run": ("first-run-on-slurm.html", "-narrow"),
}
# File name suffix: width and height in pixels, and the theme.
LOOKS: Final = {"": (1440, 900, "light"), "-narrow": (390, 844, "dark")}
# Longer pages are cropped to this height.
HEIGHT_MAX: Final = 1400
COLOURS: Final = 256
FIT_ROUNDS: Final = 4
# The graph and the curves are drawn some time after their data arrive.
SETTLE_MS: Final = 1500


def main(target: Path) -> None:
    """Write all views under `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        write_sample_runs(Path(folder) / "runs", time.time())
        write_held_run(Path(folder) / "runs", time.time() - 12 * MINUTE)
        with (
            supervised(Path(folder) / "runs"),
            testbed.serving(Path(folder)) as site,
            testbed.chromium() as browser,
        ):
            for name in VIEWS:
                for look in LOOKS:
                    path = target / f"{name}{look}.png"
                    path.write_bytes(picture(browser, site, name, look))
                    print(path)
            for name, (page, look) in SITE_PAGES.items():
                path = target / f"{name}{look}.png"
                path.write_bytes(site_picture(browser, SITE / page, look))
                print(path)


def picture(browser: Browser, site: testbed.Site, name: str, look: str) -> bytes:
    """One view as PNG with a palette."""
    path, text = VIEWS[name]
    width, height, theme = LOOKS[look]
    with testbed.page_of(browser, site, width=width, theme=theme) as (page, _):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(reduced_motion="reduce")
        # A fresh heartbeat, so that the live run's node does not count as silent.
        beat(RunPaths(site.root / LIVE), 3, NEWEST, time.time())
        page.goto(path)
        page.get_by_text(text).locator("visible=true").first.wait_for()
        page.get_by_text("Laying out").wait_for(state="hidden")
        page.wait_for_timeout(SETTLE_MS)
        return small_png(page.screenshot(full_page=True))


def site_picture(browser: Browser, path: Path, look: str) -> bytes:
    """One page of the documentation site as PNG with a palette."""
    width, height, theme = LOOKS[look]
    page = browser.new_page(viewport={"width": width, "height": height})
    try:
        page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        page.goto(path.as_uri())
        page.wait_for_timeout(SETTLE_MS)
        return small_png(page.screenshot())
    finally:
        page.close()


def small_png(content: bytes) -> bytes:
    """A screenshot with few colours, cropped to `HEIGHT_MAX`."""
    shot = Image.open(io.BytesIO(content))
    few = shot.convert("RGB").crop((0, 0, shot.width, min(shot.height, HEIGHT_MAX)))
    small = io.BytesIO()
    # Rare colours show states, so the palette covers them first and is then fitted to all.
    found = few.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, FIT_ROUNDS, dither=Image.Dither.NONE)
    found.save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
