"""References to secrets in a spec's environment, and their values.

A reference never contains the value. Specs, requests, database rows, parameters and journals may
therefore contain it. The agent reads `from_file` values on its node. The submitting process
resolves `from_env` and `prefect_secret` and records the values in one private file of the run. Only
the run's user can read that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import PlainSerializer, PlainValidator

from holdfast.contracts.disk import durable, file_locks, reading
from holdfast.contracts.disk.bounds import TEXT_CHARACTERS_MAX
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ForeignFileError, SecretError
from holdfast.contracts.redaction import HIDDEN, SECRET_CHARACTERS_MIN, secrets_of

FROM_FILE: Final = "from_file"
FROM_ENV: Final = "from_env"
PREFECT_SECRET: Final = "prefect_secret"
KINDS: Final = (FROM_FILE, FROM_ENV, PREFECT_SECRET)
FORMS: Final = '{from_file = "/path"}, {from_env = "NAME"} or {prefect_secret = "block-name"}'
VALUE_BYTES_MAX: Final = 64 * 1024
RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
LOCK_S: Final = 1.0
_SOURCES: Final = {
    FROM_FILE: (re.compile(r"(?:/|~/)[^\x00-\x1f\x7f]{1,4095}"), "an absolute path, or ~/…"),
    FROM_ENV: (re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}"), "the name of a variable"),
    PREFECT_SECRET: (re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}"), "the name of a block"),
}


@dataclass(frozen=True)
class SecretReference:
    """The source of a variable's value. `kind` is one of `KINDS`, `source` is a path or a name."""

    kind: str
    source: str

    def __str__(self) -> str:
        return f'{{{self.kind} = "{self.source}"}}'

    def to_json(self) -> dict[str, str]:
        """Return the reference as a table of a spec."""
        return {self.kind: self.source}


def parse_value(given: Any) -> str | SecretReference:
    """Return a variable's value in a spec: a string or a reference.

    Raises `ValueError`, with a message that never contains the value.
    """
    if isinstance(given, str) and len(given) > TEXT_CHARACTERS_MAX:
        raise ValueError(f"given {len(given)} characters; expected at most {TEXT_CHARACTERS_MAX}")
    if isinstance(given, str | SecretReference):
        return given
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise ValueError(f"given a value of type {kind}; expected a quoted string, or {FORMS}")
    if len(given) != 1:
        keys = ", ".join(map(str, given)) or "none"
        raise ValueError(f"given a table with the keys {keys}; expected exactly one: {FORMS}")
    ((kind, source),) = given.items()
    if kind not in KINDS:
        raise ValueError(f"given a table with the unknown key {kind!s:.80}; expected {FORMS}")
    pattern, expected = _SOURCES[kind]
    if not isinstance(source, str) or not pattern.fullmatch(source):
        # The message leaves the value out, because it may be the secret itself.
        raise ValueError(f"{kind} is not {expected}; expected {FORMS}")
    return SecretReference(kind, source)


def parse_reference(given: Any) -> SecretReference:
    """Return a reference. Raises `ValueError`, with a message that never contains the value."""
    if isinstance(given, str):
        raise ValueError(f"given a string; expected a reference to a secret: {FORMS}")
    found = parse_value(given)
    assert isinstance(found, SecretReference)
    return found


def _to_json(value: str | SecretReference) -> str | dict[str, str]:
    return value if isinstance(value, str) else value.to_json()


EnvironmentValue = Annotated[
    str | SecretReference, PlainValidator(parse_value), PlainSerializer(_to_json)
]

OnlyReference = Annotated[
    SecretReference, PlainValidator(parse_reference), PlainSerializer(_to_json)
]


def references_in(environment: Mapping[str, str | SecretReference]) -> dict[str, SecretReference]:
    """Return the variables whose values are references."""
    return {name: one for name, one in environment.items() if isinstance(one, SecretReference)}


def plain_part(environment: Mapping[str, str | SecretReference]) -> dict[str, str]:
    """Return the variables whose values are in the spec itself."""
    return {name: one for name, one in environment.items() if isinstance(one, str)}


