"""The content of a training program's checkpoint: tensors by name, and one JSON document.

DCP saves the tensors (model, optimizer, random number generators, tensors of schedulers and extras)
under the keys `model.…`, `optimizer.…`, `rng.rank00000.…`, `scheduler.…` and `extra.<name>.…`.
Everything else is in `train_state.json`. Nothing is pickled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError, KeyMismatchError, SaveError
from holdfast.trainer.planning.compare_keys import Selection
from holdfast.trainer.planning.signature import flatten
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.state import fsdp1, imported, not_restored, own_loading, rng
from holdfast.trainer.state.forms import Forms, SavedOptimizer
from holdfast.trainer.state.fresh import FIT, Fresh, ResumeFit, describe
from holdfast.trainer.state.names import (
    Named,
    Views,
    Walk,
    as_buffer,
    copy_unless_same,
    find_all,
    is_fsdp1,
    merge_disjoint,
)
from holdfast.trainer.state.objects import EXTRA, SCHEDULER, Objects, Stateful, is_excluded
from holdfast.trainer.state.optimizer_steps import StepWatch, group_sizes
from holdfast.trainer.state.optimizers import (
    OptimizerState,
    awaits_state,
    check_names,
    is_plain,
    unwrap,
)
from holdfast.trainer.state.own_loading import OwnLoading
from holdfast.trainer.state.run_state import Restored, State, TrainingProgress

# Keys of a train state besides those of the model and the optimizers.


def rank_key(rank: int) -> str:
    """Return the name of a rank in keys of what only it has."""
    return f"rank{rank:05d}"


def shapes_of(metadata: Metadata) -> dict[str, Sequence[int]]:
    entries = metadata.state_dict_metadata.items()
    return {key: e.size for key, e in entries if isinstance(e, TensorStorageMetadata)}


def put(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Place tensors named `part.rest` so that DCP's flattening gives them that name again."""
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if rest:
            state.setdefault(part, {})[rest] = tensor
        else:
            # A scheduler whose state is one tensor.
            state[part] = tensor


