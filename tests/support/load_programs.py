"""Random training programs: each has one command, and does the same in every launch.

A program is a function of its seed. `build` makes what a launch makes before its Session, and
`step` trains one step. What happens at a step, such as a tensor that grows, happens only there, so
a resume after that step has it from the checkpoint alone.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.trainer.data.position import Position

WIDTH = 3
Point = namedtuple("Point", "x y")
Event = Callable[["Parts", int], None]


class Twice(torch.Tensor):
    """A wrapper of two tensors, as quantized moments are."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Twice:
        made = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)
        assert isinstance(made, Twice)
        return made

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _context: Any, _size: Any, _stride: Any) -> Twice:
        return Twice(inner["one"], inner["two"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Twice(args[0].one, args[0].two)
        dense = [each.one + each.two if isinstance(each, Twice) else each for each in args]
        return func(*dense, **(kwargs or {}))


class Extra(nn.Linear):
    """A layer with an extra state of one kind, which changes with each step."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind, self.seen = kind, 0

    def get_extra_state(self) -> Any:
        seen = self.seen
        if self.kind == "bytes":
            raw = bytearray(json.dumps(list(range(seen))).encode() if seen else b"")
            return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
        if self.kind == "stream":
            return io.BytesIO(bytes(seen))
        if self.kind == "number":
            return seen
        if self.kind == "list":
            return list(range(seen))
        if self.kind == "tensors":
            return [torch.arange(n) for n in range(seen)] + [torch.tensor(seen)]
        state = {"seen": seen, "by": {n: torch.tensor(float(n)) for n in range(seen)}}
        return {**state, "more": {"none": None, "pair": (seen, "x"), "no": {}}} if seen else {}

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "bytes":
            raw = state.numpy().tobytes()
            self.seen = len(json.loads(raw)) if raw else 0
        elif self.kind == "stream":
            self.seen = len(state.getvalue())
        elif self.kind == "number":
            self.seen = state
        elif self.kind == "list":
            self.seen = len(state)
        elif self.kind == "tensors":
            self.seen = int(state[-1])
        elif state:
            assert all(type(n) is int for n in state["by"])
            assert state["more"] == {"none": None, "pair": (state["seen"], "x"), "no": {}}
            self.seen = state["seen"]


class WithoutSetter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def get_extra_state(self) -> Any:
        return torch.ones(1)


class Observer(nn.Module):
    """Its range is empty at first. It resizes it when it loads, as torch's observers do."""

    low: torch.Tensor

    def __init__(self, loads: str) -> None:
        super().__init__()
        self.loads = loads
        self.register_buffer("low", torch.zeros(0))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.detach().amin(0)
        self.low = low if self.low.numel() == 0 else torch.minimum(self.low, low)
        if self.loads in ("all", "super"):
            self.late = self.low * 2
        return x + 0.01 * self.low

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        if self.loads != "super":
            if (low := state.get(f"{prefix}low")) is not None:
                self.low = torch.empty_like(low)
            if (late := state.get(f"{prefix}late")) is not None:
                self.late = torch.empty_like(late)
        super()._load_from_state_dict(state, prefix, *more)


class Hooked(nn.Module):
    """The same by a hook."""

    low: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))
        self.register_load_state_dict_pre_hook(_resize)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low = x.detach().mean(0) if self.low.numel() == 0 else self.low + x.detach().mean(0)
        return x + 0.01 * self.low


def _resize(module: Any, state: Any, prefix: str, *_: Any) -> None:
    if f"{prefix}low" in state:
        module.low = torch.empty_like(state[f"{prefix}low"])


class Holder:
    """An object with any state. It gets what it is given at a load, as most objects do."""

    def __init__(self, value: Any, loads: str = "assign") -> None:
        self.value, self.loads = value, loads

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        if self.loads == "clear" and isinstance(state, dict):
            # Some objects clear what they have first.
            for old in list(self.value.values()):
                if isinstance(old, torch.Tensor):
                    old.zero_()
        self.value = state


