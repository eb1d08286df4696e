"""The effects of the parameters of the routes to logs, for `test_parameters.py`."""

from __future__ import annotations

from typing import Any, Final

API: Final = "/api/v1"
LOG: Final = "attempts/0003/logs/node-0000/l02/rank-00000.stdout.log"
# A `test_parameters.World`.
World = Any
Facts = dict[str, bool]


def log_rows(w: World) -> Facts:
    route = "/runs/{run}/logs/{rank}"

    def text(**given: Any) -> str:
        return str(w.get(route, **given)["text"])

    return {
        "path:run": w.call(f"GET {API}{route}", run="gpt-b").status_code == 404,
        "path:rank": "rank 1" in text(rank=1),
        "query:attempt": text(attempt=1).startswith("attempt 1"),
        "query:stream": "stderr" in text(stream="stderr"),
        "query:launch": "launch 1" in text(launch=1) and "launch 2" in text(),
        "query:offset": text(offset=19) == "rank 0 stdout\n",
        "query:before": text(before=19) != "" and "rank 0" not in text(before=19),
        "query:limit": text(limit=15) == "rank 0 stdout\n",
    }


def log_file_rows(w: World) -> Facts:
    route = "/runs/{run}/log-files"
    w.paths("weights").flow_log.write_text("supervising\n")
    kinds = {one["kind"] for one in w.get(route, run="weights")}
    return {
        "path:run": kinds == {"supervisor"},
        "query:attempt": w.differs(route, "attempt", 1, 3),
    }


def log_part_rows(w: World) -> Facts:
    route = "/runs/{run}/log-files/part"

    def text(**given: Any) -> str:
        return str(w.get(route, **given)["text"])

    return {
        "path:run": w.call(f"GET {API}{route}", run="gpt-b").status_code == 404,
        "query:file": "rank 1" in text(file=LOG.replace("00000.", "00001.")),
        "query:offset": text(offset=19) == "rank 0 stdout\n",
        "query:before": text(before=19) != "" and "rank 0" not in text(before=19),
        "query:limit": text(limit=15) == "rank 0 stdout\n",
    }


def log_search_rows(w: World) -> Facts:
    def found(run: str = "gpt", **given: Any) -> dict[str, Any]:
        answer = w.client.get(f"{API}/runs/{run}/log-files/search", params=given)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def places(**given: Any) -> list[tuple[int, int, int]]:
        return [(one["attempt"], one["launch"], one["rank"]) for one in found(**given)["matches"]]

    w.paths("gpt").attempt(3).rank_log(0, 2, 1, "stderr").write_text("ValueError: no\n")
    every, first = places(text="rank"), found(text="rank", limit=2)
    (error,) = found(errors=True)["matches"]
    return {
        "path:run": found("gpt-b", text="rank")["matches"] == [],
        "query:text": len(every) == 7 and places(text="RANK 1 STD")[0] == (3, 1, 1),
        "query:errors": (error["text"], error["offset"]) == ("ValueError: no", 0),
        "query:attempt": places(text="rank", attempt=1) == [(1, 1, 0), (1, 1, 1)],
        "query:kind": places(text="rank", kind="torchrun") == [],
        "query:rank": {one[2] for one in places(text="rank", rank=1)} == {1},
        "query:file": places(text="rank", file=LOG) == [(3, 2, 0)],
        "query:after": places(text="rank", limit=2, after=first["next"]) == every[2:4],
        "query:limit": len(first["matches"]) == 2,
    }


def download_rows(w: World) -> Facts:
    def text(run: str = "gpt", file: str = LOG) -> str:
        route = "/runs/{run}/log-files/download"
        return str(w.call(f"GET {API}{route}", run=run, file=file).text)

    return {
        "path:run": "no log file" in text(run="gpt-b"),
        "query:file": text() != text(file=LOG.replace("00000.", "00001.")),
    }
