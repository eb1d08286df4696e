"""The short form of a lineage: what is folded, what never is, and how folds open."""

from __future__ import annotations

import json
from typing import Any

from holdfast.lineage.queries.folding import SHOWN_MAX, fold
from holdfast.lineage.queries.views import Graph, Node


def name(step: int, launch: int = 1) -> str:
    return f"gpt:step-{step:08d}.a0001.l{launch:02d}"


def line(count: int) -> Graph:
    """One attempt with `count` checkpoints, each the parent of the next."""
    nodes = [
        Node(id="gpt", kind="run", run="gpt", state="running"),
        Node(id="gpt:attempt-0001", kind="attempt", run="gpt", number=1, state="running"),
    ]
    graph = Graph(nodes=nodes, edges=[])
    for step in range(1, count + 1):
        add(graph, name(step), step, name(step - 1) if step > 1 else None)
    return graph


def add(graph: Graph, identity: str, step: int, parent: str | None) -> None:
    graph["nodes"].append(
        Node(id=identity, kind="checkpoint", run="gpt", state="committed", step=step)
    )
    if parent:
        graph["edges"].append({"from": identity, "to": parent, "kind": "parent"})


def folds(graph: Graph) -> list[Node]:
    return [one for one in graph["nodes"] if one["kind"] == "fold"]


def shown_steps(graph: Graph) -> set[int]:
    return {one["step"] for one in graph["nodes"] if one["kind"] == "checkpoint"}


def test_ten_thousand_checkpoints_are_one_fold_between_the_ends() -> None:
    graph = line(10_000)
    short = fold(graph)
    assert sorted(one["kind"] for one in short["nodes"]) == [
        *("attempt", "checkpoint", "checkpoint", "fold", "run")
    ]
    (only,) = folds(short)
    assert (only["first_step"], only["last_step"], only["count"]) == (2, 9_999, 9_998)
    assert short["nodes_total"] == 10_002
    assert [(one["from"], one["to"]) for one in short["edges"]] == [
        (only["id"], name(1)),
        (name(10_000), only["id"]),
    ]
    assert len(json.dumps(short)) < 2000


def test_pins_forks_exports_and_rollbacks_stay() -> None:
    graph = line(60)
    for node in graph["nodes"]:
        if node.get("step") == 20:
            node["pinned"] = True
        node["rolled_back"] = node.get("step", 0) > 50
    graph["nodes"].append(Node(id="gpt-b", kind="run", run="gpt-b"))
    graph["nodes"].append(Node(id="/out/gpt.pt", kind="export"))
    graph["edges"].append({"from": "gpt-b", "to": name(30), "kind": "forked_from"})
    graph["edges"].append({"from": name(40), "to": "/out/gpt.pt", "kind": "exported_to"})
    short = fold(graph)
    assert {1, 20, 30, 40, 60} <= shown_steps(short)
    # A fold never mixes checkpoints that were rolled back with others.
    assert all(one["first_step"] > 50 or one["last_step"] <= 50 for one in folds(short))
    there = {one["id"] for one in short["nodes"]}
    assert all({edge["from"], edge["to"]} <= there for edge in short["edges"])


def test_folds_open_step_by_step_and_never_show_too_many_nodes() -> None:
    graph, opened, seen = line(10_000), list[str](), list[int]()
    for _ in range(6):
        short = fold(graph, opened)
        seen.append(len(short["nodes"]))
        hidden = sum(one["count"] for one in folds(short))
        assert hidden + len(shown_steps(short)) == 10_000
        if not folds(short):
            break
        opened.append(folds(short)[0]["id"])
    assert max(seen) < 5 * (SHOWN_MAX + 5)
    assert seen == sorted(seen)


def test_a_short_run_is_not_folded() -> None:
    graph = line(5)
    short = fold(graph)
    assert short["nodes"] == graph["nodes"]
    assert short["edges"] == graph["edges"]


def test_a_restart_in_place_keeps_its_checkpoint() -> None:
    graph = line(40)
    for step in (21, 22, 23):
        add(graph, name(step, 2), step, name(20) if step == 21 else name(step - 1, 2))
    graph["edges"].append({"from": "gpt:attempt-0001", "to": name(20), "kind": "resumed_from"})
    ids = {one["id"] for one in fold(graph)["nodes"]}
    assert {name(20), name(21, 2)} <= ids


def test_a_cycle_of_damaged_manifests_ends() -> None:
    graph = line(30)
    graph["edges"].append({"from": name(1), "to": name(30), "kind": "parent"})
    short = fold(graph)
    assert sum(one["count"] for one in folds(short)) + len(shown_steps(short)) == 30
    lone: dict[str, Any] = {"from": name(1), "to": name(1), "kind": "parent"}
    assert fold(Graph(nodes=line(1)["nodes"], edges=[lone]))["edges"] == [lone]  # type: ignore


def test_consumers_are_shown_beside_their_checkpoints_and_folded_with_them() -> None:
    graph = line(60)
    for one in [node for node in graph["nodes"] if node["kind"] == "checkpoint"]:
        used = Node(id=f"{one['id']}/eval", kind="consumer", consumer="eval", state="done")
        graph["nodes"].append(used)
        graph["edges"].append({"from": one["id"], "to": used["id"], "kind": "consumed_by"})
    graph["nodes"][21]["pinned"] = True
    short = fold(graph)
    assert [one["count"] for one in folds(short)] == [18, 39]
    consumers = {one["id"] for one in short["nodes"] if one["kind"] == "consumer"}
    assert consumers == {f"{name(step)}/eval" for step in (1, 20, 60)}
    uses = [one for one in short["edges"] if one["kind"] == "consumed_by"]
    assert [one["from"] for one in uses] == [name(1), name(20), name(60)]
