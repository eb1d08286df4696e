"""Build the documentation site: this version in a separate folder, and the list of versions.

    .venv/bin/python infra/docs/build_site.py [--site DIR] [--release] [--base-url URL]

Versions that are already in the folder of the site stay there, and stay in the version switcher.
A warning of Sphinx, such as one of a broken link, ends the build with status 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from sphinx.cmd.build import build_main

CHECKOUT: Final = Path(__file__).resolve().parents[2]
SITE: Final = CHECKOUT / "build" / "docs"
# Name and folder of a site that was not built from a release.
UNRELEASED: Final = "dev"
VERSIONS: Final = "versions.json"
_NUMBER: Final = re.compile(r"\d+")
_REDIRECT: Final = """\
<!doctype html>
<meta charset="utf-8">
<title>Holdfast documentation</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">Holdfast documentation</a>
"""


def main() -> int:
    """Exit status: 0 built, 1 the pages have problems, 2 the call is wrong."""
    options = parse_options()
    from holdfast.contracts.version import holdfast_version

    version = holdfast_version() if options.release else UNRELEASED
    began = time.monotonic()
    status = build(options.site / version, version, options.repository)
    if status == 0:
        write_versions(options.site, options.base_url)
        seconds = time.monotonic() - began
        print(f"{options.site / version}: built in {seconds:.0f} s", file=sys.stderr)
    return status


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--site", type=Path, default=SITE, help="folder with all versions (build/docs)"
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help=f"name this version by its number; without it, the name is {UNRELEASED!r}",
    )
    parser.add_argument(
        "--base-url", default="/", help="where --site is served, such as https://host/docs/ (/)"
    )
    parser.add_argument(
        "--repository",
        default="",
        help="where the repository's files are shown, such as https://host/owner/name/blob/main; "
        "without it, the site has a page for each file that a page links to",
    )
    return parser.parse_args()


def build(target: Path, version: str, repository: str = "") -> int:
    """Build the pages into `target`; the status of Sphinx, 1 when there was a warning.

    The folder is replaced when the build is done, so a page that is gone is not left there.
    """
    settings = {"holdfast_version": version, "holdfast_repository": repository.rstrip("/")}
    overrides = [f"-D{name}={value}" for name, value in settings.items()]
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        built, cache = Path(folder, "html"), Path(folder, "doctrees")
        folders = ["--doctree-dir", str(cache), str(CHECKOUT / "docs"), str(built)]
        status = build_main(["--builder", "html", *strict, *overrides, *folders])
        if status == 0:
            shutil.rmtree(target, ignore_errors=True)
            built.rename(target)
    return status


def write_versions(site: Path, base_url: str) -> None:
    """List the versions in the folder of the site, and let its address lead to the newest."""
    names = [path.parent.name for path in site.glob("*/searchindex.js")]
    names.sort(key=_order, reverse=True)
    newest = next((name for name in names if name != UNRELEASED), UNRELEASED)
    listed = [
        {
            "name": f"{name} (newest release)" if name == newest != UNRELEASED else name,
            "version": name,
            "url": f"{base_url.rstrip('/')}/{name}/",
            "preferred": name == newest,
        }
        for name in names
    ]
    (site / VERSIONS).write_text(json.dumps(listed, indent=2) + "\n")
    (site / "index.html").write_text(_REDIRECT.format(version=newest))


def _order(name: str) -> tuple[bool, tuple[int, ...]]:
    """By number; what is not released comes first in the list."""
    return name == UNRELEASED, tuple(map(int, _NUMBER.findall(name)))


if __name__ == "__main__":
    sys.exit(main())
