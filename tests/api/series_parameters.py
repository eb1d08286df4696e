"""The effects of the parameters of the routes to ranks and GPUs over time."""

from __future__ import annotations

from typing import Any, Final

from tests.support.series import write_gpus, write_ranks

from holdfast.workers.nodes.gpus import GpuBeat
from holdfast.workers.nodes.series import RankTimes

START: Final = 1_764_000_000.0
# A `test_parameters.World`.
World = Any
Facts = dict[str, bool]


def heat_rows(w: World) -> Facts:
    route, attempt = "/runs/{run}/heat-map", w.paths("gpt").attempt(3)
    if not attempt.series.exists():
        for node in range(2):
            write_ranks(
                attempt,
                lambda rank, _: RankTimes(1.0 + rank, 0.5, 0.25),
                start=START,
                buckets=10,
                node=node,
            )

    def found(**given: Any) -> dict[str, Any]:
        return dict(w.get(route, **given))

    whole = found()
    late, early = found(time_from=START + 50), found(time_to=START + 50)
    return {
        "path:run": found(run="o-stop")["rows"] == [] and len(whole["rows"]) == 4,
        "query:attempt": found(attempt=1)["rows"] == [],
        # Exact to half a level, which is 5 %.
        "query:value": found(value="data")["lowest_s"] == 0.5 and 0.95 < whole["lowest_s"] < 1.05,
        "query:rank_from": [one["rank"] for one in found(rank_from=3)["worst"]] == [3],
        "query:rank_to": found(rank_to=1)["worst"][0]["rank"] == 1,
        "query:time_from": (late["start_s"], late["buckets"]) == (START + 50, 50),
        "query:time_to": (early["start_s"], early["buckets"]) == (START, 50),
        "query:buckets": (whole["buckets"], found(buckets=20)["bucket_s"]) == (100, 5),
    }


def gpu_rows(w: World) -> Facts:
    route, attempt = "/runs/{run}/gpus", w.paths("gpt").attempt(3)
    if not list(attempt.directory.glob("series/gpus-*")):
        for node in range(2):
            beats = [(GpuBeat(index=0, uuid=f"GPU-{node}", power_w=100 + n),) for n in range(10)]
            write_gpus(attempt, beats, start=START, node=node)

    def powers(**given: Any) -> list[float]:
        return list(w.get(route, **{"buckets": 10, **given})["gpus"][0]["power_w"])

    return {
        "path:run": w.get(route, run="o-stop")["nodes"] == [] and len(powers()) == 10,
        "query:attempt": w.get(route, attempt=1)["gpus"] == [],
        "query:node": w.get(route, node=1)["gpus"][0]["uuid"] == "GPU-1",
        "query:time_from": powers(time_from=START + 50, buckets=5) == [105, 106, 107, 108, 109],
        "query:time_to": powers(time_to=START + 50, buckets=5) == [100, 101, 102, 103, 104],
        "query:buckets": powers(buckets=2) == [102, 107],
    }
