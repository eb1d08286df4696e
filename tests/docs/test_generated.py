"""docs/generated, the reference for readers of the checkout, is what the code generates now."""

from __future__ import annotations

import re

from holdfast_docs.links import CHECKOUT
from holdfast_docs.pages import FOLDER, checkout_files

WRITE = "run `make reference`"
TARGET = re.compile(r'<a id="([\w-]+)">')


def test_the_files_are_those_that_the_code_generates() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    expected = {path.name: text for path, text in checkout_files()}
    assert found.keys() == expected.keys(), WRITE
    assert [name for name in expected if found[name] != expected[name]] == [], WRITE


def test_each_file_has_a_page_that_links_to_it() -> None:
    pages = "\n".join(path.read_text() for path in (CHECKOUT / "docs").glob("*.md"))
    names = {path.name for path in FOLDER.glob("*.md")}
    assert names == set(re.findall(r"\]\(generated/([a-z]+\.md)\)", pages))


def test_links_inside_a_file_have_a_target() -> None:
    for path in FOLDER.glob("*.md"):
        text = path.read_text()
        links = set(re.findall(r"\]\(#([\w-]+)\)", text))
        assert links <= set(TARGET.findall(text)), path.name
