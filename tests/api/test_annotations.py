"""Tags and notes over the API: who may change them, and where they are shown."""

from __future__ import annotations

import csv
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, get, wait_for

from holdfast.api.tokens import Role
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import load_events

NEWEST = "gpt:step-00000200.a0003.l01"


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    return served.client()


def post(api: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = api.post(f"/api/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_an_ended_run_gets_tags_and_a_note_which_all_views_show(api: httpx.Client) -> None:
    assert get(api, "/runs/gpt")["state"] == "completed"
    done = post(api, "/runs/gpt/annotate", add=["paper", "llm"], note="figure 3")
    assert (done["tags"], done["note"], done["note_by"]) == (["llm", "paper"], "figure 3", "ann")
    wait_for(lambda: get(api, "/runs/gpt")["note"] == "figure 3")
    shown = get(api, "/runs/gpt")
    assert (shown["tags"], shown["note_by"]) == (["llm", "paper"], "ann")
    assert shown["note_at"] == done["note_at"]
    found = get(api, "/runs?tag=llm&tag=paper")["items"]
    assert [(one["run"], one["tags"]) for one in found] == [("gpt", ["llm", "paper"])]
    assert get(api, "/runs?tag=llm&tag=other")["items"] == []
    assert get(api, "/filters")["tags"] == ["llm", "paper"]
    table = api.get("/api/v1/tables/runs?tag=llm").text
    assert [one["tags"] for one in csv.DictReader(io.StringIO(table))] == ["llm paper"]
    post(api, "/runs/gpt/annotate", remove=["llm", "paper"], note="")
    wait_for(lambda: get(api, "/filters")["tags"] == [])
    assert get(api, "/runs/gpt")["note"] is None


def test_a_checkpoint_has_its_own_until_it_is_deleted(api: httpx.Client) -> None:
    done = post(api, "/checkpoints/gpt:latest/annotate", add=["best"], note="for the demo")
    assert done["checkpoint"] == NEWEST
    wait_for(lambda: get(api, f"/checkpoints/{NEWEST}")["tags"] == ["best"])
    rows = get(api, "/runs/gpt/checkpoints")["items"]
    noted = [(one["id"], one["tags"], one["note"]) for one in rows if one["tags"]]
    assert noted == [(NEWEST, ["best"], "for the demo")]
    assert get(api, "/runs/gpt")["tags"] == []


def test_two_operators_at_the_same_time_both_count(api: httpx.Client) -> None:
    def tag(number: int) -> Any:
        return post(api, "/runs/gpt-b/annotate", add=[f"t{number}"], note=f"note {number}")

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(tag, range(8)))
    assert all(f"t{number}" in one["tags"] for number, one in enumerate(answers))
    wait_for(lambda: len(get(api, "/runs/gpt-b")["tags"]) == 8)
    assert get(api, "/runs/gpt-b")["note"].startswith("note ")


def test_what_cannot_be_is_refused_with_the_reason(api: httpx.Client) -> None:
    assert "nothing to change" in post(api, "/runs/gpt/annotate", 422)["message"]
    both = post(api, "/runs/gpt/annotate", 422, add=["a"], remove=["a"])
    assert "not both" in both["message"]
    odd = post(api, "/runs/gpt/annotate", 422, add=["\u0633\u0631"])
    assert "expected a tag of 1 to 64 letters (A to Z)" in odd["message"]
    hidden = post(api, "/runs/gpt/annotate", 422, note="a\u202eb")
    assert "character '\\u202e' at position 2" in hidden["message"]
    gone = post(api, "/checkpoints/gpt:step-00000001.a0001.l01/annotate", 404, add=["a"])
    assert gone["code"] == "not_found"


def test_only_an_operator_may_and_the_audit_says_who(served: Served, api: httpx.Client) -> None:
    text = served.services.tokens.add("the reader", Role.READER)[1]
    with served.stranger(Authorization=f"Bearer {text}") as reader:
        for path in ("/runs/gpt/annotate", f"/checkpoints/{NEWEST}/annotate"):
            assert reader.post(f"/api/v1{path}", json={"add": ["a"]}).status_code == 403
    post(api, f"/checkpoints/{NEWEST}/annotate", add=["audited"])
    post(api, "/runs/gpt/annotate", 422, note="\x07")
    events = load_events(served.runs["gpt"].paths)
    done, refused = [one.data for one in events if one.kind is EventKind.AUDIT][-2:]
    assert (done["action"], done["outcome"], done["by"]) == ("annotate", "done", "ann")
    assert NEWEST.endswith(done["checkpoint"])
    assert refused["outcome"].startswith("refused: the note has the control")
