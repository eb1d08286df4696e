"""The graph of `lineage` as text that other programs draw: Mermaid and DOT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.contracts.plain_text import counted

Node = Mapping[str, Any]
# By kind: Mermaid's brackets for a node's shape, and DOT's name of the same shape.
_SHAPES: Final[Mapping[str, tuple[str, str, str]]] = {
    "run": ("([", "])", "oval"),
    "attempt": ("[", "]", "box"),
    "checkpoint": ("(", ")", "ellipse"),
    "export": ("[/", "/]", "parallelogram"),
    "source": ("[\\", "\\]", "parallelogram"),
    "consumer": ("{{", "}}", "hexagon"),
}
_BROKEN: Final = frozenset({"deleted", "damaged"})


def mermaid(graph: Mapping[str, Any]) -> str:
    """Return the graph as a Mermaid flowchart. Nodes are numbered: an id may have any character."""
    names = {node["id"]: f"n{number}" for number, node in enumerate(graph["nodes"])}
    lines = ["flowchart BT"]
    for node in graph["nodes"]:
        begin, end, _ = _SHAPES.get(node["kind"], _SHAPES["run"])
        text = "<br/>".join(_escape(part, _MERMAID) for part in _label(node))
        lines.append(f'  {names[node["id"]]}{begin}"{text}"{end}')
        if node.get("state") in _BROKEN or node.get("rolled_back"):
            lines.append(f"  style {names[node['id']]} stroke-dasharray:4")
    for edge in graph["edges"]:
        one, other = names[edge["from"]], names[edge["to"]]
        lines.append(f"  {one} -->|{edge['kind'].replace('_', ' ')}| {other}")
    return "\n".join(lines) + "\n"


def dot(graph: Mapping[str, Any]) -> str:
    lines = ["digraph lineage {", "  rankdir=BT;", '  node [fontname="sans-serif"];']
    for node in graph["nodes"]:
        _, _, shape = _SHAPES.get(node["kind"], _SHAPES["run"])
        style = ", style=dashed" if node.get("state") in _BROKEN or node.get("rolled_back") else ""
        label = "\\n".join(_escape(part, _DOT) for part in _label(node))
        lines.append(f'  {_quoted(node["id"])} [label="{label}", shape={shape}{style}];')
    for edge in graph["edges"]:
        ends = f"{_quoted(edge['from'])} -> {_quoted(edge['to'])}"
        lines.append(f'  {ends} [label="{edge["kind"].replace("_", " ")}"];')
    return "\n".join([*lines, "}"]) + "\n"


_MERMAID: Final = (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;"))
_DOT: Final = (("\\", "\\\\"), ('"', '\\"'))


def _label(node: Node) -> Sequence[str]:
    """Return the lines of a node's label: its id, and below it the facts about it."""
    facts = [str(node["state"])] if node.get("state") else []
    facts += [str(node["cause"])] if node.get("cause") else []
    facts += [counted(node["world_size"], "rank")] if node.get("world_size") else []
    facts += ["pinned"] if node.get("pinned") else []
    facts += ["rolled back"] if node.get("rolled_back") else []
    return [node["id"], " · ".join(facts)] if facts else [node["id"]]


def _quoted(text: str) -> str:
    return f'"{_escape(text, _DOT)}"'


def _escape(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    # In this order: the first pair escapes the character that the others add.
    for one, other in pairs:
        text = text.replace(one, other)
    return text.replace("\n", " ")
