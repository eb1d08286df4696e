"""What a checkpoint keeps of a trainer besides model, optimizer, scheduler and random states.

`TrainerProgress` is the same on all ranks. `RankShare` differs between them and is restored only at
the same number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import ExportableState, TrainerControl

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.topology import GLOBAL_BATCHES
from holdfast.trainer.frameworks.transformers.fetching import FetchStates
from holdfast.trainer.process import devices
from holdfast.trainer.state.objects import RankLimited

# Attributes of a trainer's subclass that a resume restores, such as the sums of its next log.
#
# A `transformers.Trainer` has its sums since the last log in attributes, and subclasses add more.
# Those of known libraries are listed here. A class names its own in `kept_attributes`.


# By the library of the subclass: attributes with the same value on all ranks.
SHARED: Final = {"trl": ("_total_train_tokens", "entropy_coef", "_last_world_entropy")}
# By the library of the subclass: attributes of one rank.
OF_RANK: Final = {
    "trl": (
        *("_metrics", "_logs", "_textual_logs", "_pending_extra_logs", "_pending_metrics"),
        # Completions that are used for several steps, and the place in them.
        *("_step", "_buffered_inputs", "_entropy_window_stats"),
        # GOLD and online DPO.
        *("_on_policy_loss_total", "_off_policy_loss_total"),
        *("_on_policy_step_equiv", "_off_policy_step_equiv"),
        *("_matched_sum", "_unmatched_sum", "_matched_step_eq", "_unmatched_step_eq", "stats"),
    ),
    "sentence_transformers": ("accum_loss_components",),
}
REFERENCE: Final = "ref_model"
NAMES: Final = "kept_attributes"
# Marks a tensor that was on the trainer's device and not on the CPU.
ON_DEVICE: Final = "holdfast.on_device"
PLAIN: Final = (bool, int, float, str, bytes, np.generic, np.ndarray)


def check_names(trainer: Any) -> None:
    """Raise `SpecError` if a class names an attribute that its trainer lacks."""
    for name, owner in _own_names(trainer).items():
        if not hasattr(trainer, name):
            raise SpecError(
                f"{owner}.{NAMES} names {name!r}, and the trainer has no such attribute; expected "
                "names of attributes. Set it in __init__, or remove the name"
            )


class KeptAttributes:
    """The attributes of a trainer that a checkpoint keeps, in two parts.

    `shared` are the same on all ranks. `of_rank` differ, and a resume at another number of ranks
    lacks them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._unsaved: set[str] = set()

    def shared(self) -> dict[str, Any]:
        return self._state(_known_names(self._trainer, SHARED))

    def of_rank(self) -> dict[str, Any]:
        """Raises `SpecError` if an attribute that a class names is not plain data or tensors."""
        own = {
            name: as_plain(getattr(self._trainer, name), name) for name in _own_names(self._trainer)
        }
        return self._state(_known_names(self._trainer, OF_RANK)) | own

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put saved attributes back. Containers that exist stay the same objects."""
        for name, value in saved.items():
            live = getattr(self._trainer, name, None)
            setattr(self._trainer, name, restored(live, value, self._trainer.args.device))

    def _state(self, names: Iterator[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            try:
                found[name] = as_plain(getattr(self._trainer, name), name)
            except SpecError as error:
                if name not in self._unsaved:
                    report(f"holdfast: {error}. A resume begins without this attribute")
                self._unsaved.add(name)
        return found


def changing_modules(trainer: Any) -> dict[str, nn.Module]:
    """Return the modules beside the model that training changes, by name in a checkpoint.

    TRL moves a reference model towards the model with `sync_ref_model`.
    """
    reference = getattr(trainer, REFERENCE, None)
    is_synced = getattr(trainer.args, "sync_ref_model", False)
    return {REFERENCE: reference} if is_synced and isinstance(reference, nn.Module) else {}


def as_plain(value: Any, name: str) -> Any:
    """Return a copy of `value` that a checkpoint can have. Raises `SpecError` for another kind."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.device.type == "cpu" else {ON_DEVICE: value.detach()}
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: as_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        items = [as_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise SpecError(
        f"the trainer's attribute {name} is a {type(value).__name__}; expected numbers, text, "
        "tensors, and lists, tuples and dictionaries of them. Keep such a value, or remove the "
        f"name from {NAMES}"
    )


def restored(live: Any, saved: Any, device: torch.device) -> Any:
    """Return `saved` in the containers of `live`, which may have kinds that no checkpoint has."""
    if isinstance(saved, Mapping):
        if saved.keys() == {ON_DEVICE}:
            return saved[ON_DEVICE].to(device)
        if not isinstance(live, MutableMapping):
            return {key: restored(None, item, device) for key, item in saved.items()}
        for key in live.keys() - saved.keys():
            del live[key]
        for key, item in saved.items():
            # The factory of a `defaultdict` makes the container of a key that is not there yet.
            is_known = key in live or getattr(live, "default_factory", None) is not None
            live[key] = restored(live[key] if is_known else None, item, device)
        return live
    if isinstance(live, deque) and isinstance(saved, list):
        live.clear()
        live.extend(restored(None, item, device) for item in saved)
        return live
    if isinstance(saved, list | tuple):
        return type(saved)(restored(None, item, device) for item in saved)
    return saved


def _known_names(trainer: Any, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the attributes in `known` that the trainer has, of the libraries of its classes."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    for library in sorted(libraries & known.keys()):
        yield from (name for name in known[library] if hasattr(trainer, name))


def _own_names(trainer: Any) -> dict[str, str]:
    """Return the names that the trainer's classes give, each with its class.

    Every class counts: `Trainer` in front of a subclass would otherwise hide the subclass's names.
    """
    found: dict[str, str] = {}
    for kind in type(trainer).__mro__:
        names = vars(kind).get(NAMES, ())
        if isinstance(names, str):
            raise SpecError(
                f"{kind.__name__}.{NAMES} = {names!r}: expected a tuple of names of attributes"
            )
        found |= dict.fromkeys(names, kind.__name__)
    return found


FORMAT: Final = 1
# The fields of `TrainerState` that training changes. The others follow from the arguments.
CHANGING: Final = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


class Todo(NamedTuple):
    """The work of a step that comes after its boundary."""

    evaluate: bool = False
    save: bool = False


# The work of most steps.
NOTHING: Final = Todo()


@dataclasses.dataclass
class EpochPlace:
    """A position in the epochs: `steps` optimizer steps of `epoch` are complete.

    `is_ended` is True when the end of the epoch is complete, too.
    """

    epoch: int = 0
    steps: int = 0
    is_ended: bool = False


@dataclasses.dataclass
class Told:
    """The last step's gradient norm and learning rate, which the end of an epoch logs again."""

    grad_norm: Any = None
    learning_rate: float | None = None


class TrainerProgress(RankLimited):
    """A trainer's progress as an object with a state, for `Session(extra=…)`.

    `loaded` is the restored state, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.kept = trainer, KeptAttributes(trainer)
        self.place, self.todo, self.told = EpochPlace(), NOTHING, Told()
        self.first_step = 0
        self.loaded: dict[str, Any] | None = None
        self._history = _HistoryText()
        # The seconds of training in earlier launches.
        self.earlier_s, self._began = 0.0, time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self.trainer, self.trainer.state
        control: TrainerControl = trainer.control
        norm = self.told.grad_norm
        return {
            "format": FORMAT,
            "state": {name: getattr(state, name) for name in CHANGING},
            "history": self._history.of(state.log_history),
            "callbacks": [
                [type(each).__name__, each.state()["attributes"]] for each in self._exportable()
            ],
            "stops": [control.should_training_stop, control.should_epoch_stop],
            "max_steps": state.max_steps,
            "place": dataclasses.astuple(self.place),
            "todo": tuple(self.todo),
            "grad_norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
            "learning_rate": self.told.learning_rate,
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged_step": getattr(trainer, "_globalstep_last_logged", 0),
            "first_step": self.first_step,
            "seconds": self.earlier_s + time.monotonic() - self._began,
            "kept": self.kept.shared(),
            "dataset": self._fingerprint(),
        }

    def rank_limits(self) -> dict[str, Any]:
        args = self.trainer.args
        if args.accelerator_config.split_batches:
            return {}
        own = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return {GLOBAL_BATCHES: [own * args.world_size]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until `apply`. Raises `CheckpointError` for one of a newer version."""
        if state_dict.get("format") != FORMAT:
            raise CheckpointError(
                f"the trainer's state has format {state_dict.get('format')!r}; this version of "
                f"Holdfast reads {FORMAT}. Use the version that saved it, or a newer one"
            )
        self.loaded = dict(state_dict)

    def apply(self) -> None:
        """Put the loaded state into the trainer's own, its callbacks' and this one."""
        loaded = self.loaded
        assert loaded is not None
        state: TrainerState = self.trainer.state
        for name in CHANGING:
            setattr(state, name, loaded["state"][name])
        state.log_history = self._history.load(loaded["history"])
        saved: dict[str, list[Any]] = {}
        for name, attributes in loaded["callbacks"]:
            saved.setdefault(name, []).append(attributes)
        for each in self._exportable():
            if of_its_class := saved.get(type(each).__name__):
                for attribute, value in of_its_class.pop(0).items():
                    setattr(each, attribute, value)
        self.place, self.todo = EpochPlace(*loaded["place"]), Todo(*loaded["todo"])
        self.told = Told(loaded["grad_norm"], loaded["learning_rate"])
        self.first_step, self.earlier_s = loaded["first_step"], loaded["seconds"]
        self._compare_dataset(loaded.get("dataset"))

    def restore_window(self) -> None:
        """Put back the sums of losses. The trainer resets them when its loop begins."""
        if self.loaded is not None:
            self.trainer._total_loss_scalar = self.loaded["total_loss"]
            self.trainer._globalstep_last_logged = self.loaded["logged_step"]
            self.kept.restore(self.loaded.get("kept", {}))

    @property
    def is_over(self) -> bool:
        """True if the trainer has completed its steps, or a callback has ended the training.

        A callback's decision no longer counts if the trainer now has another number of steps.
        """
        state, loaded = self.trainer.state, self.loaded
        if state.global_step >= state.max_steps:
            return True
        return loaded is not None and loaded["stops"][0] and loaded["max_steps"] == state.max_steps

    def resumed_place(self, steps_per_epoch: int) -> EpochPlace:
        """Return where the epochs continue, after the end of an epoch in the next one."""
        place, loaded = self.place, self.loaded
        is_cut = loaded is not None and loaded["stops"][1]
        if place.is_ended and (is_cut or place.steps >= steps_per_epoch):
            return EpochPlace(place.epoch + 1)
        return EpochPlace(place.epoch, place.steps)

    def _fingerprint(self) -> str | None:
        """Return what the datasets library computes from how a dataset was made, or None."""
        found = getattr(self.trainer.train_dataset, "_fingerprint", None)
        return found if isinstance(found, str) else None

    def _compare_dataset(self, saved: str | None) -> None:
        now = self._fingerprint()
        if saved and now and saved != now and self.trainer.args.process_index == 0:
            report(
                f"holdfast: the training dataset has the fingerprint {now}, and {saved} in the "
                "checkpoint, so its samples may be others. If the program makes it with random "
                "numbers, as with shuffle(), give it a seed"
            )

    def _exportable(self) -> list[Any]:
        callbacks = self.trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


class RankShare:
    """One rank's sums since the last log, and its random states in the epoch."""

    def __init__(self, progress: TrainerProgress, fetches: FetchStates) -> None:
        self._progress, self._fetches = progress, fetches
        self._trainer, self._kept = progress.trainer, progress.kept
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        loss = getattr(self._trainer, "_tr_loss", None)
        return {
            "loss": torch.zeros((), device=devices.CPU) if loss is None else loss.detach(),
            "flos": float(self._trainer.current_flos),
            "fetches": self._fetches.state_dict(),
            "epoch": self._progress.place.epoch,
            "kept": self._kept.of_rank(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until `restore_window`."""
        self.loaded = dict(state_dict)

    def restore_window(self, logged_step: int) -> None:
        """Put back the sums since step `logged_step`.

        Without them, at another number of ranks, the mean of the next log begins at this step.
        """
        trainer, loaded = self._trainer, self.loaded
        if loaded is None:
            trainer._globalstep_last_logged = trainer.state.global_step
            return
        trainer._tr_loss = loaded["loss"].to(trainer._tr_loss)
        trainer.current_flos = loaded["flos"]
        trainer._globalstep_last_logged = logged_step
        self._kept.restore(loaded.get("kept", {}))

    def resume_fetches(self, epoch: int, skipped: int) -> None:
        """Prepare the random states of the loader for `epoch`, of which batches are `skipped`."""
        if self.loaded is None:
            return
        fetches, is_same_epoch = self.loaded["fetches"], self.loaded["epoch"] == epoch
        if skipped:
            self._fetches.resume(fetches, skipped)
        self._fetches.generators.resume(fetches["generators"], is_same_epoch=is_same_epoch)
        self._fetches.data.load_state_dict(fetches["data"]["now"])


class _HistoryText:
    """The history of logs as lines of JSON. Each save adds only the newest lines."""

    def __init__(self) -> None:
        self._text, self._count = "", 0

    def of(self, history: list[Any]) -> str:
        if len(history) < self._count:
            self._text, self._count = "", 0
        new = history[self._count :]
        self._text += "".join(json.dumps(entry, default=_plain) + "\n" for entry in new)
        self._count = len(history)
        return self._text

    def load(self, text: str) -> list[Any]:
        history = [json.loads(line) for line in text.splitlines()]
        self._text, self._count = text, len(history)
        return history


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as one that JSON has."""
    return value.item() if hasattr(value, "item") else str(value)
