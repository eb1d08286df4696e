"""The public names of `holdfast.trainer`, for readers of the checkout; the site uses autodoc."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

from holdfast_docs.markdown import code, paragraphs, section

# The names of docs/python-api.md, in its order.
_DIRECTIVE: Final = re.compile(
    r"^\.\. auto(?:class|function):: ([\w.]+)(?P<hidden>\(\))?\n"
    r"(?:   :members:(?P<members>.*)\n)?",
    re.MULTILINE,
)
# Annotations are strings: the modules do not evaluate them.
_QUOTED: Final = re.compile(r"(: |-> )'([^']*)'")
COLUMNS_MAX: Final = 100
# A section of a docstring, such as `Raises:`.
_PART: Final = re.compile(r"^[A-Z][a-z]+:$")


def render() -> str:
    """A section for each name that the page documents."""
    from holdfast_docs.links import CHECKOUT

    page = (CHECKOUT / "docs" / "python-api.md").read_text()
    return "\n".join(_section(found) for found in _DIRECTIVE.finditer(page))


def _section(found: re.Match[str]) -> str:
    place, _, name = found[1].rpartition(".")
    one: Any = getattr(__import__(place, fromlist=[name]), name)
    listed = found["members"]
    # Programs get objects of some classes from a method, so their own parameters are not shown.
    parts = [_text(one)] if found["hidden"] else [_signature(name, one), _text(one)]
    if listed is not None:
        wanted = {word.strip() for word in listed.split(",") if word.strip()}
        for member, value in _members(one):
            if not wanted or member in wanted:
                parts.append(section(3, code(f"{name}.{member}"), _member(member, value)))
    return section(2, code(found[1]), *parts)


def _members(one: Any) -> Iterator[tuple[str, Any]]:
    """The documented public methods and properties of a class, in their order."""
    for name, value in vars(one).items():
        if not name.startswith("_") and inspect.getdoc(value) and name not in {"seed"}:
            is_method = isinstance(value, (FunctionType, classmethod, staticmethod, property))
            if is_method:
                yield name, value


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        return _text(value)
    function = getattr(value, "__func__", value)
    return f"{_signature(name, function)}\n\n{_text(function)}"


def _signature(name: str, one: Any) -> str:
    """The call with its types, and one parameter a line if it is long."""
    found = inspect.signature(one)
    shown = name + _QUOTED.sub(r"\1\2", str(found))
    if len(shown) > COLUMNS_MAX:
        # Python prints `*` before the first parameter that is passed by name only.
        lines = [_QUOTED.sub(r"\1\2", str(each)) for each in found.parameters.values()]
        names_only = [each.kind is each.KEYWORD_ONLY for each in found.parameters.values()]
        if True in names_only:
            lines.insert(names_only.index(True), "*")
        returned = shown.rpartition(" -> ")[2]
        shown = f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {returned}"
    return f"```text\n{shown}\n```"


def _text(one: Any) -> str:
    """The docstring; its sections, such as `Raises:`, become lists."""
    doc = inspect.getdoc(one) or ""
    init = getattr(one, "__init__", None) if inspect.isclass(one) else None
    if init is not None and isinstance(init, FunctionType) and init.__doc__:
        doc = f"{doc}\n\n{inspect.getdoc(init)}"
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        first, *rest = block.splitlines()
        if _PART.match(first) and rest:
            blocks.append(f"**{first}**\n\n{_list(rest)}")
        elif block.lstrip().startswith(("- ", "* ")):
            blocks.append(block)
        elif first.startswith("    "):
            blocks.append(f"```text\n{block}\n```")
        else:
            blocks.append(paragraphs(block))
    return "\n\n".join(blocks)


def _list(lines: list[str]) -> str:
    """The entries of a section, one item each; deeper lines continue an entry."""
    depth = min(len(line) - len(line.lstrip()) for line in lines)
    items: list[str] = []
    for line in lines:
        is_new = len(line) - len(line.lstrip()) == depth
        if is_new or not items:
            items.append(line.strip())
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(f"- {paragraphs(item)}" for item in items)
