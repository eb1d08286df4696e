"""Environment variables, from `variables`."""

from __future__ import annotations

from holdfast_docs.markdown import code, section, sentence, table
from holdfast_docs.variables import VARIABLES, Setter


def render() -> str:
    """A table for each kind of setter."""
    parts = []
    for setter in Setter:
        rows = [
            (
                code(one.name),
                sentence(one.default) if one.default else "none",
                sentence(one.meaning),
            )
            for one in VARIABLES
            if one.setter is setter
        ]
        parts.append(section(2, setter.value, table(("variable", "default", "meaning"), rows)))
    return "\n".join(parts)
