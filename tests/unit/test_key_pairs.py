"""Pairs of spec keys that meet: both have their effects, or both names are in the refusal.

Further contradictions are in `test_spec_effects`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.runs import RunFolder
from tests.unit.test_contracts_keep_rules import BRANCH, NOW
from tests.unit.test_spec_effects import merged, problems_of
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.keep_rules import kept_by_rules
from holdfast.flows.parameters import load_spec
from holdfast.trainer import load_checkpoint, load_pretrained
from holdfast.trainer.session.settings import Settings
from holdfast.workers.checkpoints.retention import Facts, plan_prune
from holdfast.workers.decisions.sizes import allowed_sizes, choose_gpus

# A value of each keep rule.
RULES: Final[dict[str, Any]] = {
    "last": 1,
    "best": {"metric": "loss", "n": 2},
    "every_steps": 300,
    "doubling_steps": 200,
    "every_hours": 2,
    "ttl": "90m",
}


def kept(**rules: Any) -> set[str]:
    return set(kept_by_rules(BRANCH, Keep.model_validate(rules), now=NOW))


def test_every_keep_rule_has_a_row() -> None:
    assert RULES.keys() == Keep.model_fields.keys()


@pytest.mark.parametrize(("one", "other"), combinations(RULES, 2))
def test_two_keep_rules_keep_what_either_keeps(one: str, other: str) -> None:
    both = kept(**{one: RULES[one], other: RULES[other]})
    first, second = kept(**{one: RULES[one]}), kept(**{other: RULES[other]})
    assert both == first | second
    assert len(both) < len(BRANCH)


@pytest.mark.parametrize("rule", RULES)
def test_a_pin_keeps_a_checkpoint_beside_each_keep_rule(rule: str, tmp_path: Path) -> None:
    made = RunFolder(tmp_path, "kept", "k" * 32)
    names = [made.commit(one.step, 1, at=one.committed_at, metrics=one.metrics) for one in BRANCH]
    keep = Keep.model_validate({rule: RULES[rule]})
    manifests = committed_checkpoints(made.paths)

    def deleted(*pins: str) -> set[str]:
        plan = plan_prune(manifests, keep=keep, facts=Facts(pins=pins), now=NOW)
        return {one.name for one in plan if not one.is_kept}

    unpinned = deleted()
    pin = min(unpinned)
    assert pin in names
    assert deleted(pin) == unpinned - {pin}


# `elastic` on a place, and the allowed sizes or the parts of the refusal.
TWO_NODES: Final = {"resources": {"executor": "slurm", "nodes": 2, "gpus_per_node": 4}}
HALF_RANKS: Final = merged(TWO_NODES, {"resources": {"nproc_per_node": 2}})
ELSEWHERE: Final = merged(TWO_NODES, {"resources": {"fallbacks": [{"partition": "prod"}]}})
LOCAL: Final = {"resources": {"gpus_per_node": 2}}
SIZES: Final[list[tuple[dict[str, Any], dict[str, Any], tuple[int, ...] | list[str]]]] = [
    (TWO_NODES, {"min_gpus": 2, "max_gpus": 16}, (2, 3, 4, 8, 12, 16)),
    (TWO_NODES, {"min_gpus": 8, "max_gpus": 8}, (8,)),
    (TWO_NODES, {"min_gpus": 5, "max_gpus": 7}, ["resources: 8 GPUs", "outside elastic 5 to 7"]),
    (TWO_NODES, {"min_gpus": 4, "on_preemption": [2]}, ["elastic.on_preemption", "4 to 8"]),
    (TWO_NODES, {"max_gpus": 8, "on_preemption": [16]}, ["elastic.on_preemption", "8 to 8"]),
    (TWO_NODES, {"min_gpus": 2, "on_preemption": [4]}, (2, 3, 4, 8)),
    (TWO_NODES, {"choices": [4], "on_preemption": [8, 4]}, (4,)),
    (TWO_NODES, {"choices": [4], "min_gpus": 4, "max_gpus": 8}, (4,)),
    (TWO_NODES, {"choices": [6]}, ["elastic.choices", "do not fill nodes of 4"]),
    # Below one node, each count needs a whole number of ranks.
    (HALF_RANKS, {"choices": [2, 4]}, (2, 4)),
    (HALF_RANKS, {"choices": [1]}, ["elastic.choices", "resources.nproc_per_node = 2"]),
    (HALF_RANKS, {"min_gpus": 2}, (2, 4, 8)),
    (HALF_RANKS, {"min_gpus": 1}, ["elastic.min_gpus", "resources.nproc_per_node = 2"]),
    (HALF_RANKS, {"max_gpus": 16}, (8, 12, 16)),
    (HALF_RANKS, {"on_preemption": [3]}, ["elastic.on_preemption", "nproc_per_node = 2"]),
    (ELSEWHERE, {"choices": [4]}, (4,)),
    (ELSEWHERE, {"min_gpus": 4, "max_gpus": 16}, (4, 8, 12, 16)),
    (ELSEWHERE, {"on_preemption": [4]}, (4, 8)),
    (ELSEWHERE, {"min_gpus": 4, "grow": True}, (4, 8)),
    (LOCAL, {"min_gpus": 1, "max_gpus": 2}, (1, 2)),
    (LOCAL, {"max_gpus": 4}, ["elastic.max_gpus 4", "the local executor has one node"]),
    (LOCAL, {"choices": [4]}, ["elastic.choices 4", "the local executor has one node"]),
    (LOCAL, {"on_preemption": [4]}, ["elastic.on_preemption 4", "the local executor"]),
    ({"resources": {"gpus_per_node": 0, "nproc_per_node": 2}}, {"choices": [1]}, (1,)),
]


@pytest.mark.parametrize(("place", "elastic", "expected"), SIZES)
def test_keys_of_sizes_are_decided_together(
    place: dict[str, Any], elastic: dict[str, Any], expected: tuple[int, ...] | list[str]
) -> None:
    table = merged(place, {"elastic": elastic})
    problems = problems_of(table)
    if isinstance(expected, list):
        (problem,) = problems
        assert all(part in problem for part in expected), problem
        return
    assert problems == []
    spec = load_spec({"name": "kelp", "command": ["train.py"], **table})
    assert allowed_sizes(spec) == expected
    if not spec.elastic.on_preemption:
        for free in expected:
            chosen, _ = choose_gpus(
                spec,
                current=expected[-1],
                preemptions=1,
                after_preemption=True,
                capacity=free,
                fits=lambda _: True,
            )
            assert chosen == (free if len(expected) > 1 or free < spec.gpus else expected[0])


# Times and saves: whether they agree, or the parts of the refusal.
RHYTHMS: Final[list[tuple[dict[str, Any], list[str]]]] = [
    *(
        ({"checkpoint": {"interval": every, "snapshots": kept}}, [])
        for every in ("5m", "auto")
        for kept in (30, 100, "auto", "off")
    ),
    *(
        ({"checkpoint": {"interval": 50, "snapshots": kept}}, [])
        for kept in (30, 75, "auto", "off")
    ),
    ({"checkpoint": {"interval": 50, "snapshots": 50}}, ["snapshots 50", "interval 50"]),
    *(
        ({"checkpoint": {"interval": every, "snapshots": 30, "budget": "1GB"}}, [])
        for every in (50, "5m", "auto")
    ),
    ({"checkpoint": {"interval": "59m"}, "resources": {"time_limit_min": 60}}, []),
    (
        {"checkpoint": {"interval": "1h"}, "resources": {"time_limit_min": 60}},
        ["checkpoint.interval 3600", "resources.time_limit_min 60", "the first of these saves"],
    ),
    ({"checkpoint": {"interval": 5000}, "resources": {"time_limit_min": 60}}, []),
    ({"supervision": {"grace_s": 60, "flush_timeout_s": 60}}, []),
    ({"supervision": {"flush_timeout_s": 30}}, []),
    # A bound of a save may be longer than the attempt; it is no wait.
    ({"supervision": {"flush_timeout_s": 7200}, "resources": {"time_limit_min": 60}}, []),
]


@pytest.mark.parametrize(("table", "parts"), RHYTHMS)
def test_keys_of_times_and_saves_are_decided_together(
    table: dict[str, Any], parts: list[str]
) -> None:
    problems = problems_of(table)
    assert bool(problems) == bool(parts), problems
    assert all(part in "\n".join(problems) for part in parts), problems
    given = table.get("checkpoint", {})
    if not parts and "snapshots" in given:
        found = Settings.of(given["interval"], given["snapshots"])
        every = given["snapshots"] if isinstance(given["snapshots"], int) else 0
        assert (found.rhythm.every, found.rhythm.is_auto) == (every, given["snapshots"] == "auto")
        assert found.interval.is_auto == (given["interval"] == "auto")


class Two(nn.Module):
    """Two layers; `names` are theirs."""

    def __init__(self, value: float, *names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(1, 1, bias=False)
            nn.init.constant_(layer.weight, value)
            self.add_module(name, layer)


# Pairs of what a load takes: the names of the model, the arguments, and the loaded ones or parts
# of the refusal. The checkpoint has the layers `a` and `b` with the value 1.
LOADS: Final[list[tuple[str, dict[str, Any], set[str] | list[str]]]] = [
    ("ab", {"include": ["model.a", "model.b"], "exclude": "model.b"}, {"a"}),
    ("ab", {"include": "model.a", "exclude": "model.a"}, ["include", "exclude"]),
    ("ab", {"include": "model.a", "strict": True}, {"a"}),
    ("ab", {"exclude": "model.a", "strict": True}, {"b"}),
    ("ac", {"include": "model.a", "strict": True}, {"a"}),
    ("ac", {"exclude": ["model.c", "model.b"], "strict": True}, {"a"}),
    ("ac", {"strict": False}, {"a"}),
    ("ac", {"strict": True}, ["model.b", "model.c"]),
    ("ac", {"rename": {"model.b.*": "model.c.*"}, "strict": True}, {"a", "c"}),
    ("ac", {"rename": {"model.b.*": "model.c.*"}, "include": "model.c"}, {"c"}),
    ("ac", {"rename": {"model.b.*": "model.c.*"}, "exclude": "model.c"}, {"a"}),
    ("cd", {"rename": {"model.b.*": "model.c.*"}, "strict": False}, {"c"}),
    ("cd", {"rename": {"model.b.*": "model.c.*"}, "strict": True}, ["model.a", "model.d"]),
]


@pytest.mark.parametrize(("names", "given", "expected"), LOADS)
def test_what_a_load_takes_is_decided_together(
    names: str, given: dict[str, Any], expected: set[str] | list[str], tmp_path: Path
) -> None:
    save_with_dcp({"model": Two(1.0, "a", "b").state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    calls: list[Callable[[nn.Module], object]]
    calls = [lambda model: load_checkpoint(tmp_path, model, **given)]
    if "include" not in given:
        calls.append(lambda model: load_pretrained(model, tmp_path, **_unprefixed(given)))
    for load in calls:
        model = Two(0.0, *names)
        if isinstance(expected, list):
            with pytest.raises(HoldfastError) as refused:
                load(model)
            words = [part.removeprefix("model.") for part in expected]
            assert all(part in str(refused.value) for part in words), refused.value
            assert not any(bool(value.any()) for value in model.state_dict().values())
            continue
        load(model)
        loaded = {key.split(".")[0] for key, value in model.state_dict().items() if value.any()}
        assert loaded == expected


def _unprefixed(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with the names of the model's own parameters."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {plain(key): plain(one) for key, one in value.items()}
        if isinstance(value, list):
            # The source's extra names cannot be excluded, only the model's.
            return [plain(one) for one in value]
        return value.removeprefix("model.") if isinstance(value, str) else value

    return {key: plain(value) for key, value in given.items()}
