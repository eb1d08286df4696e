"""The names that the pages use exist: members of `Session`, its parameters, and keys of a spec.

Commands and options are checked in test_blocks.py. The files that ARCHITECTURE.md and the pages
beside the code name exist too.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from pydantic import BaseModel
from tests.docs.blocks import PAGES, PARTS, ROOT

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.trainer import Session

MEMBER: Final = re.compile(r"\b(?:Session|session)\.([a-z_]+)\b(?!\.(?:md|py|html))")
CODE: Final = re.compile(r"`([^`\n]+)`")
CALL: Final = re.compile(r"^(?:session\.)?([a-z_]+)\(([^()]*)\)$")
KEY: Final = re.compile(r"^[a-z_]+(?:\.[a-z_]+)+$")
OPTION: Final = re.compile(r"\b([a-z_]+)=")
# Modules of the source, which a page may name as `trainer/session/session.py` or `session.py`.
FILES: Final = {"py", "md", "toml"}
# Attributes that `__init__` sets, the last one that of `DeepSpeedSession`.
ATTRIBUTES: Final = {"best", "resumed_from", "seed", "client_state"}
# Pages of records: decisions name what was there when they were made.
RECORDS: Final = ("docs/decisions/", "CHANGELOG.md")
PAGES_NOW: Final = [page for page in PAGES if not str(page.relative_to(ROOT)).startswith(RECORDS)]
# These name a module by its place in the package, such as `trainer/session/session.py`.
CODE_PAGES: Final = [ROOT / "ARCHITECTURE.md", *PARTS]
FILE: Final = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|tsx?|c|sh)")
PACKAGE: Final = ("src", "trainer", "workers", "flows")
SESSION_PAGE: Final = ROOT / "docs" / "session.md"


def members_in(text: str) -> list[str]:
    """The members of `session` and `Session` that a text names."""
    return [name for name in MEMBER.findall(text) if name not in FILES]


def calls_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, keyword arguments) of each call in inline code."""
    for code in CODE.findall(text):
        if found := CALL.fullmatch(code):
            yield found[1], OPTION.findall(found[2])


def keys_of(model: type[BaseModel]) -> dict[str, Any]:
    """The keys of a part of the spec, each with its own keys."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        parts = [one for one in _types_in(field.annotation) if issubclass(one, BaseModel)]
        keys = {key: value for part in parts for key, value in keys_of(part).items()}
        # A table without fixed keys, such as `environment`.
        found[name] = keys or (None if "dict" in str(field.annotation).lower() else {})
    return found


def _types_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for one in get_args(annotation):
        yield from _types_in(one)


SPEC: Final = keys_of(RunSpec)


def problem_with_key(key: str) -> str | None:
    """What is wrong with a key of the spec; None if it exists or is no such key."""
    first, *rest = key.split(".")
    if first not in SPEC or rest[-1] in FILES or not (SPEC[first] is None or SPEC[first]):
        return None
    here: Any = SPEC[first]
    for name in rest:
        if here is None:
            return None
        if name not in here:
            return f"{key}: no key {name!r}, expected one of {', '.join(sorted(here)) or 'none'}"
        here = here[name]
    return None


def files_of_the_repository() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def missing_files(text: str, folder: str, files: Collection[str]) -> list[str]:
    """The files that a page in `folder` names and that exist nowhere that a reader would look.

    A reader looks in the folder of the page, in the repository and in the package.
    """
    roots = ["", f"{folder}/", *(f"{top}/holdfast/" for top in PACKAGE)]
    named = {code for code in CODE.findall(text) if FILE.fullmatch(code)}
    return sorted(name for name in named if not any(f"{root}{name}" in files for root in roots))


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES_NOW, ids=_id)
def test_members_of_a_session_exist(page: Path) -> None:
    missing = [name for name in members_in(page.read_text()) if not hasattr(Session, name)]
    assert [name for name in missing if name not in ATTRIBUTES] == []


def test_the_session_page_names_only_members_and_parameters_of_session() -> None:
    others = {"evaluate", "micro", "backward", "close", "sorted", "len"}
    wrong = []
    for name, options in calls_in(SESSION_PAGE.read_text()):
        member = getattr(Session, name, None)
        if member is None:
            wrong += [name] if name not in others and not name.startswith("load_") else []
            continue
        known = inspect.signature(member).parameters
        has_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
        wrong += [f"{name}({each}=)" for each in options if each not in known and not has_any]
    assert wrong == []


def test_the_parameters_of_session_that_its_page_lists_exist() -> None:
    _, _, text = SESSION_PAGE.read_text().partition("## Construction")
    text, _, _ = text.partition("The constructor raises")
    listed = re.findall(r"^- ((?:`[a-z_]+`(?: and )?)+)", text, re.MULTILINE)
    names = [name for one in listed for name in CODE.findall(one)]
    known = inspect.signature(Session).parameters
    assert len(names) > 4
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("page", PAGES_NOW, ids=_id)
def test_keys_of_the_spec_exist(page: Path) -> None:
    codes = CODE.findall(page.read_text())
    # A key may be followed by its value, as in `checkpoint.interval = 50`.
    keys = [code.partition(" = ")[0].partition("=")[0] for code in codes]
    problems = [problem_with_key(key) for key in keys if KEY.fullmatch(key)]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize("page", CODE_PAGES, ids=_id)
def test_files_that_the_pages_of_the_code_name_exist(page: Path) -> None:
    folder = page.parent.relative_to(ROOT).as_posix()
    found = missing_files(page.read_text(), folder, set(files_of_the_repository()))
    assert found == []


@pytest.mark.parametrize("page", CODE_PAGES, ids=_id)
def test_the_overview_leads_to_every_page_of_the_code(page: Path) -> None:
    name = _id(page)
    assert name == "ARCHITECTURE.md" or f"]({name}#" in (ROOT / "ARCHITECTURE.md").read_text()


def test_unknown_names_are_reported() -> None:
    files = {
        "trainer/holdfast/trainer/session/session.py",
        "flows/holdfast/flows/start.py",
    }
    text = "`trainer/session/session.py`, `start.py`, `gone.py`, `trainer/gone.py`"
    assert missing_files(text, "flows/holdfast/flows", files) == ["gone.py", "trainer/gone.py"]
    assert members_in("call `session.comit()` and see session.md") == ["comit"]
    assert dict(calls_in("`checkpoint(wait=True)`")) == {"checkpoint": ["wait"]}
    assert problem_with_key("checkpoint.intervall") is not None
    assert problem_with_key("checkpoint.keep.lsat") is not None
    assert problem_with_key("checkpoint.keep.last") is None
    assert problem_with_key("environment.LR") is None