class Hoarder(torch.optim.Optimizer):
    """An optimizer in the style of third parties, with state of all forms."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "window": (1, 2)})
        self.state["shared.total"] = torch.zeros(2)  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = np.int64(state.get("count", 0) + 1)
                state.setdefault("past", []).append(p.grad.clone())
                state["past"] = state["past"][-3:]
                state["deep"] = {"mean": {0: p.grad.mean()}, "tag": "x"}
                p.add_(sum(state["past"]), alpha=-group["lr"])
                self.state["shared.total"] += p.grad.sum()  # type: ignore[index]


@dataclass
class Parts:
    """What a launch has made."""

    model: Any
    optimizers: list[Any]
    schedulers: list[Any]
    extra: dict[str, Any]
    per_rank: dict[str, Any]
    flow: list[str]
    position: Position | None = None
    sizes: tuple[int, int] = (40, 4)
    ids: list[int] = field(default_factory=list)


class Program:
    """The program of one seed. `exclude` is the argument of its Session in every launch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        # Most programs have nothing that is refused from the start.
        blocks = BLOCKS if draw.random() < 0.8 else (*BLOCKS, *REFUSED_BLOCKS)
        self.blocks = [draw.choice(blocks) for _ in range(draw.randint(1, 4))]
        self.names = draw.sample(NAMES, len(self.blocks))
        self.optimizer, self.groups = draw.choice(OPTIMIZERS), draw.randint(1, 3)
        self.is_split = draw.random() < 0.2
        self.scheduler = draw.choice(SCHEDULERS)
        extras = EXTRAS.keys() - (REFUSED_EXTRAS if draw.random() < 0.9 else set())
        self.extras = draw.sample(sorted(extras), draw.choice((0, 1, 1, 2, 3)))
        self.steps = draw.randint(3, 6)
        self.saves = sorted(draw.sample(range(1, self.steps), draw.randint(1, 2)))
        self.sizes = draw.choice(((40, 4), (7, 3), (5, 5), (1000, 2)))
        chosen = draw.sample(sorted(EVENTS), draw.choice((0, 0, 1, 1, 2)))
        self.events = {name: draw.randint(1, self.steps) for name in chosen}
        self.exclude: tuple[str, ...] = ()
        if draw.random() < 0.1:
            self.exclude = (draw.choice(("optimizer", "extra", "rng", f"model.{self.names[0]}")),)

    @classmethod
    def of(cls, **facts: Any) -> Program:
        """Return a small program with these facts, and nothing else that is unusual."""
        program = cls(0)
        usual: dict[str, Any] = {"blocks": ["linear"], "optimizer": "adamw", "groups": 1}
        usual |= {"is_split": False, "scheduler": "none", "extras": [], "events": {}, "steps": 5}
        usual |= {"saves": [2, 4], "sizes": (40, 4), "exclude": ()}
        vars(program).update(usual | facts)
        program.names = [f"block{number}" for number in range(len(program.blocks))]
        return program

    def __str__(self) -> str:
        facts = {key: value for key, value in vars(self).items() if key != "seed"}
        return f"seed {self.seed}: {facts}"

    def build(self) -> Parts:
        torch.manual_seed(self.seed)
        np.random.seed(self.seed % 1000)
        random.seed(self.seed)
        layers = {name: _make(kind) for name, kind in zip(self.names, self.blocks, strict=True)}
        model = nn.ModuleDict({"in": nn.Linear(WIDTH, WIDTH), **layers})
        for name, kind in zip(self.names, self.blocks, strict=True):
            if kind == "tied":
                model[name].weight = model["in"].weight
        optimizers = self._optimizers(list(model.parameters()))
        schedulers = [SCHEDULES[self.scheduler](optimizers[0])] if self.scheduler != "none" else []
        parts = Parts(model, optimizers, schedulers, {}, {}, ["in", *self.names])
        for name in self.extras:
            EXTRAS[name](parts, name)
        parts.sizes = self.sizes
        return parts

    def step(self, parts: Parts, number: int, ids: Any) -> None:
        """Train step `number`, with what happens in it."""
        for name, at in self.events.items():
            if at == number and not name.startswith("after"):
                EVENTS[name](parts, number)
        parts.ids += [int(one) for one in ids]
        x = torch.sin(
            torch.as_tensor(np.asarray(ids)).float()[:, None] * torch.arange(1, WIDTH + 1)
        )
        for name in parts.flow:
            x = _run(parts.model[name], x)
        for optimizer in parts.optimizers:
            optimizer.zero_grad()
        loss: Any = x.square().mean() + 0.001 * torch.rand(())
        loss.backward()
        for optimizer in parts.optimizers:
            optimizer.step()
        for scheduler in parts.schedulers:
            given = (x.detach().mean(),) if isinstance(scheduler, Plateau) else ()
            scheduler.step(*given)
        for item in (*parts.extra.values(), *parts.per_rank.values()):
            _advance(item, parts, number)
        for name, at in self.events.items():
            if at == number and name.startswith("after"):
                EVENTS[name](parts, number)

    def _optimizers(self, parameters: list[Any]) -> list[Any]:
        if self.is_split and len(parameters) > 2:
            return [
                OPTIMIZER[self.optimizer](_grouped(parameters[:2], 1)),
                torch.optim.SGD(parameters[2:], lr=0.01, momentum=0.9),
            ]
        return [OPTIMIZER[self.optimizer](_grouped(parameters, self.groups))]