def check_value(value: str) -> str:
    """Return `value` if it is valid for an environment variable.

    Raises `SecretError`, with a message that does not contain the value.
    """
    if not value:
        raise SecretError("is empty; expected the secret's value")
    if "\0" in value:
        raise SecretError("contains a NUL byte, which an environment variable cannot contain")
    size = len(os.fsencode(value))
    if size > VALUE_BYTES_MAX:
        raise SecretError(f"has {size} bytes; expected at most {VALUE_BYTES_MAX}")
    return value


def read_secret_file(source: str) -> str:
    """Return the value in a private file, without its trailing newline.

    Symbolic links are followed. Raises `SecretError` unless the file is a regular file that belongs
    to this user or root and gives others no permissions.
    """
    try:
        path = Path(source).expanduser().resolve()
        handle = reading.open_regular(path)
    except ForeignFileError as error:
        raise SecretError(f"{error.problem}; expected a regular file") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise SecretError(f"cannot be read here ({reason})") from error
    with open(handle, "rb") as stream:
        _check_private(os.fstat(handle))
        content = stream.read(VALUE_BYTES_MAX + 3)
    value = os.fsdecode(content)
    return check_value(value.removesuffix("\n").removesuffix("\r"))


def _check_private(status: os.stat_result) -> None:
    """Raise `SecretError` if a file belongs to another user, or gives others permissions."""
    if status.st_uid not in {os.geteuid(), 0}:
        raise SecretError(f"belongs to user {status.st_uid}; expected a file of your own")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SecretError(f"has mode {mode:04o}, so others can access it; run `chmod 600` on it")


def resolve_environment(
    environment: Mapping[str, str | SecretReference], paths: RunPaths
) -> dict[str, str]:
    """Return the environment with the value of every reference, as read on this machine now.

    Raises `SecretError` with the name of every variable and reference that has no value.
    """
    values, problems = resolve(references_in(environment), paths)
    if problems:
        raise SecretError("; ".join(problems))
    return {**plain_part(environment), **values}


def resolve(
    references: Mapping[str, SecretReference], paths: RunPaths
) -> tuple[dict[str, str], list[str]]:
    """Return the values that can be read here, and a line for each variable without a value."""
    values: dict[str, str] = {}
    problems: list[str] = []
    recorded: Mapping[str, str] | None = None
    for name, reference in references.items():
        try:
            if reference.kind == FROM_FILE:
                values[name] = read_secret_file(reference.source)
                continue
            recorded = read_record(paths, references) if recorded is None else recorded
            if name not in recorded:
                raise SecretError(
                    "was not recorded for this run; submit or relaunch the run from a shell where "
                    "the variable has a value"
                )
            values[name] = check_value(recorded[name])
        except SecretError as error:
            problems.append(describe(name, reference, error))
    return values, problems


def describe(name: str, reference: SecretReference, error: object) -> str:
    """Return one line about a reference without a value, in a form that redaction does not hide."""
    place = name if "." in name else f"environment.{name}"
    return f"{place} ({reference}): {error}"


def read_record(paths: RunPaths, references: Mapping[str, SecretReference]) -> dict[str, str]:
    """Return the recorded values of `references` by variable; empty if none were recorded.

    Raises `SecretError` if the file is damaged or is not private to this user.
    """
    try:
        handle = reading.open_regular(paths.secrets, below=paths.directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ForeignFileError) as error:
        raise SecretError(f"the recorded values cannot be read: {error}; delete them") from error
    with open(handle, "rb") as stream:
        try:
            _check_private(os.fstat(handle))
        except SecretError as error:
            raise SecretError(f"{paths.secrets} {error}") from error
        return _values_in(stream.read(RECORD_BYTES_MAX + 1), paths, references)


