"""The documentation site, built as `make docs` builds it: links, search, completeness."""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.support.spec_keys import spec_keys

from holdfast.api import prometheus
from holdfast.api.app import create_app
from holdfast.cli.main import all_commands
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast_docs.exit_statuses import EXIT_STATUSES
from holdfast_docs.variables import VARIABLES

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = CHECKOUT / "infra" / "docs" / "build_site.py"
BUILD_LIMIT_S = 300
# Pages that Sphinx generates for the search box and the theme; they need no link.
UNLINKED = {"genindex.html", "search.html", "py-modindex.html"}

# test_build.py shows by default that a broken link fails the build.
pytestmark = [pytest.mark.timeout(BUILD_LIMIT_S), pytest.mark.more]


def run_build(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BUILD), "--site", str(site), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all versions; one version has been built there without a warning."""
    folder = tmp_path_factory.mktemp("site")
    done = run_build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> Path:
    return site / "dev"


class Page(HTMLParser):
    """The links, the targets and the text of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.targets: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.targets |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loaded.append(given["href"])
        elif tag in {"script", "img", "iframe", "object"}:
            self.loaded += [given[name] for name in ("src", "data") if name in given]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@cache
def read(path: Path) -> Page:
    return Page(path)


def links_between(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(page, page or file that it links to, target in it), without links to other sites."""
    for path in sorted(folder.rglob("*.html")):
        page = path.relative_to(folder).as_posix()
        for link in read(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            found = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path))
            yield page, unquote(found if parts.path else page), unquote(parts.fragment)


def sources() -> set[str]:
    """The names of the pages that the site is built from."""
    paths = (path.relative_to(CHECKOUT / "docs") for path in (CHECKOUT / "docs").rglob("*.md"))
    names = {path.with_suffix("").as_posix() for path in paths if path.parts[0] != "generated"}
    return names - {"README"}


def test_every_link_has_an_existing_page_and_anchor(pages: Path) -> None:
    broken = []
    for page, found, target in links_between(pages):
        path = pages / found
        is_page = path.suffix == ".html"
        if not path.is_file() or (target and is_page and target not in read(path).targets):
            broken.append(f"{page}: {found}#{target}")
    assert not broken


def test_every_page_is_reachable_from_the_first_one(pages: Path) -> None:
    below: dict[str, set[str]] = {}
    for page, found, _ in links_between(pages):
        below.setdefault(page, set()).add(found)
    reached, waiting = {"index.html"}, ["index.html"]
    while waiting:
        new = below.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    built = {path.relative_to(pages).as_posix() for path in pages.rglob("*.html")}
    # Without the theme's own files.
    built = {one for one in built if not one.startswith("_static/")}
    assert built - UNLINKED - reached == set()
    assert {f"{name}.html" for name in sources()} <= built


def test_pages_have_the_icon_of_the_web_ui(pages: Path) -> None:
    expected = (CHECKOUT / "web" / "public" / "icon.svg").read_bytes()
    for page in (pages / "index.html", *pages.glob("decisions/*.html")):
        (icon,) = [one for one in read(page).loaded if "icon.svg" in one]
        assert (page.parent / urlsplit(icon).path).read_bytes() == expected


def test_pages_load_nothing_from_other_sites(pages: Path) -> None:
    loaded = {
        f"{path.name}: {one}"
        for path in pages.rglob("*.html")
        for one in read(path).loaded
        if urlsplit(one).netloc
    }
    assert not loaded


def test_search_index_covers_every_page_and_generated_text(pages: Path) -> None:
    index = json.loads(
        (pages / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip(");\n")
    )
    assert sources() <= set(index["docnames"])
    spec = index["docnames"].index("spec")
    found = index["terms"]["gpus_per_nod"]
    assert spec in (found if isinstance(found, list) else [found])


def test_the_reference_has_every_spec_key(pages: Path) -> None:
    text = read(pages / "spec.html").text
    assert {key for key in spec_keys(RunSpec) if f" {key} " not in text} == set()


def test_the_reference_has_every_command_with_its_options(pages: Path) -> None:
    page = read(pages / "cli.html")
    root = all_commands()
    waiting = [("holdfast", root)]
    seen = set()
    while waiting:
        name, command = waiting.pop()
        seen.add(name)
        assert f"cli-{name.replace(' ', '-')}" in page.targets, name
        for parameter in command.params:
            shown = [one for one in parameter.opts if one.startswith("-")]
            assert all(one in page.text for one in shown), f"{name} {shown}"
        waiting += [(f"{name} {k}", one) for k, one in getattr(command, "commands", {}).items()]
    assert {"holdfast submit", "holdfast token add", "holdfast db upgrade"} <= seen


def test_the_reference_has_every_operation_of_the_api(pages: Path) -> None:
    from types import SimpleNamespace
    from typing import Any

    services: Any = SimpleNamespace(access_policy=None, measures=SimpleNamespace(answered=None))
    text = read(pages / "rest-api.html").text
    document = create_app(services).openapi()
    operations = {f"{verb.upper()} {p}" for p, one in document["paths"].items() for verb in one}
    assert "POST /api/v1/runs/{run}/relaunch" in operations
    assert {one for one in operations if one not in text} == set()
    schemas = {name for name in document["components"]["schemas"] if "_" not in name}
    assert {one for one in schemas if f" {one} " not in text} == set()


def test_the_reference_has_every_event_metric_variable_and_status(pages: Path) -> None:
    events = read(pages / "journal-events.html").targets
    assert {kind for kind in EventKind if f"event-{kind.replace('_', '-')}" not in events} == set()
    metrics = read(pages / "metrics.html").text
    source = Path(prometheus.__file__).read_text()
    named = re.findall(r'(?:_gauge|Family)\(\s*f?"(?:holdfast_)?(\w+)"', source)
    named += re.findall(r'\(\s*"(run_\w+)", "', source)
    assert len(named) > 10
    assert {one for one in named if f"holdfast_{one} " not in metrics} == set()
    variables = read(pages / "environment.html").text
    assert {one.name for one in VARIABLES if f"{one.name} " not in variables} == set()
    statuses = read(pages / "exit-status.html").text
    assert {one for one in EXIT_STATUSES if one not in statuses} == set()


def test_the_reference_has_the_public_names_of_the_trainer(pages: Path) -> None:
    from holdfast import trainer

    targets = read(pages / "python-api.html").targets
    assert {f"holdfast.trainer.{name}" for name in trainer.__all__} <= targets
    methods = {name for name in vars(trainer.Session) if not name.startswith("_")}
    documented = {one.rpartition(".")[2] for one in targets if ".Session." in one}
    assert methods <= documented | {"seed"}


def test_version_switcher_lists_each_built_version(site: Path) -> None:
    """The switcher's file lists each version, and the root page redirects to one."""
    listed = json.loads((site / "versions.json").read_text())
    assert [one["version"] for one in listed] == ["dev"]
    assert listed[0]["url"] == "/dev/"
    assert "dev/index.html" in (site / "index.html").read_text()
    switcher = (site / "dev" / "index.html").read_text()
    assert "theme_switcher_json_url = '../versions.json'" in switcher
    assert "theme_switcher_version_match = 'dev'" in switcher
