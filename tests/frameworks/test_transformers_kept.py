"""Trainers with sums of their own and samplers with generators of their own, across a resume."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
import transformers
from tests.frameworks.transformers_program import (
    DEFAULTS,
    LENGTH,
    TIMED,
    WORDS,
    Sentences,
    collate,
    digest,
)
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.data_generators import DataGenerators
from holdfast.trainer.frameworks.transformers import Trainer
from holdfast.trainer.frameworks.transformers.progress import as_plain, restored

# Each sentence twice in batches of four: five steps in an epoch, and the last is short.
SAMPLES: Final = 9
ARGUMENTS: Final = {**DEFAULTS, "logging_steps": 4, "load_best_model_at_end": False}

Make = Callable[..., Any]


class Repeating(Sampler[int]):
    """Each index twice, in the order of its own generator, as TRL's sampler for GRPO."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(self._samples, generator=self.generator).tolist():
            yield from (index, index)

    def __len__(self) -> int:
        return 2 * self._samples


class Drawing(Sentences):
    """Replaces a word of each sentence, with numbers of generators of its own."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.places, self.words = np.random.default_rng(4), random.Random(6)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        item["input_ids"][self.places.integers(LENGTH)] = self.words.randrange(WORDS)
        return item


class Masking:
    """A collator that makes its generator at the first batch, as that for masked words does."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(8)
        batch = collate(items)
        masked = torch.rand(batch["labels"].shape, generator=self.generator) < 0.2
        return {**batch, "input_ids": torch.where(masked, 2, batch["input_ids"])}


class Summing(transformers.Trainer):
    """Logs a mean since the last log, as trainers of TRL do, and notes what each step saw."""

    kept_attributes: ClassVar[Sequence[str]] = ("recent",)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._metrics: Any = {"train": collections.defaultdict(list)}
        self._total_train_tokens = 0
        self.recent: collections.deque[Any] = collections.deque(maxlen=3)
        # A reference model that follows the model, as TRL's `sync_ref_model` has it.
        self.args.sync_ref_model = True
        self.ref_model = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)
        self.ref_model.weight.zero_()
        self.seen: dict[int, Any] = {}

    def _get_train_sampler(self, train_dataset: Any = None) -> Repeating:
        return Repeating(SAMPLES)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        ids = inputs.pop("ids").tolist()
        loss = super().compute_loss(model, inputs, *rest, **more)
        if model.training:
            self._metrics["train"]["first"].append(ids[0])
            self._total_train_tokens += len(ids)
            self.recent.append(loss.detach())
            self.ref_model.weight.add_(loss.detach())
            reading = self.accelerator.gradient_state
            end = [reading.end_of_dataloader, reading.remainder]
            self.seen[self.state.global_step] = [ids, loss.item(), end]
        return loss

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        means = {name: sum(each) / len(each) for name, each in self._metrics["train"].items()}
        logs |= {**means, "tokens": self._total_train_tokens}
        logs["recent"] = sum(float(each) for each in self.recent)
        logs["reference"] = self.ref_model.weight.sum().item()
        super().log(logs, *rest)
        self._metrics["train"].clear()


# The attributes of TRL's classes are known without a name.
Summing.__module__ = "trl.trainer"


class Held(Trainer, Summing):
    """The same under Holdfast."""


class Killed(RuntimeError):
    """Ends a training as an error of the program does."""