def _grouped(parameters: list[Any], count: int) -> list[dict[str, Any]]:
    return [{"params": parameters[n::count], "tag": f"group {n}"} for n in range(count)]


def _run(module: Any, x: torch.Tensor) -> Any:
    if isinstance(module, Extra):
        module.seen += 1
    if isinstance(module, nn.ParameterDict):
        return x * sum(module.values())
    if isinstance(module, Buffers):
        return module(x)
    return torch.tanh(module(x))


class Buffers(nn.Module):
    """Buffers that are not plain memory."""

    b: torch.Tensor
    c: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        z = torch.complex(torch.arange(1.0, 4.0), torch.ones(3))
        shared = torch.ones(WIDTH)
        made: dict[str, Any] = {
            "conj": z.conj(),
            "neg": z.conj().imag,
            "expanded": torch.ones(1).expand(WIDTH),
            "strided": torch.ones(WIDTH, 2)[:, 0],
            "odd": torch.tensor(2, dtype=torch.int16),
            "half": torch.ones(WIDTH, dtype=torch.bfloat16),
            "empty": torch.zeros(0, WIDTH),
            "twins": shared,
        }
        self.register_buffer("b", made[kind])
        if kind == "twins":
            self.register_buffer("c", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if 0 not in self.b.stride() and self.b.numel():
                self.b.mul_(2 if self.b.dtype is torch.int16 else 1.5)
        return x + (self.b.real if self.b.is_complex() else self.b).float().sum() * 1e-3


def _make(kind: str) -> nn.Module:
    if kind in KINDS_OF_EXTRA:
        return Extra(kind)
    if kind.startswith("observer"):
        return Observer(kind.removeprefix("observer "))
    if kind.startswith("buffer"):
        return Buffers(kind.removeprefix("buffer "))
    if kind == "dict":
        return nn.ParameterDict({"a b": torch.rand(1), "ü": torch.rand(1), "0": torch.rand(1)})
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "tied": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        "norm": lambda: nn.BatchNorm1d(WIDTH),
        "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
        "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
        "hooked": Hooked,
        "no setter": WithoutSetter,
    }
    return makers[kind]()


