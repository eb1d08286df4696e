"""Every page is listed in an index, in the repository and on the site."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
# Pages of docs/ that list other pages. index.md includes README.md.
INDEXES = ("index", "tutorials", "guides", "reference", "explanation", "README")
INCLUDED = re.compile(r"```\{include\} \.\./(\S+)")
TREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


def test_the_index_names_every_decision() -> None:
    index = (DOCS / "decisions.md").read_text()
    pages = [path.name for path in (DOCS / "decisions").glob("*.md")]
    assert [name for name in sorted(pages) if f"(decisions/{name})" not in index] == []


def test_an_index_lists_every_page() -> None:
    """Each page is in a table, for the repository, and in a toctree, for the site."""
    texts = {name: (DOCS / f"{name}.md").read_text() for name in INDEXES}
    trees = {name: "\n".join(TREE.findall(text)) for name, text in texts.items()}
    unlisted = []
    for page in sorted(DOCS.glob("*.md")):
        if page.stem in {"README", "index"}:
            continue
        # A page that includes one file is linked by the name of that file.
        included = INCLUDED.findall(page.read_text())
        link = f"(../{included[0]}" if len(included) == 1 else f"({page.name}"
        is_listed = any(link in text for text in texts.values())
        is_in_tree = any(
            re.search(rf"^(.*<)?{re.escape(page.stem)}>?$", tree, re.MULTILINE)
            for tree in trees.values()
        )
        if not (is_listed and is_in_tree):
            unlisted.append(page.name)
    expected = f"expected each in a table and a toctree of one of {', '.join(INDEXES)}"
    assert not unlisted, f"{unlisted}: {expected}"
