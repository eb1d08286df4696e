"""Rows of `test_parameters`: filters of runs, and what a lineage and curves leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.support.runs import T0

ORDERS: Final = ("relaunch", "stop", "pause", "resume", "cancel")
Facts = dict[str, bool]


def filter_rows(names: Callable[..., list[str]]) -> Facts:
    """The filters of all lists of runs and all totals; `names` returns what matches."""
    every, live = set(names()), sorted(f"o-{one}" for one in ORDERS)
    return {
        "query:state": names(state="completed") == ["gpt"]
        and {"gpt", "gpt-b"} < set(names(state=["completed", "running"])) < every,
        "query:search": names(search="T-B") == ["gpt-b"],
        "query:user": names(user="eve") == ["preempted"]
        and set(names(user=["eve", "tester"])) == every,
        "query:cause": names(cause="preemption") == ["preempted"],
        "query:partition": names(partition="a100") == ["preempted"],
        "query:account": names(account="vision") == ["preempted"],
        "query:tag": names(tag="night") == ["preempted"]
        and names(tag=["night", "llm"]) == ["preempted"]
        and names(tag=["night", "other"]) == names(tag="Night") == [],
        "query:attention": "preempted" in (found := names(attention=True)) and "gpt" not in found,
        "query:created_from": names(created_from=T0 + 1) == ["gpt-b"],
        "query:created_to": sorted(names(created_to=T0 - 1)) == live,
        "query:created_within": names(created_within=60.0) == []
        and set(names(created_within=1e12)) == every,
    }


def of_total(route: str) -> Callable[[Any], Facts]:
    """The filters of a total, which counts the runs that the list shows."""
    given: dict[str, Any] = {"state": "completed", "search": "T-B", "user": "eve"}
    given |= {"cause": "preemption", "partition": "a100", "account": "vision", "tag": "night"}
    given |= {"created_from": T0 + 1, "created_to": T0 - 1, "created_within": 60.0}
    given |= {"attention": True}

    def rows(w: Any) -> Facts:
        def is_same(one: dict[str, Any]) -> bool:
            listed = w.get("/runs", limit=500, **one)["items"]
            return bool(len(listed) == w.get(route, **one)["runs"] < w.get(route)["runs"])

        return {f"query:{name}": is_same({name: value}) for name, value in given.items()}

    return rows


def group_rows(w: Any) -> Facts:
    """Goodput by user, partition, account or tag; a filter leaves the groups of matching runs."""
    route = "/goodput/groups"

    def names(**given: Any) -> list[str]:
        return sorted(str(one["name"]) for one in w.get(route, **given))

    return {
        "query:by": (names(), names(by="partition")) == (["eve", "tester"], ["None", "a100"])
        and names(by="account") == ["None", "vision"]
        # The run with two tags counts in both groups.
        and names(by="tag") == ["None", "llm", "night"],
        "query:state": names(state="completed") == ["tester"],
        "query:search": names(search="T-B") == ["tester"],
        "query:user": names(user="eve") == ["eve"],
        "query:cause": names(cause="preemption") == ["eve"],
        "query:partition": names(partition="a100") == ["eve"],
        "query:account": names(account="vision") == ["eve"],
        "query:tag": names(tag="night") == ["eve"],
        "query:attention": "eve" in names(attention=True),
        "query:created_from": names(created_from=T0 + 1) == ["tester"],
        "query:created_to": names(created_to=T0 - 1) == ["tester"],
        "query:created_within": names(created_within=60.0) == [],
    }


def table_rows(w: Any) -> Facts:
    route = "/tables/runs"

    def names(**given: Any) -> list[str]:
        return [one["run"] for one in w.get(route, format="json", **given)]

    text = w.call(f"GET /api/v1{route}").text
    return {
        "query:sort": names(sort="name") == sorted(names()) != names(),
        "query:order": names(sort="name", order="desc") == sorted(names())[::-1],
        "query:format": text.startswith("run,name,uid,state,") and "completed" in text,
        **filter_rows(names),
    }


def lineage_rows(w: Any) -> Facts:
    route = "/runs/{run}/lineage"

    def kinds(**given: Any) -> list[str]:
        return [one["kind"] for one in w.get(route, run="chain", **given)["nodes"]]

    folds = [one for one in w.get(route, run="chain", folded=True)["nodes"] if "count" in one]
    return {
        "path:run": w.differs(route, "run", "gpt", "gpt-b"),
        "query:folded": "fold" not in kinds() and kinds(folded=True).count("fold") == 1,
        "query:opened": "fold" not in kinds(folded=True, opened=folds[0]["id"]),
    }


def metric_rows(w: Any) -> Facts:
    route = "/runs/{run}/metrics"

    def points(**given: Any) -> list[dict[str, Any]]:
        return [point for one in w.get(route, **given) for point in one["points"]]

    return {
        "path:run": w.differs(route, "run", "gpt", "gpt-b"),
        "query:name": [any(one["values"] for one in points(name=n)) for n in ("loss", "x")]
        == [True, False],
        "query:points": len(points(points=1)) < len(points()),
    }


def comparison_rows(w: Any) -> Facts:
    """Runs beside each other: in the order of the request, each of them once for each name."""
    names = [w.get("/compare/runs", run=one)["runs"] for one in ("gpt", ["gpt-b", "gpt"])]
    return {"query:run": names == [["gpt"], ["gpt-b", "gpt"]]}


def curve_rows(w: Any) -> Facts:
    route = "/tables/curves"

    def found(key: str, **given: Any) -> list[Any]:
        return [one[key] for one in w.get(route, format="json", **given)]

    text = w.call(f"GET /api/v1{route}").text
    return {
        "query:run": found("run", run="gpt-b") == []
        and {*found("run", run=["gpt-b", "gpt"])} == {"gpt"},
        "query:name": {*found("metric")} == {"loss", "steps_per_s"}
        and {*found("metric", name="loss")} == {"loss"},
        "query:points": 0 < len(found("step", points=1)) < len(found("step")),
        "query:format": text.startswith("run,attempt,launch,step,time,time_s,metric,last,low,high"),
    }