KINDS_OF_EXTRA = ("bytes", "stream", "number", "list", "tensors", "mapping")
BLOCKS = (
    *("linear", "tied", "norm", "dropout", "nested", "hooked", "dict", "linear"),
    *(kind for kind in KINDS_OF_EXTRA if kind != "stream"),
    *("observer all", "observer low"),
    *(f"buffer {kind}" for kind in ("conj", "neg", "strided", "odd", "half", "empty", "twins")),
    *("linear", "norm", "nested", "tied", "dropout"),
)
REFUSED_BLOCKS = ("no setter", "stream", "observer super", "buffer expanded")
REFUSED_EXTRAS = {"point", "set", "module_grows"}
NAMES = ("rank00001", "state", "step", "exp_avg", "_extra_state_", "a", "b", "value", "0", "extra")
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
OPTIMIZER: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.01),
    "momentum": lambda g: torch.optim.SGD(g, lr=0.01, momentum=0.9),
    "adam": lambda g: torch.optim.Adam(g, lr=0.01),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.01, amsgrad=True),
    "tensor lr": lambda g: torch.optim.AdamW(g, lr=torch.tensor(0.01)),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.01),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.01),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "adafactor": lambda g: torch.optim.Adafactor(g, lr=0.01),
    "hoarder": lambda g: Hoarder(g, lr=0.01),
}
OPTIMIZERS = tuple(OPTIMIZER)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multi": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "plateau": lambda o: Plateau(o, patience=1),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    "tensor": lambda o: TensorSchedule(),
}
SCHEDULERS = ("none", "none", *SCHEDULES)


class TensorSchedule:
    """A scheduler whose whole state is one tensor."""

    def __init__(self) -> None:
        self.count = torch.zeros(2)

    def step(self) -> None:
        self.count = self.count + 1

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state.clone()


class CollidingSchedule(TensorSchedule):
    """A scheduler with two tensors whose joined names coincide."""

    def state_dict(self) -> Any:
        return {"a.b": self.count, "a": {"b": self.count + 5}}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["a.b"].clone()
        assert torch.equal(state["a"]["b"], self.count + 5)


# After `SCHEDULERS`, so that the random programs stay the same.
SCHEDULES["collides"] = lambda _: CollidingSchedule()


# --- objects --------------------------------------------------------------------------------


def _collide(_: Parts) -> Any:
    one, two, three = (torch.full((2,), float(n)) for n in (1, 2, 3))
    numbers = {1: one.clone(), "1": two.clone(), (2, "x"): three.clone()}
    return {"a.b": one, "a": {"b": two}, "n": numbers, "l": [three], "l.0": one + 5}


