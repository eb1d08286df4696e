"""The keep rules: which checkpoints each rule keeps, and the reason that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.contracts.spec.checkpoint import Checkpointing, Keep
from holdfast.contracts.spec.keep_rules import kept_by_rules, why_not_kept

HOUR_S = 3600.0
NOW = 100 * HOUR_S


@dataclass(frozen=True)
class Entry:
    step: int
    committed_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"s{self.step}"


LOSSES = {100: 0.9, 200: 0.5, 300: 0.7, 400: 0.5, 500: 0.6}
# One checkpoint per hour, the newest just now. The one of step 600 has no loss.
BRANCH = [
    Entry(step, NOW - (600 - step) / 100 * HOUR_S, {"loss": LOSSES[step]} if step < 600 else {})
    for step in (100, 200, 300, 400, 500, 600)
]
ALL = [100, 200, 300, 400, 500, 600]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({}, dict.fromkeys(ALL, "all")),
        ({"last": 2}, {500: "last 2", 600: "last 2"}),
        ({"last": 9}, dict.fromkeys(ALL, "last 9")),
        (
            {"best": {"metric": "loss", "n": 3}},
            {
                200: "best 1 of 3 by loss (0.5)",
                400: "best 2 of 3 by loss (0.5)",
                500: "best 3 of 3 by loss (0.6)",
            },
        ),
        ({"best": {"metric": "loss", "mode": "max"}}, {100: "best 1 of 1 by loss (0.9)"}),
        # Any of them may be the best: the program may log the metric later, under this name or not.
        (
            {"last": 1, "best": {"metric": "accuracy"}},
            {
                **dict.fromkeys(ALL, "no checkpoint has accuracy yet"),
                600: "last 1, no checkpoint has accuracy yet",
            },
        ),
        ({"every_steps": 200}, dict.fromkeys((200, 400, 600), "every 200 steps")),
        # Saves by time rarely hit a multiple exactly: the first save past it is kept instead.
        ({"every_steps": 250}, {300: "every 250 steps", 500: "every 250 steps"}),
        ({"every_steps": 1}, dict.fromkeys(ALL, "every step")),
        (
            {"doubling_steps": 100},
            dict.fromkeys((100, 200, 400), "doubling of 100 steps"),
        ),
        ({"doubling_steps": 70}, dict.fromkeys((100, 200, 300, 600), "doubling of 70 steps")),
        ({"doubling_steps": 700}, {}),
        # Windows of two hours end at even hours.
        ({"every_hours": 2}, dict.fromkeys((100, 200, 400, 600), "every 2 h")),
        ({"every_hours": 0.5}, dict.fromkeys(ALL, "every 0.5 h")),
        ({"ttl": "90m"}, {500: "younger than 90m", 600: "younger than 90m"}),
        (
            {"last": 1, "ttl": "2h", "every_steps": 600},
            {500: "younger than 2h", 600: "last 1, every 600 steps, younger than 2h"},
        ),
    ],
)
def test_what_each_rule_keeps(keep: dict[str, Any], kept: dict[int, str]) -> None:
    found = kept_by_rules(BRANCH, Keep.model_validate(keep), now=NOW)
    assert {name: ", ".join(why) for name, why in found.items()} == {
        f"s{step}": why for step, why in kept.items()
    }


def test_kept_checkpoints_stay_kept_after_the_others_are_deleted() -> None:
    keep = Keep.model_validate({"every_steps": 150, "every_hours": 2, "best": {"metric": "loss"}})
    names = set(kept_by_rules(BRANCH, keep, now=NOW))
    rest = [one for one in BRANCH if one.name in names]
    assert set(kept_by_rules(rest, keep, now=NOW)) == names


def test_a_nan_metric_is_never_best() -> None:
    branch = [Entry(1, metrics={"loss": float("nan")}), Entry(2, metrics={"loss": 3.0})]
    keep = Keep.model_validate({"best": {"metric": "loss", "n": 5}})
    assert list(kept_by_rules(branch, keep, now=NOW)) == ["s2"]
    assert kept_by_rules([], keep, now=NOW) == {}


def test_why_not_kept_names_every_rule() -> None:
    keep = Keep.model_validate(
        {
            "last": 3,
            "best": {"metric": "loss", "n": 2},
            "every_steps": 50,
            "doubling_steps": 4,
            "every_hours": 6,
            "ttl": "7d",
        }
    )
    assert why_not_kept(Entry(10, metrics={"loss": 1.0}), keep) == (
        "not among the last 3, not among the best 2 by loss, not the first of 50 steps, "
        "not the first of a doubling of 4 steps, not the first of 6 h, older than 7d"
    )
    assert why_not_kept(Entry(10), keep).startswith("not among the last 3, without loss,")


@pytest.mark.parametrize(
    ("given", "size"),
    [("500GB", 500 * 10**9), ("2TiB", 2 << 40), ("1.5 MB", 1_500_000), ("12B", 12), (77, 77)],
)
def test_budgets_in_bytes(given: int | str, size: int) -> None:
    assert Checkpointing(budget=given).budget_bytes == size
    assert Checkpointing().budget_bytes is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"budget": "500"}, "a size such as '500GB'"),
        ({"budget": "many GB"}, "a size such as '500GB'"),
        ({"budget": "0GB"}, "a size such as '500GB'"),
        ({"budget": 0}, "greater than or equal to 1"),
        ({"keep": {"ttl": "12"}}, "such as '12h' or '7d'"),
        ({"keep": {"ttl": "0h"}}, "such as '12h' or '7d'"),
        ({"keep": {"best": {"n": 2}}}, "metric"),
        ({"keep": {"best": {"metric": "loss", "mode": "least"}}}, "'min' or 'max'"),
        ({"keep": {"every_hours": 0}}, "greater than 0"),
    ],
)
def test_invalid_keep_rules_and_budgets_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        Checkpointing.model_validate(given)
