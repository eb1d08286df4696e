"""Parts of the documentation build: strictness, link rewriting, generated pages and versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.spec_keys import spec_keys

import build_site
from holdfast.contracts.spec import secrets
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast_docs import links, markdown, spec_page
from holdfast_docs.metrics_page import families

CHECKOUT = Path(__file__).resolve().parents[2]


BROKEN = """\
# Page

[page](gone.md) [heading](#no-such-heading) [folder](../workers)

<!-- generated: nothing -->
"""


def test_broken_link_or_marker_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text(BROKEN)
    (tmp_path / "unlisted.md").write_text("# Unlisted\n")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    done = subprocess.run(
        [*command, "-c", str(CHECKOUT / "docs"), str(tmp_path), str(tmp_path / "built")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    problems = ("gone.md", "no-such-heading", "expected a file", "'nothing'", "unlisted.md")
    assert [one for one in problems if one not in done.stderr] == []


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("glossary.md#run", "faq.md", "glossary.md#run"),
        ("../ARCHITECTURE.md#claim", "faq.md", "architecture.md#claim"),
        ("../../ARCHITECTURE.md", "decisions/0001.md", "../architecture.md"),
        ("../README.md", "decisions/0001.md", "../index.md"),
        ("../tests/conftest.py", "faq.md", "source:tests/conftest.py"),
        ("https://pytorch.org", "faq.md", "https://pytorch.org"),
        ("no-such-page.md", "faq.md", "no-such-page.md"),
    ],
)
def test_links_are_rewritten_to_pages_of_the_site(link: str, page: str, expected: str) -> None:
    assert links.rewrite(f"see [it]({link}).", page) == f"see [it]({expected})."


def test_links_of_an_included_file_are_relative_to_that_file() -> None:
    text = "[a](docs/spec.md) [b](#here) [c](examples/demo.py) [d](CONTRIBUTING.md)"
    rewritten = links.rewrite(text, "overview.md", origin="README.md")
    assert rewritten == "[a](spec.md) [b](#here) [c](source:examples/demo.py) [d](contributing.md)"


def test_links_in_code_are_not_rewritten() -> None:
    text = "`[a](../README.md)`\n\n```md\n[b](../README.md)\n```\n[c](../README.md)\n"
    expected = text.replace("[c](../README.md)", "[c](overview.md)")
    assert links.rewrite(text, "faq.md") == expected


def test_text_from_the_code_is_escaped_as_markdown() -> None:
    assert markdown.prose("gpu:<n> * `a_*` _b_ c_d") == r"gpu:\<n\> \* `a_*` \_b\_ c_d"
    assert markdown.sentence("`x` of\n the [list]") == r"`x` of the \[list\]."
    assert markdown.table(["a", "b"], [["`x|y`", "1"]]).splitlines()[-1] == r"| `x\|y` | 1 |"


def test_metrics_have_names_types_labels_and_help() -> None:
    found = {one.name: one for one in families()}
    assert found["holdfast_run_step"].labels == ("run", "uid")
    assert found["holdfast_runs"].labels == ("state",)
    assert all(one.help and one.kind != "unknown" for one in found.values())


def test_site_root_redirects_to_the_newest_release(tmp_path: Path) -> None:
    for name in ("dev", "0.9.0", "0.10.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "searchindex.js").touch()
    build_site.write_versions(tmp_path, "https://example.org/docs")
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [one["version"] for one in listed] == ["dev", "0.10.0", "0.9.0"]
    assert [one["version"] for one in listed if one["preferred"]] == ["0.10.0"]
    assert listed[1]["url"] == "https://example.org/docs/0.10.0/"
    assert "0.10.0/index.html" in (tmp_path / "index.html").read_text()


def test_spec_page_lists_exactly_the_spec_keys() -> None:
    page = (CHECKOUT / "docs" / "spec.md").read_text() + spec_page.render()
    named = re.findall(r"(?m)^\| `([a-z_.]+)` \|", page)
    # Secret references have a separate table.
    assert set(named) == spec_keys(RunSpec) | set(secrets.KINDS)
    assert len(named) == len(set(named))


def test_every_spec_key_has_a_description() -> None:
    silent = [key.name for key in spec_page.keys_of(RunSpec) if not key.schema.get("description")]
    assert not silent
