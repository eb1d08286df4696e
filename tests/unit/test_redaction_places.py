"""The fast search for places of secrets finds what the patterns find in the whole text."""

from __future__ import annotations

import re
import sys
import time
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_redaction import OTHER_NAMES, SECRET_NAMES, SECRET_TEXTS

from holdfast.contracts import redaction
from holdfast.contracts.redaction import mask_bytes, spans

PARTS: Final = (
    *(*SECRET_TEXTS, *SECRET_NAMES, *OTHER_NAMES, *redaction._PREFIXES, *redaction._HEADERS),
    *(*redaction._SAID_NAMES, *redaction._NAME_PARTS, *redaction._VARIABLE_PARTS),
    *(*redaction._LOGIN_PARTS, "Bearer", "basic", "Authorization:", "wandb login", "is", "was"),
    *("://", "https", "user:pw", "@", "/", "&", "?", ":", "=", ",", "(", "f(", "[", "]", "{", "}"),
    *("\n", " ", "  ", "\t", '"', "'", "--", "-", ".", "_", "\\n", "\u00e9", "Zq8vR3mK1x"),
    *("a" * 20, "x" * 99, "x" * 101, "0123456789abcdef" * 2 + "01234567", "-----END"),
    # Each of these letters matches one of ASCII if case is ignored.
    *("-----BEGIN RSA PRIVATE KEY-----", "ba\u017fic", "AUTHOR\u0130ZATION:", "to\u212aen \u0131s"),
)


SPARSE: Final = "\n" * 8000


def plain_spans(text: str) -> list[tuple[int, int]]:
    """The secrets by the patterns alone, over the whole text."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(redaction, "_matches", lambda pattern, text, _: pattern.finditer(text))
        return spans(text)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PARTS), st.characters(max_codepoint=0x17F)), max_size=24))
def test_fast_and_plain_search_find_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    # A text that is full of names is searched in another way than one with a few.
    for searched in (text, text + SPARSE):
        assert spans(searched) == plain_spans(searched)


def test_a_text_counts_as_full_of_names_by_their_share() -> None:
    names = "hf_token: abc keys=5 password=None " * 9
    assert redaction._names(names, names) is None
    assert redaction._names(names + SPARSE, names + SPARSE) is not None


@given(st.text("ab9_ +/=-", max_size=24))
def test_a_long_word_with_a_letter_and_a_digit_looks_random(text: str) -> None:
    words = re.findall("[A-Za-z0-9+/=]{8,}", text)
    expected = any(re.search("[a-z]", one) and re.search("[0-9]", one) for one in words)
    assert redaction.looks_random(text) == expected


def test_folded_text_has_each_letter_that_matches_without_case_at_its_place() -> None:
    letters = "".join(map(chr, range(sys.maxunicode + 1)))
    folded = redaction._folded(letters)
    assert len(folded) == len(letters)
    matching = re.compile("[a-z]", re.IGNORECASE)
    assert all("a" <= folded[one.start()] <= "z" for one in matching.finditer(letters))


def masking_s(content: bytes) -> float:
    """The CPU seconds of masking a text that has no secret, the best of three."""

    def took_s() -> float:
        began = time.process_time()
        assert mask_bytes(content, ["a-known-value"]) == content
        return time.process_time() - began

    return min(took_s() for _ in range(3))


def test_logs_are_masked_much_faster_than_by_the_patterns_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = (
        b"2026-11-29 12:00:00 INFO [rank7] train.py:81: step 1250 | loss: 2.1875 | tokens/s 51234\n"
    )
    masking_s(line)
    fast = masking_s(line * 3000)
    monkeypatch.setattr(redaction, "_matches", lambda pattern, text, _: pattern.finditer(text))
    assert fast < masking_s(line * 3000) / 2


def test_texts_full_of_names_are_masked_faster_than_name_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = b"token tokens keys secret password " * 6000
    masking_s(content[:100])
    fast = masking_s(content)
    monkeypatch.setattr(redaction, "_is_full", lambda *_: False)
    assert fast < masking_s(content) / 1.2
