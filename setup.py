"""Everything is in pyproject.toml; here is what refuses to build a wheel without the web page."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

PAGE = Path(__file__).resolve().parent / "src" / "holdfast" / "api" / "static" / "index.html"
VARIABLE = "HOLDFAST_WHEEL_WITHOUT_PAGE"


class BuildWheel(bdist_wheel):
    """A wheel, which contains the page unless it is asked to go without."""

    def run(self) -> None:
        if not PAGE.is_file() and not os.environ.get(VARIABLE):
            raise SystemExit(
                f"{PAGE} does not exist, so `holdfast serve` of this wheel would have no page. "
                "Build it with `make page` (needs Node 18 or newer), or set "
                f"{VARIABLE}=1 for a wheel without the page, such as for training containers."
            )
        super().run()


setup(cmdclass={"bdist_wheel": BuildWheel})
