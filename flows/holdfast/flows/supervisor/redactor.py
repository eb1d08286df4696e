"""Redaction of a run's secrets in the supervisor's logs, messages and errors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.redaction import redact, redact_text, secrets_of
from holdfast.contracts.spec.secrets import longest_first, referred_secrets

Log = logging.Logger | logging.LoggerAdapter[Any]


class Redactor:
    """Hides one run's secrets in texts, log lines and errors.

    It keeps all values that it has seen, because the recorded values are deleted when the run ends.
    """

    def __init__(self) -> None:
        self._values: tuple[str, ...] = ()

    def learn(self, spec: Mapping[str, Any], paths: RunPaths | None = None) -> None:
        """Add the values in `spec`, and its references that can be read for `paths`."""
        referred = referred_secrets(spec, paths) if paths else ()
        self._values = longest_first({*self._values, *secrets_of(spec), *referred})

    def text(self, text: str) -> str:
        return redact_text(text, self._values)

    def facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = redact(dict(facts), self._values)
        return found

    def log(self, log: Log) -> RedactedLog:
        return RedactedLog(log, self)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Hide the secrets in errors that leave the block, and in their causes."""
        try:
            yield
        except Exception as error:
            links = list(_links(error))
            for link in links:
                self._hide_in(link)
            if any(map(self._shows, links)):
                # The error's text does not come from its arguments.
                raise _replacement(error, self.text(str(error))) from None
            raise

    def _shows(self, error: BaseException) -> bool:
        return self.text(str(error)) != str(error)

    def _hide_in(self, error: BaseException) -> None:
        if not self._shows(error) and not hasattr(error, "__notes__"):
            return
        error.args = tuple(redact(list(error.args), self._values))
        if hasattr(error, "__notes__"):
            error.__notes__ = [self.text(note) for note in error.__notes__]


class RedactedLog(logging.LoggerAdapter[Any]):
    """A log that hides a run's secrets in each line."""

    def __init__(self, log: Log, redactor: Redactor) -> None:
        super().__init__(log, {})
        self._redactor = redactor

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            line = str(msg) % args if args else str(msg)
            self.logger.log(level, "%s", self._redactor.text(line), **kwargs)


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the members of groups, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _replacement(error: Exception, text: str) -> Exception:
    """Return an error with this text, of the same type if that is one of Holdfast's."""
    if isinstance(error, HoldfastError):
        with contextlib.suppress(TypeError):
            return type(error)(text)
    return HoldfastError(f"{type(error).__name__}: {text}")
