"""The Sphinx extension of the documentation site: generated reference pages, and links.

- `<!-- generated: NAME -->` in a page of docs/ becomes the reference that `PAGES` makes for NAME.
  The line below it links to the same text in docs/generated, for readers of the checkout.
- Links out of docs/ lead to the page that includes the file, or to a page with the file's text.
- The version switcher reads `versions.json` beside the folders of the versions.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

from holdfast_docs import links, sources
from holdfast_docs.pages import CHECKOUT_PAGES, PAGES

MARKER: Final = re.compile(
    r"^<!-- generated: ([a-z-]+) -->$(?:\n\[.*\]\(generated/[a-z]+\.md\)$)?", re.MULTILINE
)
logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension. Called by Sphinx."""
    # Name of the version in the switcher, and the folder that the site is in.
    app.add_config_value("holdfast_version", "dev", "html", str)
    # Where files of the repository are shown, such as https://host/owner/holdfast/blob/main.
    # Empty: the site has a page for each file that a page links to.
    app.add_config_value("holdfast_repository", "", "env", str)
    app.connect("config-inited", set_up_switcher)
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("doctree-read", sources.note_links)
    app.connect("doctree-resolved", sources.resolve_links)
    app.connect("html-collect-pages", sources.make_pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}


def set_up_switcher(_app: Sphinx, config: Config) -> None:
    """The file with the versions lies beside the folder of this one."""
    config.html_theme_options["switcher"] = {
        "json_url": "../versions.json",
        "version_match": config.holdfast_version,
    }


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Fill in what is generated, and let links lead to pages of the site."""
    page = str(app.env.doc2path(name, base=False))
    source[0] = links.rewrite(MARKER.sub(lambda found: generate(found[1], name), source[0]), page)


def read_included(app: Sphinx, path: Any, _parent: str, content: list[str]) -> None:
    """Links of an included file are relative to that file."""
    page = str(app.env.doc2path(app.env.current_document.docname, base=False))
    content[0] = links.rewrite(content[0], page, origin=links.in_repository(str(path)))


def generate(page: str, where: str) -> str:
    """The reference `page` as Markdown; a warning, which ends a strict build, for unknown ones."""
    if page in CHECKOUT_PAGES.keys() - PAGES.keys():
        return ""
    if page not in PAGES:
        logger.warning(
            "no generated page %r; expected one of %s", page, ", ".join(PAGES), location=where
        )
        return ""
    return PAGES[page]()