class Killing(TrainerCallback):
    """Ends the training when a step is complete, before its checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise Killed


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes trainers of a class, all of one run that saves each step."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_INTERVAL", "1")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_SNAPSHOTS", "off")
    monkeypatch.setattr(Trainer, "session_options", {"directory": tmp_path / "run"})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make_trainer(kind: type[Any], *callbacks: Any) -> Any:
        args = TrainingArguments(**ARGUMENTS, output_dir=str(tmp_path / kind.__name__))
        transformers.set_seed(args.seed)
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 1}
        return kind(
            model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
            args=args,
            train_dataset=Drawing(SAMPLES),
            eval_dataset=Sentences(4),
            data_collator=Masking(),
            callbacks=list(callbacks),
        )

    yield make_trainer
    torch.set_num_threads(threads)


def result_of(trainer: Any) -> list[Any]:
    """What must be equal: the history without times, and the weights."""
    history = [
        {k: v for k, v in entry.items() if not k.endswith(TIMED)}
        for entry in trainer.state.log_history
    ]
    return [history, digest(trainer.model.state_dict())]


def test_sums_orders_and_remainders_are_those_of_an_uninterrupted_trainer(make: Make) -> None:
    bare = make(Summing)
    bare.train()
    seen: dict[int, Any] = {}
    # At the start of the second epoch, within it, and near its end: two steps after a log.
    for step in (6, 7, 10):
        killed = make(Held, Killing(step))
        with pytest.raises(Killed):
            killed.train()
        assert killed.seen
        seen |= killed.seen
    last = make(Held)
    last.train()
    assert seen | last.seen == bare.seen
    assert result_of(last) == result_of(bare)
    assert [end for *_, end in bare.seen.values()].count([True, SAMPLES % 4]) == 2


class Blurring:
    """Has a collator as a method, and a generator without a state."""

    def __init__(self) -> None:
        self.blur, self.system = np.random.RandomState(3), random.SystemRandom()

    def collate(self, items: list[dict[str, Any]]) -> list[float]:
        return [float(self.blur.normal() + item["input_ids"].sum()) for item in items]


def test_generators_of_wrapped_datasets_and_of_methods_are_restored() -> None:
    # The samples of a list may be many, and no fetch may look at all of them.
    samples: Any = [{"input_ids": torch.ones(2)}]
    joined: Any = ConcatDataset([Subset(Drawing(SAMPLES), [1, 3]), samples])
    loader = DataLoader(joined, collate_fn=Blurring().collate)
    generators = DataGenerators()
    generators.watch(loader)
    next(iter(loader))
    saved = generators.state_dict()
    assert [(place, state["kind"]) for place, state in saved.items()] == [
        ("0.collate_fn.blur", "numpy_legacy"),
        ("0.dataset.datasets.0.dataset.places", "numpy"),
        ("0.dataset.datasets.0.dataset.words", "python"),
    ]
    first = list(loader)
    generators.load_state_dict(saved)
    assert list(loader) == first
    samples.append(Blurring())
    generators.watch(DataLoader(samples))
    assert generators.state_dict() == {}


def test_names_of_attributes_that_are_absent_are_refused(make: Make) -> None:
    class Misspelt(Held):
        kept_attributes: ClassVar[Sequence[str]] = ("recnt",)

    with pytest.raises(SpecError, match=r"Misspelt.kept_attributes names 'recnt'.*__init__"):
        make(Misspelt).train()


def test_a_text_in_place_of_names_is_refused(make: Make) -> None:
    class Text(Held):
        kept_attributes: ClassVar[Sequence[str]] = "recent"

    with pytest.raises(SpecError, match=r"Text.kept_attributes = 'recent': expected a tuple"):
        make(Text).train()


def test_a_value_that_is_not_plain_is_refused_with_its_place() -> None:
    with pytest.raises(SpecError, match=r"attribute stats\['a'\]\[1\] is a object; expected"):
        as_plain({"a": [1, object()]}, "stats")


def test_values_return_to_the_containers_that_exist() -> None:
    live: Any = {"rewards": collections.defaultdict(lambda: collections.deque(maxlen=2)), "old": 1}
    saved = as_plain({"rewards": {"length": collections.deque([1.0, 2.0])}}, "logs")
    assert saved == {"rewards": {"length": [1.0, 2.0]}}
    rewards = live["rewards"]
    assert restored(live, saved, torch.device("cpu")) is live
    assert live == {"rewards": {"length": collections.deque([1.0, 2.0])}}
    assert live["rewards"] is rewards
    assert rewards["length"].maxlen == 2
