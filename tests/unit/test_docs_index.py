"""Every decision page is found from the documentation's index."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_index_names_every_decision() -> None:
    index = (DOCS / "README.md").read_text()
    pages = [path.name for path in (DOCS / "decisions").glob("*.md")]
    assert [name for name in sorted(pages) if f"(decisions/{name})" not in index] == []
