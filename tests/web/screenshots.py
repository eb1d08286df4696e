"""`make screenshots`: pictures of the web page for the documentation.

A real server shows the runs of `sample_runs` in a real Chromium. Each view is taken twice: wide
with the light theme, and narrow with the dark theme.
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
from tests.web.sample_runs import LIVE, NEWEST, beat, supervised, write_sample_runs

from holdfast.contracts.paths import RunPaths

PINNED: Final = f"{LIVE}:step-00005000.a0001.l01"
LAST: Final = f"{LIVE}:step-00008500.a0002.l01"
# File name: path, and a text that appears once the view has loaded.
VIEWS: Final = {
    "runs": ("/", "vit-l-ablation"),
    "run": (f"/runs/{LIVE}", "Where the time went"),
    "checkpoints": (f"/runs/{LIVE}/checkpoints", "keep.last"),
    "lineage": (f"/runs/{LIVE}/lineage", "A dashed card"),
    "ranks": (f"/runs/{LIVE}/ranks", "Rank"),
    "logs": (f"/runs/{LIVE}/logs", "Following"),
    "events": (f"/runs/{LIVE}/events", "Facts"),
    "checkpoint": (f"/checkpoints/{PINNED}", "Ancestry"),
    "compare": (f"/compare?a={PINNED}&b={LAST}", "Differences"),
    "goodput": ("/goodput", "Productive"),
    "nodes": ("/nodes", "gpu-11"),
    "storage": ("/storage", "Prunable"),
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
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    few = shot.convert("RGB").crop((0, 0, shot.width, min(shot.height, HEIGHT_MAX)))
    content = io.BytesIO()
    # Rare colours show states, so the palette covers them first and is then fitted to all.
    found = few.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, FIT_ROUNDS, dither=Image.Dither.NONE)
    found.save(content, "PNG", optimize=True)
    return content.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