def _values_in(
    content: bytes, paths: RunPaths, references: Mapping[str, SecretReference]
) -> dict[str, str]:
    try:
        found = {
            name: entry["value"]
            for name, entry in json.loads(content)["values"].items()
            if name in references and entry["reference"] == references[name].to_json()
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        # The parser's error is not chained, because it may quote the content.
        raise SecretError(
            f"{paths.secrets} is damaged; delete it, and relaunch the run from a shell where the "
            "variables are set"
        ) from None
    return {name: value for name, value in found.items() if isinstance(value, str)}


def write_record(
    paths: RunPaths, references: Mapping[str, SecretReference], values: Mapping[str, str]
) -> None:
    """Replace the run's recorded values durably, in a file that only this user can read."""
    with contextlib.suppress(FileExistsError):
        paths.private.mkdir(mode=0o700)
    with reading.held_folder(paths.private, below=paths.directory) as folder:
        status = os.stat(folder)
        if status.st_uid != os.geteuid():
            raise SecretError(f"{paths.private} belongs to user {status.st_uid}; delete it")
        os.chmod(folder, 0o700)
        entries = {
            name: {"reference": references[name].to_json(), "value": value}
            for name, value in values.items()
        }
        content = json.dumps({"format": 1, "values": entries}).encode("ascii")
        durable.write_bytes(folder / paths.secrets.name, content, mode=0o600)


def forget_record(paths: RunPaths, is_over: Callable[[], bool]) -> None:
    """Delete the recorded values of a run if `is_over()` is true.

    `is_over()` is called while the lock of the orders is held, so that values that a relaunch
    records at the same time are not deleted. If the file system refuses, the next process that
    reads the run tries again.
    """
    with contextlib.suppress(OSError, ForeignFileError):
        if not os.path.lexists(paths.private) or not paths.is_mine():
            return
        with file_locks.locked(paths.orders_lock, LOCK_S) as is_locked:
            if is_locked and is_over():
                _empty(paths)


def _empty(paths: RunPaths) -> None:
    with reading.held_folder(paths.private, below=paths.directory) as folder:
        for name in os.listdir(folder):
            # A crash may have left a temporary file beside the record.
            if name.lstrip(".").startswith(paths.secrets.name):
                (folder / name).unlink(missing_ok=True)
    paths.private.rmdir()


def known_secrets(spec: Mapping[str, Any], paths: RunPaths) -> tuple[str, ...]:
    """Return the values to mask in a run's output, longest first.

    These are the secrets in the spec, and the referenced secrets that can be read here. Values
    shorter than `SECRET_CHARACTERS_MIN` are left out.
    """
    return longest_first({*secrets_of(spec), *referred_secrets(spec, paths)})


def longest_first(values: Iterable[str]) -> tuple[str, ...]:
    """Return the values that are long enough to differ from other text, longest first."""
    kept = {value for value in values if len(value) >= SECRET_CHARACTERS_MIN}
    return tuple(sorted(kept, key=len, reverse=True))


def hide(text: str, values: Iterable[str]) -> str:
    """Return `text` with each of `values` hidden."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return text


def place_of_target(name: str) -> str:
    """Return the name under which the address of an alert's target is recorded."""
    return f"alerts.targets.{name}"


def _recorded_references(spec: Mapping[str, Any]) -> dict[str, SecretReference]:
    """Return the references in a recorded spec, which may have other values in their places."""
    alerts = spec.get("alerts")
    targets = alerts.get("targets") if isinstance(alerts, Mapping) else None
    found: dict[str, SecretReference] = {}
    for given, place in ((spec.get("environment"), str), (targets, place_of_target)):
        for name, value in given.items() if isinstance(given, Mapping) else ():
            with contextlib.suppress(ValueError):
                reference = parse_value(value)
                if isinstance(reference, SecretReference):
                    found[place(str(name))] = reference
    return found


def referred_secrets(spec: Mapping[str, Any], paths: RunPaths) -> list[str]:
    """Return the values of a run's references that can be read here.

    Returns none for another user's run, which could name this user's files and variables.
    """
    references = _recorded_references(spec)
    try:
        if not references or not paths.is_mine():
            return []
    except OSError:
        return []
    values, _ = resolve(references, paths)
    here = (os.environ.get(r.source, "") for r in references.values() if r.kind == FROM_ENV)
    return [*values.values(), *here]


def unknown_secrets(spec: Mapping[str, Any], paths: RunPaths) -> list[str]:
    """Return a line for each reference of a run whose value cannot be read here.

    Redaction cannot find these values, unless they look like secrets.
    """
    references = _recorded_references(spec)
    is_mine = False
    with contextlib.suppress(OSError):
        is_mine = paths.is_mine()
    if is_mine:
        # The value of the variable in this shell is masked, too.
        unset = {
            name: one
            for name, one in references.items()
            if one.kind != FROM_ENV or one.source not in os.environ
        }
        return resolve(unset, paths)[1]
    other = "the run belongs to another account, so its secrets are not read"
    return [describe(name, one, other) for name, one in references.items()]
