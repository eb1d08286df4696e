"""Tensors that a checkpoint cannot keep exactly are refused by name before they are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.utils._pytree import tree_map_only

from holdfast.contracts.errors import CheckpointError, SaveError
from holdfast.trainer import Session, dcp
from holdfast.trainer.format.saved_boxes import BoxTable
from holdfast.trainer.loading.targets import collect
from holdfast.trainer.planning.layout import (
    encode_number,
)
from holdfast.trainer.planning.rank_rows import NUMBER_ROOM_BYTES, describe_rank
from holdfast.trainer.planning.signature import (
    LIST_ENTRY_BYTES,
    LIST_LEAST,
    LIST_STEP,
    Signature,
    capacity_of,
    room_of,
)


class Quantised(torch.Tensor):
    """A tensor subclass of codes and a scale, like eight-bit optimizer moments."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        assert isinstance(made, Quantised)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _context: Any, _size: Any, _stride: Any) -> Quantised:
        return Quantised(inner["codes"], inner["scale"])

    def dense(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A DTensor creates such views of its local tensor.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Quantised(args[0].codes, args[0].scale)
        dense = tree_map_only(Quantised, Quantised.dense, args)
        return func(*dense, **(kwargs or {}))


class Hidden(torch.Tensor):
    """A wrapper whose class does not tell what it consists of."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Hidden:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        assert isinstance(made, Hidden)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def dense(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Hidden(args[0].codes, args[0].scale)
        return func(*tree_map_only(Hidden, Hidden.dense, args), **(kwargs or {}))


# torch does not declare it.
UINT4: torch.dtype = vars(torch)["uint4"]


class Plain(torch.Tensor):
    """A subclass with memory, such as those that only add methods."""


def hidden() -> Hidden:
    return Hidden(torch.ones(4, dtype=torch.int8), torch.full((4,), 0.5))


def quantised() -> Quantised:
    return Quantised(torch.ones(4, dtype=torch.int8), torch.full((4,), 0.5))


class EightBit(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("moment", Quantised(p.detach().char(), p.detach()))


@pytest.mark.more
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (quantised(), "a Quantised with inner tensors codes, scale"),
        (hidden(), "a Hidden that has its values in other tensors"),
        (torch.ones(2, 2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.ones(2, 2).to_mkldnn(), "of layout torch._mkldnn"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.empty(2, dtype=UINT4), "of type torch.uint4, which torch.save cannot write"),
    ],
    ids=["wrapper", "hidden", "sparse", "mkldnn", "meta", "uint4"],
)
def test_a_tensor_without_plain_storage_is_refused_by_its_key(
    value: torch.Tensor, said: str, tmp_path: Path
) -> None:
    with pytest.raises(
        SaveError, match=rf"model\.odd: it is {said}.*, and a checkpoint cannot store"
    ):
        describe_rank({"model": {"odd": value}})
    model = nn.Linear(2, 2)
    model.register_buffer("odd", value)
    with pytest.raises(SaveError, match=rf"model\.odd: it is {said}"):
        Session(model, torch.optim.Adam(model.parameters()), directory=tmp_path)


def test_a_tensor_subclass_in_the_optimizer_state_is_refused_after_a_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = EightBit(model.parameters(), momentum=0.9)
    session = Session(model, optimizer, directory=tmp_path)
    optimizer.step()
    with pytest.raises(SaveError, match=r"optimizer\.state\.weight\.moment: it is a Quantised"):
        session.boundary()
    with pytest.raises(SaveError):
        session.close()


def test_loading_into_a_tensor_subclass_is_refused() -> None:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size((4,))
    chunk = ChunkStorageMetadata(torch.Size((0,)), size)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
    table = BoxTable.of(Metadata({"w": entry}))
    for made, name in ((quantised(), "Quantised"), (hidden(), "Hidden")):
        with pytest.raises(CheckpointError, match=f"w: in this program it is a {name}"):
            collect({"w": made}, {"w": entry}, table)


def test_a_wrapper_in_a_stock_checkpoint_is_refused_by_its_key(tmp_path: Path) -> None:
    """Its entry is no plain tensor, even if the program allows its class."""
    with torch.serialization.safe_globals([Hidden]):
        save_with_dcp({"w": hidden()}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointError, match="w: it was saved as a Hidden"):
            dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)


def test_a_subclass_with_memory_is_saved() -> None:
    value = torch.ones(4).as_subclass(Plain)
    (entry,) = (one for kind in describe_rank({"model": {"odd": value}}).entries for one in kind)
    assert entry.key == "model.odd"


def test_a_growing_list_of_numbers_gets_a_larger_plan() -> None:
    few, more = {"optimizer": {"losses": [0.5] * 3}}, [0.5] * 17
    signature = describe_rank(few).signature
    assert signature.fits({"optimizer.losses": [0.25] * 16})
    assert not signature.fits({"optimizer.losses": more})
    (line,) = signature.differences({"optimizer.losses": more})
    assert line == "optimizer.losses: a list of up to 32 numbers, planned a number or a short text"
    assert Signature({"optimizer.losses": more}).fits({"optimizer.losses": [1.5] * 32})
    assert [capacity_of([0] * n) for n in (0, 16, 17, LIST_STEP + 1)] == [16, 16, 32, 2 * LIST_STEP]


@pytest.mark.more
def test_an_optimizers_list_grows_over_saves_and_a_resume(tmp_path: Path) -> None:
    for last in (60, 61):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["losses"] = []
        with Session(model, optimizer, directory=tmp_path, interval=20) as session:
            for step in session.steps(last):
                optimizer.param_groups[0]["losses"].append(step / 7)
    assert optimizer.param_groups[0]["losses"] == [step / 7 for step in range(1, 62)]


GROWING: list[tuple[str, Any, Callable[[Any, int], Any], Any]] = [
    (
        "text",
        "",
        lambda now, step: now + f"é{step:03d}",
        "".join(f"é{n:03d}" for n in range(1, 62)),
    ),
    ("long", "x" * 70_000, lambda now, step: now + "y" * 5000, "x" * 70_000 + "y" * 5000 * 61),
    (
        "list",
        [""],
        lambda now, step: [now[0] + f"{step:09d}"],
        ["".join(f"{n:09d}" for n in range(1, 62))],
    ),
    ("shrinking", "z" * 40_000, lambda now, step: now[: -len(now) // 2], ""),
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("start", "after", "end"), [case[1:] for case in GROWING], ids=[case[0] for case in GROWING]
)
def test_an_optimizers_text_grows_over_saves_and_a_resume(
    start: Any, after: Callable[[Any, int], Any], end: Any, tmp_path: Path
) -> None:
    for last in (60, 61):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = optimizer.param_groups[0]
        group["note"] = start
        with Session(model, optimizer, directory=tmp_path, interval=20) as session:
            for step in session.steps(last):
                group["note"] = after(group["note"], step)
    assert group["note"] == end


def test_a_text_fits_its_reserved_room_and_no_more() -> None:
    for length in (0, 1, 255, 256, 257, 5000, 16_384, 16_385, 100_000):
        for kind in (str, list):
            value = "é" * (length // 2) + "x" * (length % 2)
            planned = value if kind is str else [value, 1]
            room, place = room_of(planned), len(encode_number(planned)) + NUMBER_ROOM_BYTES
            signature = Signature({"optimizer.note": planned})
            text_room = room if kind is str else room - (LIST_LEAST - 2) * LIST_ENTRY_BYTES
            grown = value + "x" * text_room
            full = grown if kind is str else [grown, *[2**62] * (LIST_LEAST - 1)]
            more = grown + "x" if kind is str else [grown + "x", 1]
            assert signature.fits({"optimizer.note": full})
            assert not signature.fits({"optimizer.note": more})
            assert len(encode_number(full, place + room)) == place + room
            (line,) = signature.differences({"optimizer.note": more})
            assert line.startswith("optimizer.note: a ")


def test_a_number_that_outgrows_its_room_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group["huge"] = 1
    session = Session(model, optimizer, directory=tmp_path, interval=1)
    group["huge"] = 1 << 8000
    with pytest.raises(SaveError, match=r"optimizer\.param_groups\.weight\.huge: its int needs"):
        session.boundary()
    with pytest.raises(SaveError):
        session.close()


def test_a_gradient_of_another_dtype_trains_as_without_a_session(tmp_path: Path) -> None:
    weights = []
    for has_session in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = Session(model, optimizer, directory=tmp_path) if has_session else None
        model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.float32
        if session is not None:
            session.boundary()
            session.close()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("made", [torch.ones_like, lambda p: [torch.ones_like(p), 0]])
def test_an_optimizer_s_state_that_is_no_mapping_is_refused(
    tmp_path: Path, made: Callable[[torch.Tensor], Any]
) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = made(model.weight)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.weight: .*; expected a dict"):
        Session(model, optimizer, directory=tmp_path)
