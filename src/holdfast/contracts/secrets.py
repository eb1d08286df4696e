"""References to secrets in a spec's environment, and the values that they stand for.

A reference never contains the value, so specs, requests, rows, parameters and journals may hold it.
The agent reads a file's value on its node. Values that the submitter resolves (`from_env`,
`prefect_secret`) wait in one private file of the run, which only the run's user can read.
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

from holdfast.contracts.bounds import TEXT_CHARACTERS_MAX
from holdfast.contracts.durable import write_bytes
from holdfast.contracts.errors import ForeignFileError, SecretError
from holdfast.contracts.file_locks import wait_for_lock
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.reading import (
    LOCK_FLAGS,
    held_folder,
    is_mine,
    open_beneath,
    open_regular,
)
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
    """Where a variable's value is found: `kind` is one of `KINDS`, `source` a path or a name."""

    kind: str
    source: str

    def __str__(self) -> str:
        return f'{{{self.kind} = "{self.source}"}}'

    def to_json(self) -> dict[str, str]:
        """The table as it stands in a spec."""
        return {self.kind: self.source}


def parse_value(given: Any) -> str | SecretReference:
    """A variable's value in a spec: a string, or a reference. The error never has the value.

    Raises `ValueError`.
    """
    if isinstance(given, str | SecretReference):
        if isinstance(given, str) and len(given) > TEXT_CHARACTERS_MAX:
            raise ValueError(f"given {len(given)} characters; expected {TEXT_CHARACTERS_MAX}")
        return given
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise ValueError(f"given a value of type {kind}; expected a string, in quotes, or {FORMS}")
    if len(given) != 1:
        keys = ", ".join(map(str, given)) or "none"
        raise ValueError(f"given a table with the keys {keys}; expected exactly one: {FORMS}")
    ((kind, source),) = given.items()
    if kind not in KINDS:
        raise ValueError(f"given a table with the unknown key {kind!s:.80}; expected {FORMS}")
    pattern, expected = _SOURCES[kind]
    if not isinstance(source, str) or not pattern.fullmatch(source):
        # Whatever stands here may be the secret itself.
        raise ValueError(f"{kind} is not {expected}; expected {FORMS}")
    return SecretReference(kind, source)


def _to_json(value: str | SecretReference) -> str | dict[str, str]:
    return value if isinstance(value, str) else value.to_json()


EnvironmentValue = Annotated[
    str | SecretReference, PlainValidator(parse_value), PlainSerializer(_to_json)
]


def references_in(environment: Mapping[str, str | SecretReference]) -> dict[str, SecretReference]:
    """The variables whose values are references."""
    return {name: one for name, one in environment.items() if isinstance(one, SecretReference)}


def plain_part(environment: Mapping[str, str | SecretReference]) -> dict[str, str]:
    """The variables whose values stand in the spec itself."""
    return {name: one for name, one in environment.items() if isinstance(one, str)}


def check_value(value: str) -> str:
    """`value` if a variable can have it. Raises `SecretError`, which does not have it."""
    if not value:
        raise SecretError("is empty; expected the secret's value")
    if "\0" in value:
        raise SecretError("contains a NUL byte, which no environment variable can hold")
    size = len(os.fsencode(value))
    if size > VALUE_BYTES_MAX:
        raise SecretError(f"has {size} bytes; expected at most {VALUE_BYTES_MAX}")
    return value


def read_secret_file(source: str) -> str:
    """The value in a private file, without its trailing newline.

    Links are followed. Raises `SecretError` unless it is a regular file that belongs to this user
    or root and that nobody else may read.
    """
    try:
        path = Path(source).expanduser().resolve()
        handle = open_regular(path)
    except ForeignFileError as error:
        raise SecretError(f"{error.problem}; expected a regular file") from error
    except (OSError, RuntimeError, ValueError) as error:
        words = getattr(error, "strerror", None) or type(error).__name__
        raise SecretError(f"cannot be read here ({words})") from error
    with open(handle, "rb") as stream:
        _check_private(os.fstat(handle))
        content = stream.read(VALUE_BYTES_MAX + 3)
    value = os.fsdecode(content)
    return check_value(value.removesuffix("\n").removesuffix("\r"))


def _check_private(status: os.stat_result) -> None:
    """Raise `SecretError` for a file that is another user's, or that others may use."""
    if status.st_uid not in {os.geteuid(), 0}:
        raise SecretError(f"belongs to user {status.st_uid}; expected a file of your own")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SecretError(f"has mode {mode:04o}, so others can use it; run `chmod 600` on it")


def resolve_environment(
    environment: Mapping[str, str | SecretReference], paths: RunPaths
) -> dict[str, str]:
    """The environment with the value of every reference, read on this machine now.

    Raises `SecretError` that names every variable and reference without a value.
    """
    values, problems = resolve(references_in(environment), paths)
    if problems:
        raise SecretError("; ".join(problems))
    return {**plain_part(environment), **values}


