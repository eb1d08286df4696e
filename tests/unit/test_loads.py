"""What commits loads: a state that the same command could not load is refused before it is saved.

Each program is trained, saved, loaded into new objects and trained to its end. The result is
compared bit by bit with plain torch that was never interrupted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.load_cases import (
    EXCLUDED,
    REFUSED,
    SAME,
    Launch,
    count,
    run_fast,
    run_processes,
    run_session,
)
from tests.support.load_programs import Program, Twice
from tests.unit.test_refused_tensors import Hidden, hidden
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.errors import CheckpointError, SaveError
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.trainer import dcp
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.pacing.cadence import Cadence, Interval
from holdfast.trainer.planning.signature import Signature
from holdfast.trainer.state import plain
from holdfast.trainer.state.fresh import FIT, ResumeFit
from holdfast.trainer.state.train_state import TrainState

# What stood in the way of a load before, and is loaded as in plain torch.
LOADED: dict[str, dict[str, Any]] = {
    **{f"extra state: {kind}": {"blocks": [kind]} for kind in ("bytes", "list", "mapping")},
    "extra state: tensors": {"blocks": ["tensors", "number"]},
    "observer that resizes itself": {"blocks": ["observer all", "observer low", "hooked"]},
    "conjugated and negated buffers": {"blocks": ["buffer conj", "buffer neg"]},
    "names that coincide": {"extras": ["collide", "collide_alone"], "scheduler": "collides"},
    "types of an extra": {"extras": ["types", "types_alone"]},
    "an extra that shares the model's memory": {"extras": ["best", "clears"]},
    "a scheduler whose state is a tensor": {"scheduler": "tensor"},
    "state of the program": {"events": {"slow dict": 2, "slow pair": 3}},
    "state before the first step": {"events": {"slow dotted": 1}, "optimizer": "hoarder"},
    "an option of another class": {"events": {"nesterov": 1, "tensor option": 3}, "groups": 5},
    "momentum from step 3 on": {"events": {"momentum": 3}, "optimizer": "sgd"},
}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a buffer that grows": (
        {"blocks": ["buffer empty"], "events": {"grow": 3}},
        r"model\.block0\.b: then \(0, 3\), now \(3, 3\)",
    ),
    "a buffer that comes": ({"events": {"buffer": 3}}, r"did not have then: model\.in\.late"),
    "a buffer that goes": (
        {"blocks": ["norm"], "events": {"vanish": 3}},
        r"no longer: model\.block0\.running_mean, model\.block0\.running_var",
    ),
    "a module that loads as torch does": (
        {"blocks": ["observer super"]},
        r"size mismatch for block0\.low",
    ),
    "an expanded buffer": ({"blocks": ["buffer expanded"]}, r"model\.block0\.b; .*clone"),
    "buffers that part": (
        {"blocks": ["buffer twins"], "events": {"twins": 3}},
        r"model\.block0\.b, model\.block0\.c",
    ),
    "an extra state without a setter": (
        {"blocks": ["no setter"]},
        r"model\.block0\._extra_state: .*without set_extra_state",
    ),
    "a group that comes": (
        {"events": {"add group": 3}},
        r"the groups of optimizer 0 have changed: with late\.bias, late\.weight",
    ),
    "an empty group that comes": ({"events": {"add empty group": 3}}, r"2 instead of 1"),
    "a parameter in another group": ({"events": {"move group": 3}, "groups": 2}, "have changed"),
    "an option that goes": ({"events": {"drop option": 3}}, r"param_groups\.in\.weight\.tag"),
    "another optimizer": ({"events": {"replace": 3}}, r"\(SGD\) stepped .* optimizer 0 \(AdamW\)"),
    "a wrapper in the optimizer": (
        {"events": {"after wrap": 2}},
        r"optimizer\.state\.in\.\w+\.\w+",
    ),
    "a wrapper in the model": ({"events": {"wrapped buffer": 3}}, r"model\.in\.late"),
    "state that coincides": ({"events": {"slow collides": 3}}, r"in\.weight\.x\.y: two values"),
    "a named tuple": ({"extras": ["point"]}, r"extra\.point\.p: Point cannot be saved"),
}


@pytest.mark.more
@pytest.mark.parametrize("facts", LOADED.values(), ids=LOADED)
def test_what_plain_torch_loads_is_loaded(facts: dict[str, Any], tmp_path: Path) -> None:
    assert run_fast(Program.of(**facts), tmp_path) == (SAME, "")


@pytest.mark.parametrize(("facts", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_no_launch_could_load_is_refused_by_name(
    facts: dict[str, Any], text: str, tmp_path: Path
) -> None:
    how, found = run_fast(Program.of(**facts), tmp_path)
    assert how == REFUSED
    assert re.search(text, found), found


def test_a_group_is_refused_at_the_next_boundary(tmp_path: Path) -> None:
    program = Program.of(events={"add group": 2}, saves=[5])
    launch = Launch(program, tmp_path)
    launch.train()
    with pytest.raises(SaveError, match=r"same command could not load a checkpoint.*with late"):
        launch.train()
    launch.close()


@pytest.mark.parametrize("part", ["model.block0.b", "model"])
def test_an_excluded_part_that_does_not_fit_is_left_out_of_each_launch(
    part: str, tmp_path: Path
) -> None:
    program = Program.of(blocks=["buffer empty"], events={"grow": 1}, exclude=(part,))
    assert run_fast(program, tmp_path)[0] == EXCLUDED
    for _ in range(2):
        launch = Launch(program, tmp_path)
        launch.load(tmp_path / "step-2")
        assert launch.parts.model["block0"].b.shape == (0, 3)
        launch.close()


def test_an_excluded_part_that_fits_is_left_out_once(tmp_path: Path) -> None:
    """A preemption would lose it again otherwise."""
    before, after = Program.of(), Program.of(exclude=("model.in",))
    first = Launch(before, tmp_path)
    first.train()
    place = first.save()
    weight = first.parts.model["in"].weight.detach().clone()
    first.close()
    second = Launch(after, tmp_path / "second")
    second.load(place)
    assert not torch.equal(second.parts.model["in"].weight, weight)
    second.train()
    place, weight = second.save(), second.parts.model["in"].weight.detach().clone()
    second.close()
    third = Launch(after, tmp_path)
    third.load(place)
    assert torch.equal(third.parts.model["in"].weight, weight)
    third.close()


def test_each_rename_and_each_exclusion_applies_to_checkpoints_saved_without_it() -> None:
    fit = ResumeFit.of(strict=True, rename={"model.a": "model.b"}, exclude=["optimizer"])
    saved = {FIT: fit.describe()}
    assert fit.still_to_do({}) == fit
    more = ResumeFit.of(
        strict=False,
        rename={"model.a": "model.b", "model.c": "model.d"},
        exclude=["rng", "optimizer"],
    )
    found = more.still_to_do(saved)
    assert found.rename == {"model.c": "model.d"}
    assert (found.exclude, found.if_needed) == (("rng",), ("optimizer",))
    assert not found.strict
    assert found.parts_over(["optimizer.state.a.exp_avg"]) == ["optimizer"]
    assert found.parts_over(["optimizer.state.a.exp_avg", "model.a"]) == []


def test_a_tensor_that_becomes_a_wrapper_does_not_fit_the_plan() -> None:
    planned = Signature({"a": torch.ones(2), "b": nn.Parameter(torch.ones(2))})
    assert planned.fits({"a": torch.zeros(2), "b": nn.Parameter(torch.zeros(2))})
    for odd in (Twice(torch.ones(2), torch.ones(2)), torch.empty(2, device="meta")):
        changes = planned.find_changes({"a": odd, "b": torch.ones(2)})
        assert changes is not None
        assert changes.startswith("a: a ")


def test_conjugated_and_negated_tensors_are_loaded_into(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    save_with_dcp({"c": z, "n": z.imag.clone()}, checkpoint_id=tmp_path / "c", no_dist=True)
    for load in (
        lambda state: load_state(tmp_path / "c", state, group=None),
        lambda state: dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True),
    ):
        state = {"c": torch.zeros(4, dtype=z.dtype).conj(), "n": torch.zeros_like(z).conj().imag}
        load(state)
        assert state["c"].is_conj()
        assert state["n"].is_neg()
        assert state["c"].tolist() == z.tolist()
        assert state["n"].tolist() == z.imag.tolist()


def test_a_stock_saved_wrapper_that_names_no_inner_tensors_is_refused(tmp_path: Path) -> None:
    """Also if the program lets torch open its class."""
    save_with_dcp({"w": hidden()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with (
        torch.serialization.safe_globals([Hidden]),
        pytest.raises(CheckpointError, match="w: it was"),
    ):
        load_state(tmp_path / "c", {"w": torch.zeros(4)}, group=None)


@pytest.mark.parametrize("interval", [10**12, 2**52, "10000h"])
def test_ranks_can_exchange_the_number_of_any_agreed_step(interval: int | str) -> None:
    table, _ = RankStatusTable.create(2)
    cadence = Cadence(Interval.parse(interval), step=0, now=0.0, looks_first=True)
    step = 0
    for now in range(1, 4):
        step = cadence.next_step
        save, next_step = cadence.decide(step, float(now) * 1e-9)
        assert not save
        table.record(0).say(now, [next_step])
        assert table.record(0).said(now, 1) == [next_step]
        cadence.update(step, next_step, saved=bool(save), now=float(now) * 1e-9)
    assert cadence.next_step > step > 1
    table.close()


def test_a_live_tensor_is_never_loaded_into() -> None:
    live = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float64)}
    document, tensors = plain.encode(live, "extra.x")
    for name, one in plain.templates(document, (document, tensors)).items():
        assert (one.shape, one.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert one.data_ptr() != tensors[name].data_ptr()


def test_an_optimizer_inside_a_known_one_is_not_taken_for_another() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], lr=0.1)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    outer = Outer(inner)
    another = torch.optim.AdamW(model.parameters())
    for known in (outer, inner):
        state = TrainState(model, [known], rank=0, world_size=1)
        state.remember()
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        outer.step()
        assert not torch.equal(model.weight, before), "the inner optimizer stepped"
        state.notice()
        another.step()
        with pytest.raises(SaveError, match=r"AdamW.* stepped the parameters of optimizer 0"):
            state.notice()
        state.close()


@pytest.mark.more
def test_random_programs_load_what_they_commit(tmp_path: Path) -> None:
    found = count(range(16), tmp_path)
    assert found[SAME] > 4, found
    assert found[REFUSED] > 1, found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5000, 250))
def test_many_random_programs_load_what_they_commit(first: int, tmp_path: Path) -> None:
    found = count(range(first, first + 250), tmp_path)
    assert found[SAME] > 75, found


# Program 5 has text with a lone surrogate, which only the file of a Session lost.
@pytest.mark.more
@pytest.mark.parametrize(("seed", "ends"), [(3, SAME), (5, SAME), (11, REFUSED)])
def test_random_programs_with_a_session(seed: int, ends: str, tmp_path: Path) -> None:
    assert run_session(Program(seed), tmp_path) == ends


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 140, 10))
def test_more_random_programs_with_a_session(first: int, tmp_path: Path) -> None:
    found = count(range(first, first + 10), tmp_path, run_session)
    assert found[SAME] > 4, found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 260, 12))
def test_launches_in_processes_of_their_own(first: int, tmp_path: Path) -> None:
    found = count(range(first, first + 12), tmp_path, run_processes)
    assert found[SAME] > 5, found
