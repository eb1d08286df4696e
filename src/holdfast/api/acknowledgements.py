"""Who acknowledged what needs attention, and when.

A run's journal has the acknowledgements of its problems. A problem of a root belongs to no run, so
this server keeps its acknowledgement in a file beside its tokens, until the problem is solved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.api.problems import LOG
from holdfast.api.schemas import Acknowledged
from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.journal import Event
from holdfast.lineage.queries.views import iso_time

FILE: Final = "acknowledged.json"


class _Document(BaseModel):
    """The file: the acknowledgements by the id of the problem."""

    model_config = ConfigDict(extra="ignore")

    roots: dict[str, Acknowledged] = {}


def acknowledged_in(events: Iterable[Event]) -> dict[str, Acknowledged]:
    """Return the acknowledgements in a journal by the problem's id; the first one counts."""
    found: dict[str, Acknowledged] = {}
    for event in events:
        texts = (event.data.get(key) for key in ("by", "note"))
        by, note = (one if isinstance(one, str) else "" for one in texts)
        done = Acknowledged(by=by, at=iso_time(event.time), note=note)
        found.setdefault(str(event.data.get("alert")), done)
    return found


class RootAcknowledgements:
    """The acknowledgements of the roots' problems. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._found = self._read()

    def get(self, identity: str) -> Acknowledged | None:
        return self._found.get(identity)

    def add(self, identity: str, done: Acknowledged) -> Acknowledged:
        """Record an acknowledgement and return the one that counts, which is the first."""
        with self._lock:
            if identity not in self._found:
                self._write({**self._found, identity: done})
            return self._found[identity]

    def keep(self, identities: Iterable[str]) -> None:
        """Forget the acknowledgements of all other problems, because they are solved."""
        with self._lock:
            kept = {name: self._found[name] for name in identities if name in self._found}
            if kept == self._found:
                return
            try:
                self._write(kept)
            except OSError as error:
                # The next look tries it again.
                LOG.warning("%s: cannot be written: %s", self._path, error)

    def _read(self) -> dict[str, Acknowledged]:
        try:
            return dict(_Document.model_validate_json(self._path.read_bytes()).roots)
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            LOG.warning("%s: cannot be read, so it counts as empty: %s", self._path, error)
            return {}

    def _write(self, found: dict[str, Acknowledged]) -> None:
        make_directory(self._path.parent)
        content = to_json(_Document(roots=found).model_dump(mode="json"))
        write_bytes(self._path, content, mode=0o600)
        self._found = found
