"""Read a run spec in YAML 1.2, in which `off` and `1:30` are text and no key is repeated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import CollectionNode, MappingNode

from holdfast.contracts.disk.bounds import DEPTH_MAX
from holdfast.contracts.errors import SpecError

VALUES_MAX: Final = 200_000
# With another version, the rules of that version would apply.
_DIRECTIVE: Final = re.compile(r"^%YAML +(?!1\.2 *$).*$", re.MULTILINE)


def parse_yaml(path: Path, text: str) -> Any:
    """Return the document, by the rules of YAML 1.2: `off` and `1:30` are text."""
    if directive := _DIRECTIVE.search(text):
        raise SpecError(f"{path}: {directive[0]}: expected YAML 1.2; remove that line")
    try:
        # Before the rest, because the loader takes seconds for thousands of levels.
        _check_depth(path, _loader().parse(text))
        tree = _loader().compose(text)
        # Before the load, because nested aliases double the number of values with each level.
        values = _count_values(tree, {})
        if values > VALUES_MAX:
            raise SpecError(
                f"{path}: its aliases expand to {values:.3g} values; expected at most "
                f"{VALUES_MAX}. Remove aliases."
            )
        return _loader().load(text)
    except DuplicateKeyError as error:
        # The rest of the text is about an option of the loader.
        problem = str(error.problem).partition(" with value")[0]
        raise SpecError(
            f"{path}: {problem}{_place(error)}, which the file has already; keep one of them"
        ) from error
    except MarkedYAMLError as error:
        raise SpecError(
            f"{path}: not YAML: {error.problem}{_place(error)}; fix that line"
        ) from error
    except (YAMLError, ValueError, OverflowError, TypeError) as error:
        # An impossible date raises ValueError, and a key that is a table TypeError.
        raise SpecError(f"{path}: not YAML: {error}; fix that line") from error


def _check_depth(path: Path, events: Iterable[Any]) -> None:
    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > DEPTH_MAX:
            raise SpecError(f"{path}: nested too deep; expected a run spec")


def _loader() -> YAML:
    loader = YAML(typ="safe", pure=True)
    loader.version = (1, 2)
    return loader


def _place(error: MarkedYAMLError) -> str:
    mark = error.problem_mark
    return f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""


def _count_values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values in a YAML tree after its aliases are expanded.

    The result is infinite for a node that contains itself. `known` has the counts so far, because
    nested aliases double the number with each level.
    """
    if not isinstance(node, CollectionNode):
        return 1
    if id(node) not in known:
        # Infinite while it is being counted, so that a node that contains itself ends the
        # recursion.
        known[id(node)] = math.inf
        is_table = isinstance(node, MappingNode)
        children = [each for pair in node.value for each in pair] if is_table else node.value
        known[id(node)] = 1 + sum(_count_values(child, known) for child in children)
    return known[id(node)]
