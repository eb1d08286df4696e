"""Links between files of the repository, as links between pages of the site.

The pages are written for readers of the repository: their links are relative paths. On the site,
README.md and other files above docs/ are parts of pages that include them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[3]
DOCS: Final = "docs"
# Scheme of links to files that are no pages; `sources` resolves them.
SOURCE: Final = "source"
INCLUDE: Final = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
# Where the site has another page for what the repository shows there.
MOVED: Final = {
    "docs": "docs/index.md",
    "docs/README.md": "docs/index.md",
    "docs/decisions": "docs/decisions.md",
}
_CODE: Final = re.compile(
    r"(^(`{3,}|~{3,})[^\n]*\n.*?^\2[ ]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL
)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def in_repository(path: str) -> str:
    """A path relative to docs/, relative to the repository."""
    return posixpath.normpath(posixpath.join(DOCS, path))


def included_files() -> Mapping[str, str]:
    """Pages by the file outside of docs/ that they include, both relative to the repository."""
    found: dict[str, str] = {}
    for page in sorted((CHECKOUT / DOCS).glob("*.md")):
        for target in INCLUDE.findall(page.read_text()):
            found[in_repository(target)] = f"{DOCS}/{page.name}"
    return found


def rewrite(text: str, page: str, *, origin: str | None = None) -> str:
    """`text`, which stands in the file `origin`, with links as the page `page` needs them.

    `page` is relative to docs/, `origin` to the repository; it is the page itself unless given.
    Code stays as it is.
    """
    origin = origin or in_repository(page)
    moved = {**MOVED, **included_files()}
    pieces = _CODE.split(text)
    # Three pieces for each match: the text before it, the code, and the fence inside the code.
    for number in range(0, len(pieces), 3):
        pieces[number] = _LINK.sub(
            lambda found: f"]({_target(found[1], page, origin, moved)})", pieces[number]
        )
    return "".join(piece or "" for n, piece in enumerate(pieces) if n % 3 != 2)


def _target(link: str, page: str, origin: str, moved: Mapping[str, str]) -> str:
    path, mark, anchor = link.partition("#")
    if not path or _SCHEME.match(path) or path.startswith("/"):
        return link
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    wanted = moved.get(wanted, wanted)
    if not (CHECKOUT / wanted).exists():
        return link
    if posixpath.dirname(f"{wanted}/").startswith(f"{DOCS}/"):
        folder = posixpath.dirname(in_repository(page))
        return posixpath.relpath(wanted, folder) + mark + anchor
    return f"{SOURCE}:{wanted}"
