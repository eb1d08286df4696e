"""Where each key of a run spec acts, and which keys contradict each other. Pure functions.

A key that a person wrote and that cannot act in this run is refused before anything starts, with
the reason and with what would act. Only written keys count, and only values that ask for something:
what `off`, `false` and empty values say is true anyway. Recorded specs are not checked, because a
run must survive an upgrade that makes these rules stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from holdfast.contracts.plain_text import counted, exact
from holdfast.contracts.spec import sections
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.consumers import OFFERED, Consumer
from holdfast.contracts.spec.part import SpecPart
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.states import Cause

GIVEN_CHARACTERS_MAX: Final = 60


class Sections(Protocol):
    """What decides whether a key acts: the sections and GPU counts of a `RunSpec`."""

    @property
    def launch(self) -> sections.Launch: ...

    @property
    def program(self) -> sections.Program: ...

    @property
    def resources(self) -> Resources: ...

    @property
    def elastic(self) -> sections.Elastic: ...

    @property
    def checkpoint(self) -> Checkpointing: ...

    @property
    def supervision(self) -> sections.Supervision: ...

    @property
    def health(self) -> sections.Health: ...

    @property
    def cost(self) -> sections.Cost: ...

    @property
    def alerts(self) -> sections.Alerts: ...

    @property
    def on(self) -> tuple[Consumer, ...]: ...

    @property
    def gpus(self) -> int: ...

    @property
    def gpus_min(self) -> int: ...

    @property
    def gpus_max(self) -> int: ...


@dataclass(frozen=True)
class Scope:
    """A condition under which a key acts. `otherwise` says why it does not, and what would act."""

    holds: Callable[[Sections], bool]
    otherwise: str


SLURM: Final = Scope(
    lambda spec: spec.resources.executor == "slurm",
    "it acts only on Slurm, and resources.executor is 'local'; set resources.executor = 'slurm', "
    "or leave the key out",
)
SRUN: Final = Scope(
    SLURM.holds,
    "the local executor starts no srun for these arguments; leave them out, set "
    "resources.executor = 'slurm', or name a container's command in launch.wrapper",
)
SAVES: Final = Scope(
    lambda spec: not spec.program.is_watched,
    "it does not apply to program.checkpoints: the program itself writes, copies and deletes its "
    "checkpoints, and Holdfast sees only its files and output; leave the key out",
)
WATCHED: Final = Scope(
    lambda spec: spec.program.is_watched,
    "it is set without program.checkpoints; set that to the path of the program's own checkpoints, "
    "such as 'out/checkpoint-{step}', or leave the key out",
)
SHARED: Final = Scope(
    lambda spec: spec.checkpoint.local is None,
    "checkpoint.local keeps the files on the nodes' own disks, where no other program finds them; "
    "leave one of them out",
)
STARTS: Final = Scope(
    lambda spec: spec.program.is_watched or spec.program.launcher == "torchrun",
    WATCHED.otherwise,
)
TORCHRUN: Final = Scope(
    lambda spec: spec.program.launcher == "torchrun",
    "program.launcher is 'none', so there is no torchrun; leave one of them out",
)
FALLBACKS: Final = Scope(
    lambda spec: bool(spec.resources.fallbacks),
    "there are no resources.fallbacks to return from; add some, or leave the key out",
)
GROWS: Final = Scope(
    lambda spec: spec.elastic.grow,
    "elastic.grow is false; set elastic.grow = true, or leave the key out",
)
# `none` asks for nothing.
STANDBY_ON_SLURM: Final = Scope(
    lambda spec: spec.resources.standby == "none" or SLURM.holds(spec),
    SLURM.otherwise,
)
STANDBY_RELAUNCHES: Final = Scope(
    lambda spec: spec.resources.standby == "none" or spec.supervision.attempts_max > 1,
    "supervision.attempts_max = 1 allows no second attempt; set a larger one, or leave the key out",
)
RELAUNCHES: Final = Scope(
    lambda spec: spec.supervision.attempts_max > 1,
    "supervision.attempts_max = 1 allows no second attempt; set a larger one, or leave the key out",
)
RESTARTS: Final = Scope(
    lambda spec: spec.supervision.restarts_in_place > 0,
    "supervision.restarts_in_place = 0 allows no restart in place; set a larger one, or leave the "
    "key out",
)
SEVERAL_NODES: Final = Scope(
    lambda spec: spec.resources.nodes > 1,
    "resources.nodes is 1: an attempt ends with its only node, so no spare can replace it; set "
    "resources.nodes to 2 or more, or leave the key out",
)
HANGS: Final = Scope(
    lambda spec: spec.supervision.hangs,
    "supervision.hangs is false, so no silent rank is examined; leave one of them out",
)
NOTICES: Final = Scope(
    lambda spec: spec.supervision.notices != "off",
    "supervision.notices is 'off'; leave one of them out",
)
HAS_NEIGHBOURS: Final = Scope(
    lambda spec: max(spec.gpus_max, *spec.elastic.choices, 0) > spec.resources.size_per_node,
    "the run has one node, so there is no other node whose memory could hold its snapshots; set "
    "resources.nodes = 2 or more, or leave the key out",
)
SNAPSHOTS: Final = Scope(
    lambda spec: spec.checkpoint.snapshots != "off",
    "checkpoint.snapshots is 'off', so there are no snapshots to copy; leave one of them out",
)
# The program may say where it stages, if the spec does not.
STAGES_ON_DISK: Final = Scope(
    lambda spec: (
        spec.checkpoint.staging == "disk" or "staging" not in spec.checkpoint.model_fields_set
    ),
    "checkpoint.staging is not 'disk', so no image is on a disk; set it to 'disk', or leave the "
    "key out",
)
IN_MEMORY: Final = Scope(
    lambda spec: spec.checkpoint.staging == "memory" or not spec.checkpoint.neighbour,
    "checkpoint.staging is not 'memory', because memory is short, and the copies need up to four "
    "times the memory of a node's checkpoint files; leave one of them out",
)
ROLLS_BACK: Final = Scope(
    lambda spec: "rollback" in _actions(spec),
    "only a rollback uses it; set supervision.numerics.on_nan or on_spike = 'rollback', or leave "
    "the key out",
)
CHANGES_DATA: Final = Scope(
    lambda spec: bool({"rollback", "skip"} & _actions(spec)),
    "only a rollback and a skip use it; set supervision.numerics.on_nan or on_spike to one of "
    "them, or leave the key out",
)
# `off` asks for nothing.
COMPARES_NODES: Final = Scope(
    lambda spec: spec.health.slowdown == "off" or HAS_NEIGHBOURS.holds(spec),
    "the run has one node, so there is no other node to compare it with; set resources.nodes = 2 "
    "or more, or leave the key out",
)
HAS_GPUS: Final = Scope(
    lambda spec: spec.health.gpus == "off" or spec.resources.gpus_per_node > 0,
    "resources.gpus_per_node is 0, so there is no GPU whose counters could be compared; leave one "
    "of them out",
)
JUDGES_GPUS: Final = Scope(
    lambda spec: spec.health.gpus != "off",
    "health.gpus is 'off', so no counter of a GPU is compared; leave one of them out",
)
CHECKS: Final = Scope(
    lambda spec: bool(spec.health.before or spec.health.after),
    "there are no checks in health.before and health.after; add some, or leave the key out",
)
TARGETS: Final = Scope(
    lambda spec: bool(spec.alerts.targets),
    "there are no alerts.targets that notifications go to; add some, or leave the key out",
)
PRICES: Final = Scope(
    lambda spec: any(
        price is not None
        for price in (
            spec.cost.gpu_hour,
            spec.cost.on_demand_per_gpu_hour,
            *(place.gpu_hour for place in spec.resources.fallbacks),
        )
    ),
    "there is no price; set cost.gpu_hour, or leave the key out",
)

# Every key of a spec, with the conditions under which it acts: all of them must hold. No condition
# means that it always acts, or that a validator of its part refuses it.
ACTS: Final[Mapping[str, tuple[Scope, ...]]] = {
    "name": (),
    "tags": (),
    "command": (),
    "environment": (),
    "config": (),
    "launch.python": (),
    "launch.setup": (),
    "launch.container": (SRUN,),
    "launch.srun": (SRUN,),
    "launch.node_setup": (),
    "launch.wrapper": (),
    "launch.network_interface": (),
    "launch.torchrun": (TORCHRUN,),
    "launch.export": (SLURM,),
    "launch.working_directory": (),
    "launch.code": (),
    "program.checkpoints": (),
    "program.complete": (WATCHED,),
    "program.settle_s": (WATCHED,),
    "program.progress": (WATCHED,),
    "program.signal": (WATCHED,),
    "program.signal_to": (WATCHED,),
    "program.launcher": (STARTS,),
    "resources.executor": (),
    "resources.nodes": (),
    "resources.spare_nodes": (SLURM, SEVERAL_NODES, RESTARTS),
    "resources.gpus_per_node": (),
    "resources.nproc_per_node": (),
    "resources.cpus_per_gpu": (),
    "resources.memory_gb_per_node": (SLURM,),
    "resources.memory_gb_per_cpu": (SLURM,),
    "resources.partition": (SLURM,),
    "resources.account": (SLURM,),
    "resources.qos": (SLURM,),
    "resources.constraint": (SLURM,),
    "resources.time_limit_min": (),
    "resources.gpu_type": (SLURM,),
    "resources.gres": (SLURM,),
    "resources.extra": (SLURM,),
    "resources.fallbacks": (SLURM, RELAUNCHES),
    "resources.return_after_min": (SLURM, FALLBACKS),
    "resources.commit_comment": (SLURM,),
    "resources.standby": (STANDBY_ON_SLURM, STANDBY_RELAUNCHES),
    "elastic.min_gpus": (),
    "elastic.max_gpus": (),
    "elastic.choices": (),
    "elastic.on_preemption": (RELAUNCHES,),
    "elastic.grow": (SLURM, RELAUNCHES),
    "elastic.grow_after_s": (SLURM, GROWS),
    "checkpoint.interval": (SAVES,),
    "checkpoint.doubling_steps": (SAVES,),
    "checkpoint.keep.last": (SAVES,),
    "checkpoint.keep.best": (SAVES,),
    "checkpoint.keep.every_steps": (SAVES,),
    "checkpoint.keep.doubling_steps": (SAVES,),
    "checkpoint.keep.every_hours": (SAVES,),
    "checkpoint.keep.ttl": (SAVES,),
    "checkpoint.budget": (SAVES,),
    "checkpoint.directory": (),
    "checkpoint.mirror": (SAVES,),
    "checkpoint.local": (SAVES,),
    "checkpoint.snapshots": (SAVES,),
    "checkpoint.neighbour": (SAVES, HAS_NEIGHBOURS, SNAPSHOTS, IN_MEMORY),
    "checkpoint.overlap": (SAVES,),
    "checkpoint.write_limit": (SAVES,),
    "checkpoint.staging": (SAVES,),
    "checkpoint.staging_directory": (SAVES, STAGES_ON_DISK),
    "supervision.heartbeat_s": (),
    "supervision.poll_s": (),
    "supervision.grace_s": (),
    "supervision.notices": (),
    "supervision.notices_url": (NOTICES,),
    "supervision.flush_timeout_s": (),
    # The local executor has one node, so nobody joins.
    "supervision.join_timeout_s": (SLURM,),
    "supervision.pending_timeout_min": (SLURM,),
    "supervision.ports": (),
    "supervision.restarts_in_place": (),
    # A standby loads ahead only what a session has recorded.
    "supervision.standby_after_s": (SAVES, RESTARTS),
    "supervision.hangs": (SAVES,),
    "supervision.silence_s": (SAVES, HANGS),
    "supervision.numerics.on_nan": (SAVES,),
    "supervision.numerics.on_spike": (SAVES,),
    "supervision.numerics.metric": (SAVES,),
    "supervision.numerics.window": (SAVES,),
    "supervision.numerics.spike_mads": (SAVES,),
    "supervision.numerics.margin_steps": (SAVES, ROLLS_BACK),
    "supervision.numerics.skip_steps": (SAVES, CHANGES_DATA),
    "supervision.numerics.changes_max": (SAVES, CHANGES_DATA),
    "supervision.budgets": (RELAUNCHES,),
    "supervision.backoff_s": (RELAUNCHES,),
    "supervision.allow_early_exit": (),
    "supervision.attempts_max": (),
    "health.before": (),
    "health.after": (RESTARTS,),
    "health.timeout_s": (CHECKS,),
    "health.slowdown": (COMPARES_NODES, SAVES, HANGS),
    "health.gpus": (HAS_GPUS,),
    "health.throttled_s_max": (JUDGES_GPUS, HAS_GPUS),
    "health.link_errors_max": (JUDGES_GPUS, HAS_GPUS),
    "cost.gpu_hour": (),
    "cost.on_demand_per_gpu_hour": (),
    "cost.currency": (PRICES,),
    "alerts.targets": (),
    "alerts.on": (TARGETS,),
    "alerts.ettr_min": (),
    "alerts.checkpoint_age_max_min": (),
    "alerts.gpu_hours_max": (),
    "blocks.cluster": (),
    "blocks.storage": (),
    "on": (SAVES, SHARED),
}


def problems_of_effects(spec: Sections, written: Mapping[str, Any]) -> list[str]:
    """Return a line for each written key that cannot act in this run, and each contradiction.

    `written` are the `written_keys` of the spec. Defaults of a table that does not act are no
    mistake, see decisions 88 and 89.
    """
    problems = []
    for key, value in written.items():
        # The first unmet condition is enough: the advice on the second would change once the first
        # is fixed.
        unmet = next((scope for scope in ACTS.get(key, ()) if not scope.holds(spec)), None)
        if unmet is not None:
            problems.append(f"{key} {_shown(value)}: {unmet.otherwise}")
    for contradictions in _CONTRADICTIONS:
        problems += contradictions(spec, written)
    return problems


def written_keys(part: SpecPart, where: str = "") -> dict[str, Any]:
    """Return the keys that were written and ask for something, by dotted name, with their values.

    A form or an old record writes every key of a table. The defaults in such a table do not count.
    """
    found: dict[str, Any] = {}
    fields = type(part).model_fields
    is_whole = part.model_fields_set >= fields.keys()

    def counts(name: str, value: Any) -> bool:
        if name not in part.model_fields_set or _asks_nothing(value):
            return False
        # A form of Prefect and an old record write all keys of a table. A table without a gap was
        # not typed by a person, so its defaults do not count, see decision 89.
        return not is_whole or value != fields[name].get_default(call_default_factory=True)

    for name, field in fields.items():
        value, kind = getattr(part, name), field.annotation
        if isinstance(kind, type) and issubclass(kind, SpecPart):
            # A part that nobody wrote has only defaults.
            if name in part.model_fields_set:
                found |= written_keys(value, f"{where}{name}.")
        elif counts(name, value):
            found[f"{where}{name}"] = value
    return found


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", "off", (), {})


_Written = Mapping[str, Any]


def _times(spec: Sections, written: _Written) -> Iterator[str]:
    """Waits that are longer than the attempt in which they happen."""
    minutes = spec.resources.time_limit_min
    seconds = dict(written)
    if "checkpoint.interval" in written:
        seconds["checkpoint.interval"] = spec.checkpoint.interval_s or 0.0
    for key in _CONSEQUENCES:
        if minutes is not None and seconds.get(key, 0.0) >= 60 * minutes:
            yield (
                f"{key} {exact(seconds[key])} and resources.time_limit_min {minutes}: the attempt "
                f"ends after {60 * minutes} s, so {_CONSEQUENCES[key]}; set a shorter {key}, or "
                "a longer resources.time_limit_min"
            )
    grace_s, flush_s = spec.supervision.grace_s, spec.supervision.flush_timeout_s
    if grace_s > flush_s:
        yield (
            f"supervision.grace_s {exact(grace_s)} and supervision.flush_timeout_s "
            f"{exact(flush_s)}: a stop may not take longer than flush_timeout_s, so the rest of "
            "the grace would be lost; set a shorter grace_s, or a longer flush_timeout_s"
        )


_CONSEQUENCES: Final = {
    "supervision.grace_s": "it would stop to save before its first step",
    "checkpoint.interval": "it would end before the first of these saves",
    "supervision.join_timeout_s": "the nodes would never have waited for so long",
    "elastic.grow_after_s": "it would never have run for so long",
}


def _counts(spec: Sections, written: _Written) -> Iterator[str]:
    """GPU counts and numbers of attempts that exclude each other."""
    elastic, choices = spec.elastic, {*spec.elastic.choices}
    if choices:
        # The first attempt's count is allowed without being listed.
        counts = {*choices, spec.gpus}
        for count in dict.fromkeys(elastic.on_preemption):
            if count not in counts:
                yield (
                    f"elastic.on_preemption {count} and elastic.choices {sorted(choices)}: the "
                    "choices are the only allowed counts; add it to them, or leave it out"
                )
        for key, bound in (("min_gpus", min(counts)), ("max_gpus", max(counts))):
            given = getattr(elastic, key)
            if given is not None and given != bound:
                yield (
                    f"elastic.{key} {given} and elastic.choices {sorted(choices)}: the choices "
                    f"are the only allowed counts, so {key} allows no other; leave one of them out"
                )
    yield from _beyond_one_node(spec)
    largest = max(choices, default=spec.gpus_max)
    if elastic.grow and largest <= spec.gpus_min:
        yield (
            f"elastic.grow: no attempt has fewer than {counted(largest, 'GPU')}, the most that it "
            "can grow to; set elastic.min_gpus or elastic.choices, or leave the key out"
        )
    attempts, places = spec.supervision.attempts_max, len(spec.resources.fallbacks)
    # With one attempt, `fallbacks` is refused by its own row in the table.
    if 1 < attempts <= places:
        yield (
            f"supervision.attempts_max {attempts} and {places} resources.fallbacks: each place "
            "needs a separate attempt, so the last one would never be taken; set attempts_max "
            f"to {places + 1} or more, or leave fallbacks out"
        )
    if Cause.OPERATOR in spec.supervision.budgets:
        yield (
            "supervision.budgets.operator: what an operator ended is never relaunched by Holdfast; "
            "leave it out"
        )


def _beyond_one_node(spec: Sections) -> Iterator[str]:
    """Counts that the local executor cannot start."""
    elastic, most = spec.elastic, spec.resources.size_per_node
    if spec.resources.executor != "local":
        return
    keys = {"max_gpus": (elastic.max_gpus or 0,), "choices": elastic.choices}
    for key, counts in {**keys, "on_preemption": elastic.on_preemption}.items():
        for count in dict.fromkeys(counts):
            if count > most:
                yield (
                    f"elastic.{key} {count}: the local executor has one node, of "
                    f"{counted(most, 'GPU')}; set at most {most}, or resources.executor = 'slurm'"
                )


def _places(spec: Sections, written: _Written) -> Iterator[str]:
    """Fallbacks that the scheduler cannot take, or that lead nowhere else."""
    # The first choice counts too: a run that moves to the place where it waited gains nothing.
    known: dict[tuple[Any, ...], str] = {_target(spec, 0): "the first choice"}
    for place, fallback in enumerate(spec.resources.fallbacks, 1):
        name = f"resources.fallbacks[{place - 1}]"
        # A fallback is validated as the resources that it becomes. A supervisor must not be the
        # first to notice, see decision 89.
        if problem := spec.resources.problem_at(place):
            yield f"{name} {_shown(fallback)}: {problem}"
            continue
        target = _target(spec, place)
        if target in known:
            yield (
                f"{name} {_shown(fallback)}: it is the same place as {known[target]}, so the "
                "run would queue where it waited; leave it out, or name another place"
            )
        known.setdefault(target, name)


def _target(spec: Sections, place: int) -> tuple[Any, ...]:
    there = spec.resources.at(place)
    return there.partition, there.account, there.qos, there.gpu_type


def _images(spec: Sections, written: _Written) -> Iterator[str]:
    """Paths that have no meaning in a container."""
    launch = spec.launch
    is_inside = bool(launch.container or launch.wrapper)
    if is_inside and "/" in launch.python and not launch.python.startswith("/"):
        key = "launch.container" if launch.container else "launch.wrapper"
        yield (
            f"launch.python {launch.python!r} and {key}: the job starts it from another folder, or "
            "in an image; write the absolute path there, or a name on its PATH"
        )


def _saves(spec: Sections, written: _Written) -> Iterator[str]:
    """Locations and rhythms of saves that cannot act."""
    every, steps = spec.checkpoint.snapshots, spec.checkpoint.interval_steps
    if isinstance(every, int) and steps and every % steps == 0:
        yield (
            f"checkpoint.snapshots {every} and checkpoint.interval {steps}: each of these steps "
            "has a checkpoint anyway; set fewer steps between snapshots, or leave snapshots out"
        )
    host = urlsplit(spec.checkpoint.mirror or "")
    if host.scheme == "file" and host.netloc not in {"", "localhost"}:
        yield (
            f"checkpoint.mirror {spec.checkpoint.mirror!r}: no file system is reached by a host's "
            f"name, so {host.netloc!r} has no effect; for a directory that all nodes share, write "
            f"'file://{host.path}'"
        )
    if host.scheme in {"s3", "s3a"} and not host.netloc:
        yield (
            f"checkpoint.mirror {spec.checkpoint.mirror!r}: it names no bucket; write "
            f"'{host.scheme}:/{host.path}'"
        )


def _variables(spec: Sections, written: _Written) -> Iterator[str]:
    """Environment variables that each launch sets itself."""
    launcher = spec.program.launcher
    who = "torchrun" if launcher == "torchrun" else "the node's agent"
    for name in written.get("environment", {}):
        if name in _SET_AT_LAUNCH[launcher]:
            yield (
                f"environment.{name}: {who} sets it at each launch, so this value would be lost; "
                "leave it out"
            )


_MEETING: Final = {"MASTER_ADDR", "MASTER_PORT"}
_SET_AT_LAUNCH: Final[Mapping[str, set[str]]] = {
    "torchrun": {
        *_MEETING,
        *(f"{of}RANK" for of in ("", "LOCAL_", "GROUP_", "ROLE_")),
        *(f"{of}WORLD_SIZE" for of in ("", "LOCAL_", "GROUP_", "ROLE_")),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
    },
    "none": {*_MEETING, "NNODES", "NODE_RANK"},
}


def _consumers(spec: Sections, written: _Written) -> Iterator[str]:
    """Consumers that would never start, or not where they should."""
    for one in spec.on:
        if one.event == "best" and spec.checkpoint.keep.best is None:
            yield (
                f"on {one.name!r}: event 'best' needs checkpoint.keep.best, which says by which "
                "metric; set it, or another event"
            )
        if one.job is not None and spec.resources.executor != "slurm":
            yield (
                f"on {one.name!r}: job asks for a Slurm job, and resources.executor is 'local', "
                "which has no queue and reserves no GPUs; leave job out to run the command on this "
                "machine, and begin it with 'env', 'CUDA_VISIBLE_DEVICES=7' to choose its GPU"
            )
        if taken := [name for name in OFFERED if name in one.parameters]:
            yield (
                f"on {one.name!r}: parameters {', '.join(taken)}: Holdfast sets them for each "
                "checkpoint; leave them out"
            )


_CONTRADICTIONS: Final[tuple[Callable[[Sections, _Written], Iterable[str]], ...]] = (
    _times,
    _counts,
    _places,
    _images,
    _variables,
    _saves,
    _consumers,
)


def _actions(spec: Sections) -> set[str]:
    numerics = spec.supervision.numerics
    return {numerics.on_nan, numerics.on_spike}


def _shown(value: Any) -> str:
    """Return a value for a message, as the person may have written it, shortened."""
    if isinstance(value, SpecPart):
        value = value.model_dump(mode="json", exclude_unset=True)
    elif isinstance(value, tuple):
        return f"[{_shortened(', '.join(_shown(each) for each in value))}]"
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= GIVEN_CHARACTERS_MAX else f"{text[:GIVEN_CHARACTERS_MAX]}…"