def flat_objects(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of schedulers and extras, by key."""
    found: dict[str, torch.Tensor] = {}
    for part in (SCHEDULER, EXTRA):
        its = state.get(part, {})
        if isinstance(its, torch.Tensor):
            found[part] = its
        else:
            found |= {f"{part}.{key}": tensor for key, tensor in its.items()}
    return found


FORMS: Final = "forms"
EMPTY_GROUPS: Final = "empty_groups"
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
RNG: Final = "rng"

_WITH_MEMORY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_is_trained: Final = operator.attrgetter("requires_grad")

T = TypeVar("T")


class TrainState:
    """Captures and restores the state of one program on one rank."""

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful] = (),
        extra: Mapping[str, Any] | None = None,
        *,
        rank: int,
        world_size: int,
        per_rank: Mapping[str, Any] | None = None,
        fit: ResumeFit | None = None,
    ) -> None:
        """`models` are the parts of one model, under their names in the whole model.

        `fit` says how to load a checkpoint that does not fit. Raises `CheckpointError` for an
        object that cannot be saved.
        """
        self._models = (models,) if isinstance(models, nn.Module) else tuple(models)
        self._optimizers: tuple[Optimizer, ...] = tuple(unwrap(each) for each in optimizers)
        self._flattened = [OptimizerState(each, n) for n, each in enumerate(self._optimizers)]
        self._objects = Objects(
            schedulers, extra or {}, per_rank or {}, rank=rank, world_size=world_size
        )
        self._rank, self._world_size = rank, world_size
        self._fit = fit or ResumeFit()
        self._walk = Walk(self._models)
        self._views = Views()
        # The last answer of `steady`, after what it depends on.
        self._steady: tuple[object, object, Collection[int]] = None, None, ()
        self._rng: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._saved = SavedOptimizer()
        self._ties: dict[str, str] = {}
        self._forms: Forms | None = None
        # The forms of extra states in the checkpoint that is loaded, by `model.<name>`.
        self._saved_forms: Forms = {}
        # Parts that are left out because they do not fit, see `ResumeFit.if_needed`.
        self._left_out: list[str] = []
        self._fresh: Fresh | None = None
        self._watch: StepWatch | None = None
        self._counts: list[list[int]] = []
        self._is_heard = all(isinstance(each, Optimizer) for each in self._optimizers)
        self._generators = rng.ResumedGenerators()
        # FSDP1 converts flat parameters to named ones by collectives.
        self._is_fsdp1 = any(is_fsdp1(model) for model in self._models)
        self._check(find_all(self._models))
        if rank == 0:
            not_restored.warn_of_lost_states(self._models)

    def fit_for(self, document: Mapping[str, Any]) -> ResumeFit:
        """Return how to load the checkpoint of `document`."""
        left = self._objects.left_behind(document["objects"], self._fit.exclude)
        # The optimizer of an import has other names and layouts. A wrong guess would train
        # differently without an error, see decision 78.
        if imported.is_imported(document):
            left = [*left, OPTIMIZER]
        return self._fit.still_to_do(document).without([*left, *self._left_out])

    def leaves_out(self, error: KeyMismatchError, document: Mapping[str, Any]) -> bool:
        """Leave out the excluded parts for which `error` was raised. Return False if others are.

        The error is the same on all ranks, before anything was loaded.
        """
        reshaped = [line.partition(": ")[0] for line in error.reshaped]
        parts = self.fit_for(document).parts_over([*error.missing, *error.extra, *reshaped])
        self._left_out += parts
        return bool(parts)

    def remember(self) -> None:
        """Record the state that a launch has before it loads, so that `check` can compare."""
        if self._optimizers and not self._is_fsdp1:
            names = find_all(self._models).parameters
            for each in self._flattened:
                each.remember(names)
        # Gathering the optimizers of FSDP1 takes collectives, and `check` leaves them out.
        is_flat = self._is_fsdp1
        state = {MODEL: self._model_tensors(find_all(self._models))} if is_flat else self._tensors()
        put(state, self._objects.module_tensors())
        self._fresh = Fresh.of(flatten(state), () if self._is_fsdp1 else self._flattened)
        self._counts = [group_sizes(each) for each in self._optimizers]
        self._watch = StepWatch(self._optimizers)

    def check(self, state: State) -> None:
        """Raise `SaveError` if a new launch could not load a checkpoint of `state`, by its keys."""
        fresh = self._fresh
        if fresh is None:
            return
        kept = (f"{MODEL}.", *(f"{name}." for name in self._objects.module_names()))
        if self._optimizers and not self._is_fsdp1:
            kept += (f"{OPTIMIZER}.",)
        flat = {key: value for key, value in flatten(state).items() if key.startswith(kept)}
        own = OwnLoading.of(self._models)
        problems = self._objects.find_changed_forms(self._fit.exclude)
        problems += fresh.find_problems(flat, self._fit, own, self._own_forms())
        if problems:
            raise SaveError(describe(problems))

    def notice(self) -> None:
        """Raise `SaveError` if an optimizer got other groups or was replaced.

        Each step boundary calls this. The watch has noticed before whether there is anything to
        examine. Optimizers whose steps it does not hear are examined each time.
        """
        watch = self._watch
        if watch is not None:
            # The flags cost less than the comparison, which runs only if something has changed.
            if watch.asks or not self._is_heard:
                self._examine(watch)
            watch.stepped.clear()

    def _examine(self, watch: StepWatch) -> None:
        if (problem := watch.find_replaced()) is not None:
            raise SaveError(
                f"{problem}. Checkpoints have the state of the Session's optimizers, so a resume "
                "would train with the former one. Change the options in its param_groups, or load "
                "another state into it, instead of making a new optimizer"
            )
        counts = [group_sizes(each) for each in self._optimizers]
        if counts != self._counts:
            self.check(self._tensors())
            self._counts = counts
        watch.examined()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def capture(self, progress: TrainingProgress) -> tuple[State, dict[str, Any]]:
        """Return this rank's current state for DCP, and the document, which rank 0 saves.

        The tensors share memory with the live ones. Raises `CheckpointError` if an extra contains
        something that could only be pickled.
        """
        generators = self._in_place(rng.capture())
        state = self._tensors() | {RNG: {rank_key(self._rank): generators}}
        tensors, documents = self._objects.capture()
        put(state, tensors)
        # At every save: whether tensors share memory shows in no key, shape or type.
        if self._fresh is not None and (parted := self._fresh.find_parted(state, self._fit)):
            raise SaveError(describe(parted))
        document = {
            "format": imported.FORMAT,
            **progress.as_document(),
            "world_size": self._world_size,
            "rng": sorted(generators),
            FIT: self._fit.describe(),
            FORMS: self._own_forms() if self._forms is None else self._forms,
            EMPTY_GROUPS: {
                k: v for each in self._flattened for k, v in each.empty_groups().items()
            },
            "objects": documents,
            **self._objects.rank_limits(self._fit.exclude),
        }
        return state, document

    @property
    def awaits_first_step(self) -> bool:
        """True while trained parameters have no optimizer state and may still get some."""
        return any(map(awaits_state, self._optimizers))

    def note_forms(self, ranks: ControlGroup) -> None:
        """Collect the forms of all ranks' optimizers for later documents. All ranks call this.

        Call it when saves are planned, because forms change only with the plan.
        """
        own = self._own_forms()
        self._forms = {}
        # Most optimizers have no forms. One small exchange then replaces the gathering of all of
        # them.
        if ranks.largest([bool(own)])[0]:
            for forms in ranks.gather(lambda: own):
                self._forms |= forms

    def template(
        self, document: Mapping[str, Any], metadata: Callable[[], Metadata] | None = None
    ) -> State:
        """Return a state with exactly the keys of the checkpoint of `document`.

        `metadata` reads that checkpoint's metadata. It is called only if keys must be known. Raises
        `CheckpointError` for an object that cannot continue at this world size.
        """
        if document.get("format") != imported.FORMAT:
            raise CheckpointError(
                f"train_state.json has format {document.get('format')!r}; this version of "
                f"Holdfast reads {imported.FORMAT}"
            )
        fit = self.fit_for(document)
        pick = Selection(exclude=tuple(fit.exclude), rename=fit.rename, strict=fit.strict)
        if imported.is_imported(document) and metadata is not None:
            return self.weights_template(metadata(), pick)
        state = self.tensors(metadata, pick, document)
        saved_ranks = int(document["world_size"])
        # Rank 0 reads the states of ranks that no longer exist, and ignores them, so that the
        # keys of all ranks together are those of the checkpoint.
        mine = [self._rank] if self._rank < saved_ranks else []
        orphans = range(self._world_size, saved_ranks) if self._rank == 0 else range(0)

        @functools.cache
        def shapes() -> dict[str, Sequence[int]]:
            return shapes_of(metadata()) if metadata is not None else {}

        def shape_of(rank: str, kind: str) -> Sequence[int]:
            return shapes().get(f"{RNG}.{rank}.{kind}", ())

        for name in map(rank_key, (*mine, *orphans)):
            kinds = rng.empty_like_saved(document["rng"], functools.partial(shape_of, name))
            state.setdefault(RNG, {})[name] = kinds
        put(state, self._objects.templates(document["objects"], shapes, fit.exclude))
        return state

    def weights_template(self, metadata: Metadata, pick: Selection) -> State:
        """Return a state with the model's tensors only, see `leave_ties_out`."""
        state: State = {MODEL: self._model_tensors(find_all(self._models))}
        self._want_model(state[MODEL], metadata, pick, {})
        self.leave_ties_out(state, metadata, pick)
        return state

    def leave_ties_out(self, state: State, metadata: Metadata, pick: Selection) -> None:
        """Remove tied names that were not saved from `state`. `put_back` sets them all the same."""
        self._ties = imported.find_ties(
            find_all(self._models).tensors, imported.names_in(metadata, pick)
        )
        state[MODEL] = {key: t for key, t in state[MODEL].items() if key not in self._ties}

    def apply(self, state: State, document: Mapping[str, Any]) -> Restored:
        """Put a loaded `state` and its document back into the program's objects."""
        fit = self.fit_for(document)
        exclude = fit.exclude
        parts = self.put_back(state, exclude, strict=fit.strict)
        if imported.is_imported(document):
            # The program's own random state continues, as in a run without a checkpoint.
            return Restored(parts=tuple(parts))
        saved = document["objects"]
        restored, refused = self._objects.apply(saved, flat_objects(state), exclude, fit.if_needed)
        parts += restored
        own = None if is_excluded(RNG, exclude) else state.get(RNG, {}).get(rank_key(self._rank))
        if own is not None:
            rng.restore(own)
            parts.append(RNG)
        else:
            rng.reseed(int(document["seed"]), self._rank, int(document["step"]))
        # The program may draw numbers before its first step. Those draws are taken back.
        self._generators.note()
        ours = set(self._objects)
        return Restored(
            parts=tuple(parts),
            missing=tuple(name for name in self._objects if name not in saved),
            unused=tuple(
                name for name in saved if name not in ours and not is_excluded(name, exclude)
            ),
            refused=refused,
            reseeded=own is None,
        )

    def tensors(
        self,
        metadata: Callable[[], Metadata] | None = None,
        pick: Selection | None = None,
        document: Mapping[str, Any] | None = None,
    ) -> State:
        """Return model and optimizer state. With `metadata`, add state that only it has.

        `pick` selects parts of the checkpoint. `document` is the checkpoint's own, or empty.
        """
        state = self._tensors()
        # What an earlier try has found must not count for another checkpoint.
        self._saved, self._ties, self._saved_forms = SavedOptimizer(), {}, {}
        pick, document = pick or Selection(), document or {}
        if metadata is not None and OwnLoading.of(self._models):
            self._want_model(state[MODEL], metadata(), pick, document.get(FORMS) or {})
        if self._optimizers and metadata is not None:
            state[OPTIMIZER] = dict(state[OPTIMIZER])
            self._want(state[OPTIMIZER], metadata(), pick, document.get(FORMS))
            self._saved.empty_groups = document.get(EMPTY_GROUPS, {})
        return state

    def weights(self) -> Iterable[torch.Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()

    def steady(self, facts: object = None) -> Collection[int]:
        """Return the addresses of the tensors that only the step of an optimizer changes.

        They are the trained parameters of torch's optimizers and the state of these. A forward may
        change any other tensor, and torch does not report the steps of other optimizers. `facts` is
        the same object as before if the names and the memory of all tensors are known to be those
        of before.
        """
        if self._is_fsdp1 or not self._is_heard:
            return ()
        plain = list(filter(is_plain, self._optimizers))
        parameters = [p for each in plain for group in each.param_groups for p in group["params"]]
        depends_on = list(map(id, plain)), list(map(_is_trained, parameters))
        if facts is None or facts is not self._steady[0] or depends_on != self._steady[1]:
            self._steady = facts, depends_on, self._find_steady(plain)
        return self._steady[2]

    def _find_steady(self, optimizers: Sequence[Optimizer]) -> set[int]:
        found: list[Any] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                trained = list(filter(_is_trained, group["params"]))
                states = filter(None, map(optimizer.state.get, trained))
                found += trained
                found += chain.from_iterable(its.values() for its in states)
        parts = [one._local_tensor if type(one) is DTensor else one for one in found]
        if not _WITH_MEMORY.issuperset(map(type, parts)):
            parts = [part for part in parts if type(part) in _WITH_MEMORY]
        addresses = set(map(torch.Tensor.data_ptr, parts))
        return addresses - {0}

    def put_back(
        self, state: State, exclude: Collection[str] = (), *, strict: bool = True
    ) -> list[str]:
        """Put back model and optimizer state from `tensors`. Return the names of the parts."""
        parts = []
        if not is_excluded(MODEL, exclude):
            self._apply_model(state[MODEL], strict=strict)
            parts.append(MODEL)
        if self._optimizers and not is_excluded(OPTIMIZER, exclude):
            self._apply_optimizers(state[OPTIMIZER])
            parts.append(OPTIMIZER)
        return parts

    def rewind_generators(self, *, is_last: bool) -> list[str]:
        return self._generators.rewind(is_last=is_last)

    def rewind_seeds(self) -> None:
        self._generators.rewind_seeds()

    @property
    def streams(self) -> Objects:
        """The objects, to which streams are added after a load."""
        return self._objects

    def saves(self, item: object) -> bool:
        return self._objects.saves(item)

    # --- model and optimizers -------------------------------------------------------------

    def _check(self, named: Named) -> None:
        if not self._is_fsdp1:
            check_names(self._optimizers, named.parameters)
        elif self._optimizers and not (
            len(self._models) == 1 and all(map(is_plain, self._optimizers))
        ):
            raise CheckpointError(
                "several models with FSDP1, or FSDP1 with an optimizer that has its own "
                "state_dict, are not supported; use fully_shard, or one model over them all"
            )

    def _tensors(self) -> State:
        """Return the current model and optimizer state, without creating any state."""
        named = self._walk.find()
        state: State = {MODEL: self._model_tensors(named)}
        if self._optimizers:
            state[OPTIMIZER] = self._optimizer_tensors(named)
        return state

    def _model_tensors(self, named: Named) -> State:
        if named.is_plain:
            return dict(self._views.of(named.tensors, named.buffers))
        return merge_disjoint([self._asked(model, named) for model in self._models])

    def _asked(self, model: nn.Module, named: Named, forms: Forms | None = None) -> State:
        """Return the state of a model that defines its own, with buffers marked."""
        own, found = OwnLoading.of([model]), get_model_state_dict(model)
        # The walk finds no tensors in FSDP1 modules. Their parameters are never plain tensors.
        return {
            name: as_buffer(value)
            if type(value) is torch.Tensor and (self._is_fsdp1 or name in named.buffers)
            else value
            for name, value in own_loading.gathered(found, own, forms).items()
        }

    def _in_place(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states of generators in the memory of the last ones.

        So a copy finds that all tensors of the state are where they were.
        """
        for kind, state in states.items():
            last, kept = self._rng.get(kind, (None, None))
            if kept is None or kept.shape != state.shape or kept.dtype != state.dtype:
                kept = state.clone()
            elif state is not last:
                kept.copy_(state)
            self._rng[kind] = state, kept
        return {kind: self._rng[kind][1] for kind in states}

    def _optimizer_tensors(self, named: Named, forms: Forms | None = None) -> Mapping[str, Any]:
        if self._is_fsdp1:
            return fsdp1.gather(self._models[0], self._optimizers)
        try:
            parts = [each.gather(named.parameters, forms) for each in self._flattened]
        except KeyError:
            # A parameter was replaced without the optimizer's knowledge. Report which one.
            self._check(named)
            raise
        if len(parts) == 1:
            return parts[0]
        return {key: value for part in parts for key, value in part.items()}

    def _own_forms(self) -> Forms:
        forms: Forms = {}
        named = find_all(self._models)
        if self._optimizers and not self._is_fsdp1:
            self._optimizer_tensors(named, forms)
        for model in () if named.is_plain else self._models:
            self._asked(model, named, forms)
        return forms

    def _want_model(self, found: State, metadata: Metadata, pick: Selection, forms: Forms) -> None:
        """Change `found` to what modules that load themselves load of the checkpoint."""
        own, prefix = OwnLoading.of(self._models), f"{MODEL}."
        entries = metadata.state_dict_metadata.items()
        renamed = {pick.renamed(key): entry for key, entry in entries}
        saved = {
            key.removeprefix(prefix): entry
            for key, entry in renamed.items()
            if key.startswith(prefix) and pick.takes(key)
        }
        self._saved_forms = {pick.renamed(key): form for key, form in forms.items()}
        taken = {key: form for key, form in self._saved_forms.items() if pick.takes(key)}
        own_loading.want(
            found,
            own,
            saved,
            taken,
            takes=lambda name: pick.takes(prefix + name),
            strict=pick.strict,
        )

    def _want(self, found: State, metadata: Metadata, pick: Selection, forms: Forms | None) -> None:
        """Add optimizer state that only the checkpoint has to `found`."""
        entries, prefix = metadata.state_dict_metadata, f"{OPTIMIZER}."
        ours = {
            new.removeprefix(prefix): entry
            for key, entry in entries.items()
            if key.startswith(prefix) and pick.takes(new := pick.renamed(key))
        }
        if forms is not None:
            renamed = {pick.renamed(prefix + key): form for key, form in forms.items()}
            forms = {key.removeprefix(prefix): form for key, form in renamed.items()}
        if self._is_fsdp1:
            known = get_model_state_dict(self._models[0]).keys()
            self._saved = SavedOptimizer.of(ours, forms, known)
            fsdp1.wanted(found, self._saved, self._models[0])
            return
        named = find_all(self._models).parameters
        self._saved = SavedOptimizer.of(ours, forms, set(named.values()))
        for key, entry in entries.items():
            part = self._saved.state.get(pick.renamed(key).removeprefix(f"{MODEL}."))
            if part is not None and isinstance(entry, TensorStorageMetadata):
                part.was = entry.properties.dtype
        for each in self._flattened:
            each.wanted(found, self._saved, named)

    def _apply_model(self, loaded: State, *, strict: bool) -> None:
        named = find_all(self._models)
        loaded = {**loaded, **{name: loaded[other] for name, other in self._ties.items()}}
        if named.is_plain:
            for name, live in named.tensors.items():
                copy_unless_same(live, loaded[name])
            return
        for model in self._models:
            own, state = OwnLoading.of([model]), get_model_state_dict(model)
            state = own_loading.assembled(loaded, state, own, self._saved_forms)
            try:
                set_model_state_dict(
                    model,
                    own_loading.with_versions(state, model),
                    options=StateDictOptions(strict=strict),
                )
            except Exception as error:
                raise CheckpointError(
                    f"{type(model).__name__}.load_state_dict refused the checkpoint's state: "
                    f"{error}; fix it, or leave parts out with exclude"
                ) from error

    def _apply_optimizers(self, loaded: State) -> None:
        if self._is_fsdp1:
            fsdp1.put_back(self._models[0], self._optimizers, loaded)
            return
        names = find_all(self._models).parameters
        for each in self._flattened:
            each.put_back(loaded, self._saved, names)


def listed(given: T | Sequence[T] | None) -> tuple[T, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)
