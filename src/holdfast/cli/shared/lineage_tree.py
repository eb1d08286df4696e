"""The lineage of a run as a tree for the terminal: its attempts and their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.plain_text import counted

Node = Mapping[str, Any]
_NUMBER = re.compile(r"attempt-(\d+)$")


def lineage_tree(graph: Mapping[str, Any]) -> Tree:
    """Return the graph of `lineage --json` as a tree, oldest first.

    A checkpoint is below the attempt that wrote it. If its parent is not the checkpoint before
    it, its line names the parent.
    """
    nodes, edges = graph["nodes"], graph["edges"]
    parents = {edge["from"]: edge["to"] for edge in edges if edge["kind"] == "parent"}
    other = [edge for edge in edges if edge["kind"] != "parent"]
    attempts = sorted((n for n in nodes if n["kind"] == "attempt"), key=lambda n: n["id"])
    runs = [n for n in nodes if n["kind"] == "run"]
    tree = Tree(Text(runs[0]["id"] if runs else "run", style="bold"))
    shown: set[str] = set()
    before: str | None = None
    for attempt in attempts:
        branch = tree.add(_attempt_line(attempt, other))
        for checkpoint in _written_by(attempt, nodes):
            branch.add(_checkpoint_line(checkpoint, parents.get(checkpoint["id"]), before, other))
            before = checkpoint["id"]
            shown.add(before)
    for node in nodes:
        if node["kind"] == "checkpoint" and node["id"] not in shown:
            tree.add(_checkpoint_line(node, parents.get(node["id"]), None, other))
    return tree


def _written_by(attempt: Node, nodes: list[Node]) -> Iterator[Node]:
    run, _, name = attempt["id"].rpartition(":")
    match = _NUMBER.search(name)
    number = int(match[1]) if match else -1
    found = []
    for node in nodes:
        own_run, _, directory = node["id"].rpartition(":")
        parsed = CheckpointName.parse(directory)
        if node["kind"] == "checkpoint" and own_run == run and parsed and parsed.attempt == number:
            found.append((parsed, node))
    yield from (node for _, node in sorted(found, key=lambda pair: pair[0]))


def _attempt_line(attempt: Node, other: list[Mapping[str, str]]) -> Text:
    match = _NUMBER.search(attempt["id"])
    size = attempt.get("world_size")
    parts = [f"attempt {int(match[1]) if match else '?'}"]
    parts += [counted(size, "rank")] if size else []
    parts += [str(attempt.get("state", ""))]
    parts += [str(attempt["cause"])] if attempt.get("cause") else []
    origin = _ends(attempt["id"], other, "resumed_from")
    parts += [f"resumed from {_short(end)}" for end in origin]
    return Text(" · ".join(parts), style="bold")


def _checkpoint_line(
    node: Node, parent: str | None, before: str | None, other: list[Mapping[str, str]]
) -> Text:
    line = Text(_short(node["id"]))
    if node.get("state", "committed") != "committed":
        line.append(f" · {node['state']}", style="red")
    if node.get("rolled_back"):
        line.append(" · rolled back", style="yellow")
    if node.get("pinned"):
        line.append(" · pinned", style="cyan")
    if parent is not None and parent != before:
        line.append(f" · from {_short(parent)}", style="dim")
    for edge in other:
        if edge["from"] == node["id"]:
            line.append(f" · {edge['kind'].replace('_', ' ')} {edge['to']}", style="dim")
    return line


def _ends(start: str, edges: list[Mapping[str, str]], kind: str) -> list[str]:
    return [edge["to"] for edge in edges if edge["from"] == start and edge["kind"] == kind]


def _short(node_id: str) -> str:
    """Return the directory name of a checkpoint's id, and any other id unchanged."""
    return node_id.rpartition(":")[2] or node_id
