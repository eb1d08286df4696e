"""A short form of a lineage graph: long chains of checkpoints become one node each.

A fold contains equal checkpoints without events only. Pins, forks, exports, resumes, rollbacks,
and the first checkpoint of each attempt stay. So ten thousand checkpoints are a few dozen nodes.
The consumers of a checkpoint are folded with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from holdfast.lineage.database.states import EdgeKind
from holdfast.lineage.queries.views import Edge, Graph, Node

FOLD: Final = "fold"
# An opened fold shows about this many nodes, and the rest in smaller folds.
SHOWN_MAX: Final = 24
FOLD_MIN: Final = 4
_CHECKPOINT: Final = re.compile(r"(.*):step-\d+\.a(\d+)\.l(\d+)")
_ATTEMPT: Final = re.compile(r"(.*):attempt-(\d+)")
_PARENT: Final = EdgeKind.PARENT.value
_RESUMED: Final = EdgeKind.RESUMED_FROM.value
_CONSUMED: Final = EdgeKind.CONSUMED_BY.value

# (run, attempt, launch) of a checkpoint or, with launch 0, of an attempt.
_Origin = tuple[str, int, int]


def fold(graph: Graph, opened: Collection[str] = ()) -> Graph:
    """Return the graph with its chains folded, except for the folds whose ids are in `opened`.

    `nodes_total` is the number of nodes without folds.
    """
    place: dict[str, str] = {}
    folds: list[Node] = []
    for chain in _chains(graph):
        for part in _parts(chain, frozenset(opened)):
            folds.append(_fold_of(part))
            place.update(dict.fromkeys((one["id"] for one in part), folds[-1]["id"]))
    for edge in graph["edges"]:
        if edge["kind"] == _CONSUMED and edge["from"] in place:
            place[edge["to"]] = place[edge["from"]]
    nodes = [node for node in graph["nodes"] if node["id"] not in place]
    edges: dict[tuple[str, str, str], Edge] = {}
    for edge in graph["edges"]:
        ends = place.get(edge["from"], edge["from"]), place.get(edge["to"], edge["to"])
        # An edge inside a fold is not drawn. One from a damaged node to itself is kept.
        if ends[0] != ends[1] or edge["from"] not in place:
            moved: Edge = {"from": ends[0], "to": ends[1], "kind": edge["kind"]}
            edges.setdefault((*ends, edge["kind"]), moved)
    return Graph(
        nodes=[*nodes, *folds], edges=list(edges.values()), nodes_total=len(graph["nodes"])
    )


def fold_id(first: str, last: str) -> str:
    return f"{FOLD}:{first}…{last}"


def _origin(identity: str) -> _Origin | None:
    match = _CHECKPOINT.fullmatch(identity)
    if match:
        return match[1], int(match[2]), int(match[3])
    match = _ATTEMPT.fullmatch(identity)
    return (match[1], int(match[2]), 0) if match else None


def _is_in_place(edge: Edge) -> bool:
    """Return True if an attempt resumed from its own checkpoint."""
    one, other = _origin(edge["from"]), _origin(edge["to"])
    return one is not None and other is not None and one[:2] == other[:2]


def _kept(graph: Graph) -> set[str]:
    """Return the ids of the nodes with events, which are never folded."""
    kept: set[str] = set()
    restarted: set[str] = set()
    for edge in graph["edges"]:
        if edge["kind"] == _RESUMED and _is_in_place(edge):
            restarted.add(edge["to"])
        elif edge["kind"] not in {_PARENT, _CONSUMED}:
            kept.update((edge["from"], edge["to"]))
    for edge in graph["edges"]:
        # A restart in place leads to the first checkpoint of the new launch.
        if edge["kind"] == _PARENT and edge["to"] in restarted and _is_in_place(edge):
            child, parent = _origin(edge["from"]), _origin(edge["to"])
            if child and parent and child[2] > parent[2]:
                kept.update((edge["from"], edge["to"]))
    return kept | _firsts(graph["nodes"])


def _firsts(nodes: Sequence[Node]) -> set[str]:
    """Return the ids of the first checkpoint of each attempt in the graph."""
    attempts = {(one.get("run"), one.get("number")) for one in nodes if "number" in one}
    # Only one id of each launch is parsed, because there may be ten thousand checkpoints.
    launches: dict[tuple[str, str], Node] = {}
    for node in nodes:
        if node["kind"] == "checkpoint":
            key = node.get("run", ""), node["id"].rpartition(".a")[2]
            first = launches.setdefault(key, node)
            if node.get("step", 0) < first.get("step", 0):
                launches[key] = node
    firsts: dict[tuple[str, int], Node] = {}
    for node in launches.values():
        origin = _origin(node["id"])
        if origin is not None and origin[:2] in attempts:
            first = firsts.setdefault(origin[:2], node)
            if node.get("step", 0) < first.get("step", 0):
                firsts[origin[:2]] = node
    return {node["id"] for node in firsts.values()}


def _look(node: Node) -> tuple[object, ...]:
    return (
        *(node.get("state"), node.get("verified"), node.get("run"), node.get("rolled_back")),
        bool(node.get("mirrored")),
    )


def _chains(graph: Graph) -> Iterator[list[Node]]:
    """Yield the longest chains of equal checkpoints that have one parent and one child each."""
    parents = [edge for edge in graph["edges"] if edge["kind"] == _PARENT]
    children_of = Counter(edge["to"] for edge in parents)
    parents_of = Counter(edge["from"] for edge in parents)
    after = {edge["to"]: edge["from"] for edge in parents}
    before = {edge["from"]: edge["to"] for edge in parents}
    kept = _kept(graph)
    dull = {
        node["id"]: node
        for node in graph["nodes"]
        if node["kind"] == "checkpoint" and not node.get("pinned") and node["id"] not in kept
        if children_of[node["id"]] == parents_of[node["id"]] == 1
    }
    taken: set[str] = set()
    for node in dull.values():
        if node["id"] in taken:
            continue
        start = _walk(node, dull, before)[-1]
        members = [one for one in _walk(start, dull, after) if one["id"] not in taken]
        taken.update(one["id"] for one in members)
        yield members


def _walk(start: Node, dull: Mapping[str, Node], ways: Mapping[str, str]) -> list[Node]:
    """Return `start` and the equal checkpoints that follow it, without going round a circle."""
    found, look = {start["id"]: start}, _look(start)
    node = dull.get(ways.get(start["id"], ""))
    while node is not None and node["id"] not in found and _look(node) == look:
        found[node["id"]] = node
        node = dull.get(ways.get(node["id"], ""))
    return list(found.values())


def _parts(members: Sequence[Node], opened: frozenset[str]) -> Iterator[Sequence[Node]]:
    """Yield what stays folded of a chain: all of it, or if it is opened, smaller parts."""
    if len(members) < FOLD_MIN:
        return
    if fold_id(members[0]["id"], members[-1]["id"]) not in opened:
        yield members
    elif len(members) > SHOWN_MAX:
        size = max(FOLD_MIN, -(-len(members) // SHOWN_MAX))
        for start in range(0, len(members), size):
            yield from _parts(members[start : start + size], opened)


def _fold_of(members: Sequence[Node]) -> Node:
    first, last = members[0], members[-1]
    shown = Node(
        id=fold_id(first["id"], last["id"]),
        kind=FOLD,
        count=len(members),
        first_step=first.get("step", 0),
        last_step=last.get("step", 0),
        rolled_back=first.get("rolled_back", False),
        mirrored=bool(first.get("mirrored")),
        verified=first.get("verified"),
    )
    if "run" in first:
        shown["run"] = first["run"]
    if "state" in first:
        shown["state"] = first["state"]
    return shown
