"""Tags: short words by which people find runs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from holdfast.contracts.plain_text import counted

TAGS_MAX: Final = 32
TAG_CHARACTERS_MAX: Final = 64
# Letters and digits of ASCII, so that no two tags look the same. They stand in addresses, tables
# and command lines without quotes.
TAG: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/-]{{0,{TAG_CHARACTERS_MAX - 1}}}")
_SHOWN: Final = 80


def problem_with_tag(tag: object) -> str | None:
    """Return why `tag` is not a tag, or None."""
    if isinstance(tag, str) and TAG.fullmatch(tag):
        return None
    return (
        f"{ascii(tag)[:_SHOWN]}: expected a tag of 1 to {TAG_CHARACTERS_MAX} letters (A to Z), "
        "digits, '-', '_', '.' and '/', starting with a letter or digit"
    )


def problem_with_tags(tags: Sequence[object]) -> str | None:
    """Return why `tags` cannot be the tags of one run or checkpoint, or None."""
    if len(tags) > TAGS_MAX:
        return f"{counted(len(tags), 'tag')}, expected at most {TAGS_MAX}"
    return next(filter(None, map(problem_with_tag, tags)), None)
