"""`make screenshots`: what the page looks like, for the documentation.

A real server over the runs of `scene`, a real Chromium, one file for each view.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.web import stand
from tests.web.scene import LIVE, beat, lay_out

from holdfast.contracts.paths import RunPaths

PINNED: Final = f"{LIVE}:step-00005000.a0001.i01"
LAST: Final = f"{LIVE}:step-00008500.a0002.i01"
# File's name: path, width, theme, and a text that is there once the view is.
VIEWS: Final = {
    "runs": ("/", 1440, "light", "vit-l-ablation"),
    "runs-dark": ("/", 1440, "dark", "vit-l-ablation"),
    "runs-narrow": ("/", 390, "light", "vit-l-ablation"),
    "run": (f"/runs/{LIVE}", 1440, "light", "Where the time went"),
    "run-narrow-dark": (f"/runs/{LIVE}", 390, "dark", "Where the time went"),
    "ranks": (f"/runs/{LIVE}/ranks", 1440, "light", "99 %"),
    "events-dark": (f"/runs/{LIVE}/events", 1440, "dark", "Written by"),
    "lineage": (f"/runs/{LIVE}/lineage", 1440, "light", "A dashed card"),
    "checkpoint": (f"/checkpoints/{PINNED}", 1440, "light", "Ancestry"),
    "compare-dark": (f"/compare?a={PINNED}&b={LAST}", 1440, "dark", "Facts that differ"),
    "goodput": ("/goodput", 1440, "light", "Productive"),
    "nodes": ("/nodes", 1440, "light", "gpu-11"),
    "storage-dark": ("/storage", 1440, "dark", "Would be pruned"),
}
STEP: Final = 16_200
# Graph and curves are drawn after their data have come.
SETTLE_MS: Final = 1500


def main(target: Path) -> None:
    """Write all views under `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder) / "runs", time.time())
        with stand.serving(Path(folder)) as site, stand.chromium() as browser:
            for name, (path, width, theme, text) in VIEWS.items():
                with stand.looking(browser, site, width=width, theme=theme) as (page, _):
                    # The live run's node has just been heard of.
                    beat(RunPaths(site.root / LIVE), 3, STEP, time.time())
                    page.goto(path)
                    page.get_by_text(text).first.wait_for()
                    page.get_by_text("Finding places").wait_for(state="hidden")
                    page.wait_for_timeout(SETTLE_MS)
                    page.screenshot(path=target / f"{name}.png", full_page=True)
                    print(target / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
