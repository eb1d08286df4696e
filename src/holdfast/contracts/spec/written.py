"""Which keys of a run spec somebody wrote, and where. All other keys have their defaults.

The names are dotted, such as `checkpoint.keep.last`. Some values can be given by the program too.
The program's value counts where nobody wrote the key, so a default must never be passed on as if
it had been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from holdfast.contracts import environment
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.spec.part import SpecPart

# Where a value comes from.
SPEC: Final = "spec"
SET: Final = "--set"
BLOCK: Final = "block"
ENVIRONMENT: Final = "environment"
PROGRAM: Final = "program"
DEFAULT: Final = "default"
# Nobody wrote the key, and the program has not started yet.
PROGRAM_OR_DEFAULT: Final = "program or default"
# The keys that the program can give too, and the variables that pass them on.
INTERVAL: Final = "checkpoint.interval"
SNAPSHOTS: Final = "checkpoint.snapshots"
OVERLAP: Final = "checkpoint.overlap"
STAGING: Final = "checkpoint.staging"
OF_PROGRAM: Final[Mapping[str, str]] = {
    INTERVAL: environment.CHECKPOINT_INTERVAL,
    SNAPSHOTS: environment.CHECKPOINT_SNAPSHOTS,
    OVERLAP: environment.CHECKPOINT_OVERLAP,
    STAGING: environment.CHECKPOINT_STAGING,
}


def forget_defaults(part: SpecPart, given: Mapping[str, Any] | None) -> None:
    """Mark only the keys in `given` as written, in a part that was read from a document.

    A document has every key, with its default. `given` is None if the document does not say what
    was written. Then a key with its default counts as not written.
    """
    written = part.model_fields_set
    written.intersection_update(_changed(part) if given is None else given)
    for name in written:
        value = getattr(part, name)
        if isinstance(value, SpecPart):
            below = None if given is None else given[name]
            forget_defaults(value, below if isinstance(below, Mapping) else None)


def _changed(part: SpecPart) -> set[str]:
    fields = type(part).model_fields.items()
    return {
        name
        for name, field in fields
        if getattr(part, name) != field.get_default(call_default_factory=True)
    }


def keys_of(part: SpecPart, *, written: bool, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys with their values: all of them, or only the written ones."""
    for name, value in part:
        if written and name not in part.model_fields_set:
            continue
        if isinstance(value, SpecPart):
            yield from keys_of(value, written=written, where=f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def source_of(key: str, origins: Mapping[str, str]) -> str:
    """Return where a written key comes from. `origins` names what is not from the spec itself.

    An origin may name a table above the key, or a value inside it.
    """
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    above = next((origins[name] for name in names if name in origins), None)
    inside = next((origin for name, origin in origins.items() if name.startswith(f"{key}.")), None)
    return above or inside or SPEC


def settings_of(spec: SpecPart, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the `value` of each key of `spec`, as in JSON, and its `source`."""
    document, found = spec.model_dump(mode="json"), {}
    for key, _ in keys_of(spec, written=False):
        value: Any = document
        for name in key.split("."):
            value = value[name]
        unwritten = PROGRAM_OR_DEFAULT if key in OF_PROGRAM else DEFAULT
        found[key] = {"value": value, "source": sources.get(key, unwritten)}
    return found


def settings_in(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return what rank 0 reported last about the keys that the program can give too."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        told = event.data.get("settings")
        if event.kind is not EventKind.NOTE or not isinstance(told, dict):
            continue
        for key in OF_PROGRAM:
            one = told.get(key)
            if isinstance(one, dict) and {"value", "source"} <= set(one):
                found[key] = {"value": one["value"], "source": str(one["source"])}
    return found
