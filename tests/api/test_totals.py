"""Totals and sorting over all runs, not only those on the current page."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, wait_for
from tests.support.runs import T0, RunFolder

from holdfast.api.routes.checkpoints import FORK_KEYS
from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState
from holdfast.lineage.queries.pages import RUN_ORDERS


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    """A client of a server with four more runs, of 1 to 4 GPUs and checkpoints, each priced."""
    for number in range(1, 5):
        price = {"gpu_hour": 2.0, "currency": "EUR" if number % 2 else "USD"}
        run = RunFolder(served.root, f"sum-{number}", f"{number:032d}", {"cost": price})
        run.submit(1, number, T0)
        run.claim(1, T0 + 1)
        run.launch(1, 1, 0, None, number)
        for step in range(1, number + 1):
            run.commit(step * 10, 1, at=T0 + 100 * number + step)
        run.finish(1, AttemptState.COMPLETED, None, 10 * number, T0 + 1000 * number)
        served.services.watch.touch(run.paths)
    client = served.client()
    wait_for(lambda: len(get(client, "/runs", search="sum-")["items"]) == 4)
    return client


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(api: httpx.Client, path: str, **query: Any) -> list[str]:
    """The runs of a list, read in pages of one."""
    found: list[str] = []
    after: dict[str, str] = {}
    for _ in range(10):
        page = get(api, path, search="sum-", limit=1, **query, **after)
        found += [one["run"] for one in page["items"]]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}
    raise AssertionError(f"{path} {query} has more pages than runs")


@pytest.mark.parametrize("sort", ["step", "gpus", "checkpoint", "kept", "kept_bytes", "name"])
@pytest.mark.parametrize("path", ["/runs", "/storage"])
def test_lists_are_sorted_over_all_pages(api: httpx.Client, path: str, sort: str) -> None:
    ascending = [f"sum-{number}" for number in range(1, 5)]
    assert names(api, path, sort=sort, order="asc") == ascending
    assert names(api, path, sort=sort, order="desc") == ascending[::-1]
    usual = names(api, path, sort=sort)
    assert usual == (ascending if sort == "name" else ascending[::-1])


def test_every_sort_order_pages_through_all_runs(api: httpx.Client) -> None:
    for sort in RUN_ORDERS:
        forward = names(api, "/runs", sort=sort, order="asc")
        assert forward == names(api, "/runs", sort=sort, order="desc")[::-1]
        assert len(set(forward)) == 4, sort
    page = get(api, "/runs", sort="step", order="asc", limit=1)
    wrong = api.get("/api/v1/runs", params={"sort": "step", "order": "desc", "after": page["next"]})
    assert wrong.status_code == 422


def test_totals_cover_all_runs(api: httpx.Client) -> None:
    rows = get(api, "/storage", search="sum-", limit=100)["items"]
    told = get(api, "/storage/totals", search="sum-")
    assert told.pop("runs") == 4
    assert told == {name: sum(row[name] for row in rows) for name in told}
    assert told["kept"] == 10
    runs = get(api, "/runs", search="sum-", limit=100)["items"]
    told = get(api, "/goodput", search="sum-")
    for name in ("total_s", "training_s", "gpu_hours", "stopped_s", "steps_lost"):
        assert told[name] == pytest.approx(sum(run["goodput"][name] for run in runs)), name
    assert told["ettr"] == pytest.approx(told["training_s"] / told["total_s"])
    costs = {one["currency"]: one["cost"] for one in told["money"]}
    for currency in ("EUR", "USD"):
        mine = [r["goodput"]["cost"] for r in runs if r["goodput"]["currency"] == currency]
        assert costs[currency] == pytest.approx(sum(mine))
    assert get(api, "/goodput", search="no such run")["ettr"] is None


def test_keys_that_a_fork_may_change_exist_in_the_spec() -> None:
    for key in FORK_KEYS:
        part: type[SpecPart] = RunSpec
        *way, last = key.split(".")
        for name in way:
            kind = part.model_fields[name].annotation
            assert isinstance(kind, type), key
            assert issubclass(kind, SpecPart), key
            part = kind
        assert last in part.model_fields, key
