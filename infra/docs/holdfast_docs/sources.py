"""Pages with the text of the repository's files that other pages link to.

So no link of the site leaves it, and each leads to the file as it was at this version. With
`holdfast_repository` set, the links lead there instead.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

from holdfast_docs.links import CHECKOUT, SOURCE

FOLDER: Final = "source"
# A page with more is of no use to a reader.
BYTES_MAX: Final = 1_000_000
logger = logging.getLogger(__name__)


def note_links(app: Sphinx, document: nodes.document) -> None:
    """Warn of links to folders without a README and to files that are too long for a page."""
    for reference, path in _links(document):
        if not _shown(path).is_file():
            logger.warning("link to %s: expected a file", path, location=reference)
        elif _shown(path).stat().st_size > BYTES_MAX:
            logger.warning("link to %s: more than %d bytes", path, BYTES_MAX, location=reference)


def resolve_links(app: Sphinx, document: nodes.document, page: str) -> None:
    """Let links lead to the repository's own site, or to the page with the file's text."""
    for reference, path in _links(document):
        if app.config.holdfast_repository:
            reference["refuri"] = f"{app.config.holdfast_repository}/{path}"
        else:
            reference["refuri"] = app.builder.get_relative_uri(page, page_of(path))


def make_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that is linked to: name, context and template."""
    if app.config.holdfast_repository:
        return
    paths = {path for name in app.env.found_docs for _, path in _links(app.env.get_doctree(name))}
    for path in sorted(path for path in paths if _shown(path).is_file()):
        yield page_of(path), {"title": path, "body": _body(path)}, "page.html"


def page_of(path: str) -> str:
    """The name of the page for a file or a folder."""
    return f"{FOLDER}/{path}"


def _links(document: nodes.document) -> list[tuple[nodes.reference, str]]:
    start = f"{SOURCE}:"
    found = document.findall(nodes.reference)
    return [
        (one, uri[len(start) :])
        for one in found
        if (uri := one.get("refuri", "")).startswith(start)
    ]


def _shown(path: str) -> Path:
    """The file that a link to `path` shows: of a folder, its README."""
    full = CHECKOUT / path
    return full / "README.md" if full.is_dir() else full


def _body(path: str) -> str:
    file = _shown(path)
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    code = highlight(file.read_text(), lexer, HtmlFormatter(cssclass="highlight", wrapcode=True))
    return f"<h1><code>{html.escape(path)}</code></h1>\n{code}"
