"""What the rows of a run's checkpoints add up to, for the rows of the run and of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.lineage.database.states import INTEGER_MAX, CheckpointState
from holdfast.lineage.ingest.disk import Row

# The columns of a run that count its checkpoints in each state.
STORAGE: Final = {
    "kept": CheckpointState.COMMITTED,
    "damaged": CheckpointState.DAMAGED,
    "deleted": CheckpointState.DELETED,
}
# The columns of a checkpoint from which totals are made.
COLUMNS: Final = (
    *("state", "rolled_back", "bytes", "step", "attempt", "checksum", "committed_at", "deleted_at"),
)
# The attempt number under which the newest checkpoints of the whole run are.
_RUN: Final = -1


@dataclass
class CheckpointTotals:
    """The totals of some checkpoints.

    `newest` has the largest values: the step and the time on the branch that the run can resume
    from, the time of any checkpoint, and for each attempt the step with a valid manifest. If a
    checkpoint with such a value is taken away, the totals must be made again (`is_stale`).
    """

    count: Counter[str] = field(default_factory=Counter)
    size: Counter[str] = field(default_factory=Counter)
    newest: dict[tuple[str, int], float] = field(default_factory=dict)
    is_stale: bool = False

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> CheckpointTotals:
        found = cls()
        for row in rows:
            found.add(row)
        return found

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one more checkpoint."""
        self.count[row["state"]] += 1
        self.size[row["state"]] += row["bytes"] or 0
        # Maxima and not a list: the memory must not grow with the number of checkpoints, see
        # decision 86.
        for key, value in _values(row):
            self.newest[key] = max(value, self.newest.get(key, value))

    def replace(self, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
        """Count the row `new` of a checkpoint in the place of `old`."""
        if old is not None:
            self.count[old["state"]] -= 1
            self.size[old["state"]] -= old["bytes"] or 0
            again = dict(_values(new)) if new is not None else {}
            for key, value in _values(old):
                is_less = key not in again or again[key] < value
                # A maximum cannot be taken back. If its checkpoint goes, one query finds the next
                # one, see decision 86.
                self.is_stale |= is_less and value == self.newest.get(key)
        if new is not None:
            self.add(new)

    def count_again(self, run: Mapping[str, Any]) -> None:
        """Take the number and the bytes of checkpoints from a row of the run."""
        for name, state in STORAGE.items():
            self.count[state], self.size[state] = run[name], run[f"{name}_bytes"]

    def copy(self) -> CheckpointTotals:
        return CheckpointTotals(Counter(self.count), Counter(self.size), dict(self.newest))

    @property
    def branch_step(self) -> int | None:
        """The newest committed step on the run's branch."""
        return self._step("branch_step", _RUN)

    @property
    def branch_at(self) -> float | None:
        """When the newest checkpoint on the run's branch was committed."""
        return self.newest.get(("branch_at", _RUN))

    @property
    def newest_at(self) -> float | None:
        """The newest time at which a checkpoint was committed or deleted."""
        return self.newest.get(("newest_at", _RUN))

    @property
    def verified_step(self) -> int | None:
        """The newest step of a checkpoint that had a valid manifest."""
        return self._step("verified", _RUN)

    def committed_step(self, attempt: int) -> int | None:
        """Return the newest step that an attempt committed with a valid manifest."""
        return self._step("verified", attempt)

    def _step(self, name: str, attempt: int) -> int | None:
        found = self.newest.get((name, attempt))
        return None if found is None else int(found)

    def storage(self) -> Row:
        """Return the number and the bytes of checkpoints in each state."""
        columns: Row = {}
        for name, state in STORAGE.items():
            # A sum of hostile sizes could exceed the column.
            size = min(self.size[state], INTEGER_MAX)
            columns |= {name: self.count[state], f"{name}_bytes": size}
        return columns


def _values(row: Mapping[str, Any]) -> Iterable[tuple[tuple[str, int], float]]:
    """Yield the values of a checkpoint of which the largest counts."""
    if row["state"] == CheckpointState.COMMITTED and not row["rolled_back"]:
        yield ("branch_step", _RUN), row["step"]
        if row["committed_at"]:
            yield ("branch_at", _RUN), row["committed_at"]
    if row["checksum"]:
        yield ("verified", _RUN), row["step"]
        yield ("verified", row["attempt"]), row["step"]
    times = (row["committed_at"], row["deleted_at"])
    # A manifest may have any time. One in the far future would stay the newest for ever.
    plausible = [time for time in times if time is not None and 0 <= time <= TIME_MAX]
    if plausible:
        yield ("newest_at", _RUN), max(plausible)