def resolve(
    references: Mapping[str, SecretReference], paths: RunPaths
) -> tuple[dict[str, str], list[str]]:
    """The values that can be read here, and a line for each variable that has none."""
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
                    "was not recorded for this run; submit or relaunch it from a shell where it "
                    "has a value"
                )
            values[name] = check_value(recorded[name])
        except SecretError as error:
            problems.append(describe(name, reference, error))
    return values, problems


def describe(name: str, reference: SecretReference, error: object) -> str:
    """One line about a reference that has no value; in words that no redaction hides."""
    return f"environment.{name} ({reference}): {error}"


def read_record(paths: RunPaths, references: Mapping[str, SecretReference]) -> dict[str, str]:
    """The recorded values of `references`, by variable; empty when nothing was recorded.

    Raises `SecretError` for a file that is not this user's private one.
    """
    try:
        handle = open_regular(paths.secrets, below=paths.directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ForeignFileError) as error:
        raise SecretError(f"the recorded values cannot be read: {error}; remove it") from error
    with open(handle, "rb") as stream:
        try:
            _check_private(os.fstat(handle))
        except SecretError as error:
            raise SecretError(f"{paths.secrets} {error}") from error
        content = stream.read(RECORD_BYTES_MAX + 1)
    try:
        found = {
            name: entry["value"]
            for name, entry in json.loads(content)["values"].items()
            if name in references and entry["reference"] == references[name].to_json()
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        # The error of the parser may quote the content.
        raise SecretError(
            f"{paths.secrets} is damaged; delete it, and relaunch the run from a shell where the "
            "variables are set"
        ) from None
    return {name: value for name, value in found.items() if isinstance(value, str)}


def write_record(
    paths: RunPaths, references: Mapping[str, SecretReference], values: Mapping[str, str]
) -> None:
    """Replace the run's recorded values, durably, in a file that only this user can read."""
    with contextlib.suppress(FileExistsError):
        paths.private.mkdir(mode=0o700)
    with held_folder(paths.private, below=paths.directory) as folder:
        status = os.stat(folder)
        if status.st_uid != os.geteuid():
            raise SecretError(f"{paths.private} belongs to user {status.st_uid}; remove it")
        os.chmod(folder, 0o700)
        entries = {
            name: {"reference": references[name].to_json(), "value": value}
            for name, value in values.items()
        }
        content = json.dumps({"format": 1, "values": entries}).encode("ascii")
        write_bytes(folder / paths.secrets.name, content, mode=0o600)


def forget_record(paths: RunPaths, is_over: Callable[[], bool]) -> None:
    """Delete the recorded values of a run for which `is_over()` is true.

    It is asked while no operator can ask for anything, so that the values that a relaunch records
    are not deleted. A file system that refuses is asked again by whoever looks at the run next.
    """
    if not os.path.lexists(paths.private) or not is_mine(paths.directory.resolve()):
        return
    with contextlib.suppress(OSError, ForeignFileError):
        handle = open_beneath(paths.operator_lock, LOCK_FLAGS, below=paths.directory)
        try:
            if wait_for_lock(handle, LOCK_S) and is_over():
                _empty(paths)
        finally:
            os.close(handle)


def _empty(paths: RunPaths) -> None:
    with held_folder(paths.private, below=paths.directory) as folder:
        for name in os.listdir(folder):
            # A crash may have left a temporary name beside the file.
            if name.lstrip(".").startswith(paths.secrets.name):
                (folder / name).unlink(missing_ok=True)
    paths.private.rmdir()


def known_secrets(spec: Mapping[str, Any], paths: RunPaths) -> tuple[str, ...]:
    """The values to mask in a run's output: those in its spec, and those it refers to.

    Of the latter, those that can be read here; longest first, none shorter than
    `SECRET_CHARACTERS_MIN`.
    """
    return longest_first({*secrets_of(spec), *referred_secrets(spec, paths)})


def longest_first(values: Iterable[str]) -> tuple[str, ...]:
    """The values that are long enough to be told from other text."""
    kept = {value for value in values if len(value) >= SECRET_CHARACTERS_MIN}
    return tuple(sorted(kept, key=len, reverse=True))


def hide(text: str, values: Iterable[str]) -> str:
    """`text` with every one of `values` hidden."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return text


def referred_secrets(spec: Mapping[str, Any], paths: RunPaths) -> list[str]:
    """The values of a run's references that can be read here.

    None for another user's run, whose references would name files and variables of the reader.
    """
    environment = spec.get("environment")
    references: dict[str, SecretReference] = {}
    for name, given in environment.items() if isinstance(environment, Mapping) else ():
        with contextlib.suppress(ValueError):
            value = parse_value(given)
            if isinstance(value, SecretReference):
                references[str(name)] = value
    try:
        if not references or not (is_mine(paths.directory.resolve()) and is_mine(paths.spec)):
            return []
    except OSError:
        return []
    values, _ = resolve(references, paths)
    here = (os.environ.get(r.source, "") for r in references.values() if r.kind == FROM_ENV)
    return [*values.values(), *here]