def _types(_: Parts) -> Any:
    return {
        "np": np.float32(0.1),
        "flag": np.bool_(True),
        "long": 3**9000,
        "nan": float("nan"),
        "count": Counter({1: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(int, {"x": 1}),
        "size": torch.Size([1, 2]),
        "$holdfast": "tensor",
        "array": np.arange(3, dtype=np.int16),
        "conj": torch.tensor([1 + 2j]).conj(),
        "bytes": b"\x00\xff",
        "": {"": torch.ones(1)},
        "\ud800": 1,
        None: 1,
        True: 2,
    }


def _add(make: Callable[[Parts], Any], *, per_rank: bool = False, loads: str = "assign") -> Any:
    def add(parts: Parts, name: str) -> None:
        (parts.per_rank if per_rank else parts.extra)[name] = Holder(make(parts), loads)

    return add


def _add_extra(make: Callable[[Parts], Any]) -> Any:
    return lambda parts, name: parts.extra.__setitem__(name, make(parts))


EXTRAS: dict[str, Callable[[Parts, str], None]] = {
    "collide": _add(_collide),
    "collide_alone": _add(_collide, per_rank=True),
    "types": _add(_types),
    "types_alone": _add(_types, per_rank=True),
    "grows": _add(lambda _: {"t": torch.zeros(0), "n": []}),
    "grows_alone": _add(lambda _: {"t": torch.zeros(0), "n": []}, per_rank=True),
    "clears": _add(lambda _: {"t": torch.ones(2), "u": torch.ones(3)}, loads="clear"),
    "best": _add(lambda parts: {"best": parts.model.state_dict()["in.weight"]}),
    "point": _add(lambda _: {"p": Point(1, 2)}),
    "tensor": _add(lambda _: torch.arange(3.0)),
    "expanded": _add(lambda _: {"t": torch.ones(1).expand(3)}),
    "set": _add(lambda _: {"s": {1, 2}}),
    "generator": _add_extra(lambda _: torch.Generator().manual_seed(1)),
    "numpy_generator": _add_extra(lambda _: np.random.default_rng(1)),
    "ema": _add_extra(lambda parts: AveragedModel(parts.model["in"])),
    "norm": _add_extra(lambda _: nn.BatchNorm1d(WIDTH)),
    "module_grows": _add_extra(lambda _: Buffers("empty")),
    "observer": _add_extra(lambda _: Observer("all")),
}


def _advance(item: Any, parts: Parts, number: int) -> None:
    if isinstance(item, torch.Generator):
        torch.rand(number, generator=item)
    elif isinstance(item, np.random.Generator):
        item.random(number)
    elif isinstance(item, AveragedModel):
        item.update_parameters(parts.model["in"])
    elif isinstance(item, Buffers):
        item.b = torch.cat([item.b, torch.ones(1, WIDTH)])
    elif isinstance(item, nn.BatchNorm1d | Observer):
        item(torch.rand(4, WIDTH))
    elif isinstance(item, Holder) and isinstance(item.value, dict):
        if "n" in item.value and isinstance(item.value["n"], list):
            item.value["n"] = [*item.value["n"], number]
            item.value["t"] = torch.cat([item.value["t"], torch.full((3,), float(number))])
        if "best" in item.value and number == 2:
            item.value["best"] = parts.model.get_parameter("in.weight").detach().clone() + 1
        for key, one in item.value.items():
            if isinstance(one, torch.Tensor) and one.is_floating_point() and key != "best":
                item.value[key] = one + number
            elif isinstance(one, np.float32):
                item.value[key] = one * np.float32(1.1)


# --- what happens in the course of training -----------------------------------------------------


def _add_group(parts: Parts, _: int) -> None:
    late = nn.Linear(WIDTH, WIDTH)
    parts.model["late"] = late
    parts.optimizers[0].add_param_group({"params": list(late.parameters()), "lr": 0.5})


def _move_group(parts: Parts, _: int) -> None:
    moved = parts.optimizers[0].param_groups[0]["params"].pop()
    parts.optimizers[0].add_param_group({"params": [moved], "lr": 0.5})


def _give(make: Callable[[torch.Tensor], Any], name: str = "slow") -> Event:
    def give(parts: Parts, _: int) -> None:
        for group in parts.optimizers[0].param_groups:
            for p in group["params"]:
                parts.optimizers[0].state[p][name] = make(p.detach().clone())

    return give


def _wrap(parts: Parts, _: int) -> None:
    for p, state in parts.optimizers[0].state.items():
        for key, value in state.items() if isinstance(p, torch.Tensor) else ():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                state[key] = Twice(value * 0.5, value * 0.5)
                parts.optimizers[0].param_groups[0]["lr"] = 0.0
                p.requires_grad_(False)
                p.grad = None
                return


def _option(name: str, value: Any) -> Event:
    def change(parts: Parts, _: int) -> None:
        for group in parts.optimizers[0].param_groups:
            group[name] = value

    return change


def _drop_option(parts: Parts, _: int) -> None:
    for group in parts.optimizers[0].param_groups:
        group.pop("tag", None)


def _replace(parts: Parts, _: int) -> None:
    groups = parts.optimizers[0].param_groups
    parts.optimizers[0] = torch.optim.SGD([p for group in groups for p in group["params"]], lr=0.3)


def _split_twins(parts: Parts, _: int) -> None:
    for module in parts.model.modules():
        if isinstance(module, Buffers) and hasattr(module, "c"):
            module.c = module.c.clone() + 1


def _buffer(value: Any) -> Event:
    def put(parts: Parts, _: int) -> None:
        parts.model["in"].register_buffer("late", value())

    return put


def _grow(parts: Parts, number: int) -> None:
    for module in parts.model.modules():
        if isinstance(module, Buffers) and module.b.dim() == 2:
            module.b = torch.full((number, WIDTH), 0.5)


def _vanish(parts: Parts, _: int) -> None:
    for module in parts.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean = None
            module.running_var = None
            module.track_running_stats = False


EVENTS: dict[str, Event] = {
    "add group": _add_group,
    "move group": _move_group,
    "add empty group": lambda parts, _: parts.optimizers[0].add_param_group({"params": []}),
    "slow": _give(lambda p: p * 2),
    "slow dict": _give(lambda p: {"x": {"y": p}, "n": (1, 2)}),
    "slow pair": _give(lambda p: (p, [p + 1, {}])),
    "slow dotted": _give(lambda p: p, name="slow.er"),
    "slow collides": lambda parts, n: (
        _give(lambda p: p, name="x.y")(parts, n),
        _give(lambda p: {"y": p + 1}, name="x")(parts, n),
    )[0],
    "slow set": _give(lambda _: {1, 2}),
    "slow array": _give(lambda p: p.numpy()),
    "slow expanded": _give(lambda p: torch.ones(1).expand(4)),
    "slow conj": _give(lambda p: torch.complex(p, p).conj()),
    "after slow": _give(lambda p: p * 3),
    "after wrap": _wrap,
    "momentum": _option("momentum", 0.5),
    "nesterov": _option("nesterov", False),
    "own option": _option("mine", [1, 2]),
    "tensor option": _option("mine", torch.ones(2)),
    "amsgrad": _option("amsgrad", False),
    "drop option": _drop_option,
    "clear": lambda parts, _: parts.optimizers[0].state.clear(),
    "replace": _replace,
    "buffer": _buffer(lambda: torch.ones(2)),
    "wrapped buffer": _buffer(lambda: Twice(torch.ones(2), torch.ones(2))),
    "sparse buffer": _buffer(lambda: torch.ones(2).to_sparse()),
    "twins": _split_twins,
    "grow": _grow,
    "vanish": _vanish,
}


# --- comparison ---------------------------------------------------------------------------------


def print_of(parts: Parts) -> Any:
    """Return all that a launch has reached, in a form that compares by bits and types."""
    numpy: Any = np.random.get_state()
    return exact(
        {
            "model": parts.model.state_dict(),
            "optimizers": [each.state_dict() for each in parts.optimizers],
            "schedulers": [each.state_dict() for each in parts.schedulers],
            "extra": {name: _state(item) for name, item in parts.extra.items()},
            "per_rank": {name: _state(item) for name, item in parts.per_rank.items()},
            "ids": parts.ids,
            "random": [torch.get_rng_state(), numpy[1], random.getstate()],
        }
    )


def _state(item: Any) -> Any:
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    return item.state_dict()


def exact(value: Any) -> Any:
    """Return `value` as tuples and texts with every bit and type."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().resolve_conj().resolve_neg().contiguous()
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return ("tensor", str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        rows = sorted(
            ((repr(key), exact(one)) for key, one in value.items()), key=lambda row: row[0]
        )
        return (type(value).__name__, tuple(rows))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(exact(one) for one in value))
    if isinstance(value, io.BytesIO):
        return ("stream", value.getvalue())
    if isinstance(value, float | np.generic):
        return (type(value).__name__, np.asarray(value).tobytes())
    return (type(value).__name__, value if isinstance(value, int) else repr(value))


def first_difference(one: Any, two: Any, path: str = "") -> str:
    """Return where two results of `exact` differ first."""
    if type(one) is tuple and type(two) is tuple and len(one) == len(two):
        for number, pair in enumerate(zip(one, two, strict=True)):
            if pair[0] != pair[1]:
                name = one[0] if number and isinstance(one[0], str) else number
                return first_difference(*pair, f"{path}/{name}")
    return f"{path}: {str(one)[:120]} != {str(two)[:120]}"
