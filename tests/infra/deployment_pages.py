"""The code blocks that tests/infra/test_deployment.py follows, and which of them it has used."""

from __future__ import annotations

from typing import Final

from tests.docs.blocks import ROOT, Block, blocks_in, run_by

BLOCKS: Final = run_by("tests/infra/test_deployment.py")


class Pages:
    """Gives the text of blocks, and keeps in mind which ones were given."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def block(self, page: str, containing: str) -> str:
        """The text of the only block of `docs/<page>.md` that contains these words."""
        path = f"docs/{page}.md"
        found = [b for b in blocks_in(path, (ROOT / path).read_text()) if containing in b.text]
        assert len(found) == 1, f"{path}: {len(found)} blocks contain {containing!r}"
        self.used.add(str(found[0]))
        return found[0].text

    def left(self) -> list[Block]:
        """The marked blocks that were not given."""
        return [block for block in BLOCKS if str(block) not in self.used]
