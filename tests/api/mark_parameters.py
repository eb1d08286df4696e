"""The effects of the parameters of the routes that mark runs and checkpoints."""

from __future__ import annotations

from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind

NEWEST: Final = "gpt:step-00000200.a0003.l01"
OTHER: Final = "gpt-b:step-00000150.a0001.l01"
# A `test_parameters.World`.
World = Any
Facts = dict[str, bool]


def pin_rows(w: World) -> Facts:
    w.post("/checkpoints/{checkpoint}/pin", note="for the paper")
    line = w.told("gpt", EventKind.PINNED)
    return {
        "path:checkpoint": f"gpt:{line['checkpoint']}" == NEWEST,
        "body:note": line["note"] == "for the paper",
    }


def acknowledge_rows(w: World) -> Facts:
    """The runs of `ORDERS` have no supervisor."""
    problems = [one for one in w.get("/attention") if one["kind"] == "unsupervised"]
    item = problems[0]
    done = w.post("/attention/acknowledge", id=item["id"], note="known")
    line = w.told(item["run"], EventKind.ALERT_ACKNOWLEDGED)
    return {
        "body:id": done["id"] == item["id"] == line["alert"],
        "body:note": done["acknowledged"]["note"] == line["note"] == "known",
    }


def annotate_rows(w: World, route: str, **where: Any) -> Facts:
    w.post(route, add=["old", "kept"], **where)
    done = w.post(route, add=["new"], remove=["old"], note="see the wiki", **where)
    line = w.told("gpt-b", EventKind.ANNOTATED)
    emptied = w.post(route, note="", **where)
    return {
        f"path:{next(iter(where))}": (done["run"], done["checkpoint"] or "gpt-b")
        == ("gpt-b", next(iter(where.values()))),
        "body:add": done["tags"] == ["kept", "new"] and line["tags_added"] == ["new"],
        "body:remove": line["tags_removed"] == ["old"],
        "body:note": done["note"] == line["note"] == "see the wiki"
        and bool(done["note_by"] and done["note_at"])
        and emptied["note"] is emptied["note_at"] is None
        and emptied["tags"] == done["tags"],
    }


def unpin_rows(w: World) -> Facts:
    w.post("/checkpoints/{checkpoint}/pin", checkpoint=OTHER)
    done = w.post("/checkpoints/{checkpoint}/unpin", checkpoint=OTHER)
    return {"path:checkpoint": done == {"checkpoint": OTHER, "pinned": False}}


def report_rows(w: World) -> Facts:
    given = {"accuracy": 0.25, "f1": "nan"}
    done = w.post("/checkpoints/{checkpoint}/metrics", checkpoint=OTHER, metrics=given)
    line = w.told("gpt-b", EventKind.METRIC)
    return {
        "path:checkpoint": done == {"checkpoint": OTHER, "metrics": given},
        "body:metrics": (line["metric"], line["value"]) == ("f1", "nan"),
    }
