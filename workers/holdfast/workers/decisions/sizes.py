"""The GPU counts that a relaunch may use, and the choice between them. Pure functions."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.run_spec import RunSpec


def problem_with(spec: RunSpec, gpus: int) -> str | None:
    """Return None if a relaunch may use `gpus` GPUs, otherwise why not and what is allowed."""
    if not spec.gpus_min <= gpus <= spec.gpus_max and not is_single(spec):
        return (
            f"{counted(gpus, 'GPU')}: outside elastic {spec.gpus_min} to {spec.gpus_max}; "
            f"allowed: {_listing(spec)}"
        )
    if gpus < 1:
        return f"{gpus} GPUs: expected 1 or more"
    try:
        nodes = spec.share(gpus).nodes
    except ValueError as error:
        return str(error)
    if spec.resources.executor == "local" and nodes > 1:
        most = spec.resources.size_per_node
        return f"{counted(gpus, 'GPU')}: more than {most}, and the local executor has one node"
    if spec.elastic.choices and gpus not in spec.elastic.choices and gpus != spec.gpus:
        return f"{counted(gpus, 'GPU')}: not among elastic.choices; allowed: {_listing(spec)}"
    return None


def allowed_sizes(spec: RunSpec) -> tuple[int, ...]:
    """Return every GPU count that the spec allows for a relaunch, smallest first."""
    if spec.elastic.choices:
        return tuple(sorted(set(spec.elastic.choices)))
    # Up to one node, any count whose share of ranks is whole. Beyond it, whole nodes only, see
    # decision 57.
    per_node, low, high = spec.resources.size_per_node, spec.gpus_min, spec.gpus_max
    sizes = [size for size in range(low, min(high, per_node) + 1) if spec.can_split(size)]
    first_whole = max(2 * per_node, -(-low // per_node) * per_node)
    sizes += range(first_whole, high + 1, per_node)
    return tuple(sizes) or (spec.gpus,)


def choose_gpus(
    spec: RunSpec,
    *,
    current: int,
    preemptions: int,
    after_preemption: bool,
    capacity: int | None,
    fits: Callable[[int], bool],
    most: int | None = None,
) -> tuple[int, str]:
    """Return the GPUs of the next attempt, and why.

    After a preemption, `elastic.on_preemption` applies if it is given: its n-th count after the
    n-th preemption, with the last one repeating. Otherwise the largest allowed count that is free
    now is used. If none is free, the job queues at the smallest. If the capacity is unknown, the
    count stays. A count that the checkpoint does not fit is used only if the spec allows no other.
    `most` is the largest count that the nodes can ever hold, None if unknown.
    """
    plan = spec.elastic.on_preemption
    chosen = plan[min(preemptions, len(plan)) - 1] if plan and preemptions else None
    if chosen is not None and fits(chosen):
        verb = "after" if after_preemption else "still after"
        return chosen, f"elastic.on_preemption {verb} {preemptions}"
    allowed = allowed_sizes(spec)
    if problem_with(spec, current) is None:
        # The spec's own count and an operator's are allowed beside `elastic.choices`.
        allowed = tuple(sorted({*allowed, current}))
    sizes = tuple(size for size in allowed if fits(size)) or allowed_sizes(spec)
    sizes = tuple(size for size in sizes if most is None or size <= most) or sizes
    if is_single(spec) or capacity is None:
        # A run of one size needs no answer of the scheduler, so it continues without one.
        return current if current in sizes else sizes[-1], "as before"
    fitting = [size for size in sizes if size <= capacity]
    if fitting:
        return fitting[-1], f"{capacity} are free"
    return sizes[0], f"the smallest allowed, {capacity} are free"


def nearest_fitting(spec: RunSpec, wanted: int, fits: Callable[[int], bool]) -> int:
    """Return `wanted` if the checkpoint fits it, otherwise the nearest allowed count that it does.

    Of two counts at the same distance it is the smaller one. If none fits, it is `wanted`.
    """
    if fits(wanted):
        return wanted
    return min(filter(fits, allowed_sizes(spec)), key=lambda n: abs(n - wanted), default=wanted)


def is_single(spec: RunSpec) -> bool:
    """Return True if the spec has no elastic bounds, so that an operator may give any count."""
    elastic = spec.elastic
    return not (elastic.min_gpus or elastic.max_gpus or elastic.choices or elastic.on_preemption)


def largest_within(spec: RunSpec, most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest allowed count of at most `most` that fits; None if there is none."""
    found = [size for size in allowed_sizes(spec) if size <= most and fits(size)]
    return max(found, default=None)


def _listing(spec: RunSpec) -> str:
    return ", ".join(map(str, allowed_sizes(spec)[:32]))
