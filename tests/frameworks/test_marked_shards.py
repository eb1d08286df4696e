"""Shards of torch's `CheckpointableTensor`: saved as such, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.dcp_states import stock
from torch import nn

from holdfast.contracts.errors import SaveError
from holdfast.trainer import Session, dcp
from holdfast.trainer.planning.rank_rows import describe_rank, is_marked_shard

IS_KNOWN_TO_TORCH = hasattr(stock, "CheckpointableTensor")


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the two halves of a tensor as the halves of one of the same shape, in another order."""
    shape = tuple(tensor.shape)
    half = shape[0] // 2
    marked: Any = tensor
    marked.global_shape = shape
    marked.global_offsets = ((half, *shape[1:-1], 0), (0, *shape[1:-1], 0))
    marked.local_offsets = ((0, 0), (half, 0))
    marked.local_sizes = ((half, *shape[1:]), (half, *shape[1:]))
    return tensor


def test_a_tensor_needs_all_attributes_to_be_a_marked_shard() -> None:
    assert not is_marked_shard(torch.zeros(4, 3))
    assert is_marked_shard(mark(torch.zeros(4, 3)))
    partly: Any = torch.zeros(4, 3)
    partly.global_shape = (8, 3)
    assert not is_marked_shard(partly)
    assert not is_marked_shard("global_shape")


def test_a_plan_refuses_it_by_its_key() -> None:
    state = {"model": {"w": mark(torch.zeros(4, 3)), "b": torch.zeros(3)}}
    with pytest.raises(SaveError, match=r"^model\.w: its attributes global_shape.*\(4, 3\)"):
        describe_rank(state)


@pytest.mark.usefixtures("end_flusher")
def test_a_session_refuses_a_marked_parameter_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 4)
    mark(model.weight)
    with pytest.raises(SaveError, match=r"weight: its attributes global_shape"):  # noqa: SIM117
        with Session(model, torch.optim.SGD(model.parameters())) as session:
            session.checkpoint()


@pytest.mark.usefixtures("end_flusher")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_drop_in_saves_it_as_torch_does_or_refuses_it(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(4, 3)
    state = {"w": mark(values.clone()), "x": torch.ones(2)}
    if not IS_KNOWN_TO_TORCH:
        with pytest.raises(SaveError, match="w: its attributes global_shape"):
            dcp.save(state, checkpoint_id=tmp_path / "a")
        return
    dcp.save(state, checkpoint_id=tmp_path / "a")
    for load in (dcp.load, stock.load):
        whole = {"w": torch.zeros(4, 3), "x": torch.zeros(2)}
        load(whole, checkpoint_id=tmp_path / "a")
        assert torch.equal(whole["w"], values.roll(2, 0))
        shard = {"w": mark(torch.zeros(4, 3)), "x": torch.zeros(2)}
        load(shard, checkpoint_id=tmp_path / "a")
        assert torch.equal(shard["w"], values)
