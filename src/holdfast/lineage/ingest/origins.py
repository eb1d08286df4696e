"""Resolves the checkpoint ids in a run's folder to runs and directory names. Pure."""

from __future__ import annotations

from collections.abc import Container

from holdfast.contracts.disk.paths import CheckpointName, checkpoint_id
from holdfast.contracts.records.attempt import RunRecord


class Origins:
    """Resolves checkpoint ids to runs. An id contains a folder name, which may not be unique."""

    def __init__(self, record: RunRecord, own: Container[str]) -> None:
        """`own` has the directory names of the checkpoints in the run's folder."""
        self._record = record
        self._own = own

    def name(self, identity: object) -> str | None:
        """Return `identity` as `run:directory`; a bare directory name belongs to this run."""
        if not isinstance(identity, str) or not identity:
            return None
        return identity if ":" in identity else checkpoint_id(self._record.run, identity)

    def find(self, identity: str | None) -> tuple[str | None, str | None, str | None]:
        """Return (uid, run, directory name) of an id; the uid is None if the run is unknown."""
        if not identity:
            return None, None, None
        run, _, name = identity.rpartition(":")
        is_origin = identity == self._record.forked_from
        if run in {"", self._record.run} and not (is_origin and name not in self._own):
            return self._record.uid, self._record.run, name
        # Only the fork knows the uid of its origin. A run of that name may be another one.
        return (self._record.forked_uid if is_origin else None), run, name

    def parent(self, child: CheckpointName, identity: object) -> tuple[str, CheckpointName] | None:
        """Return (uid, name) of a manifest's parent, or None if it cannot be one of `child`.

        A parent must have a smaller step, or the same step in an earlier attempt or launch or in
        another run. Any other parent could form a cycle.
        """
        uid, _, name = self.find(self.name(identity))
        parent = CheckpointName.parse(name or "")
        # Any user can write any parent into a manifest.
        if uid is None or parent is None or parent.step > child.step:
            return None
        is_own = uid == self._record.uid
        if parent.step == child.step and is_own:
            older, newer = str(parent), str(child)
            if (len(older), older) >= (len(newer), newer):
                return None
        return uid, parent


def bare(identity: object) -> str:
    """Return the directory name of a checkpoint id or of a bare directory name."""
    return str(identity or "").rpartition(":")[2]
