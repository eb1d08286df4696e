"""The states of checkpoints and the kinds of edges in the index."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

INTEGER_MAX: Final = 2**63 - 1


class CheckpointState(StrEnum):
    """The state of a checkpoint in the index."""

    COMMITTED = "committed"
    DAMAGED = "damaged"
    DELETED = "deleted"


class EdgeKind(StrEnum):
    """The kind of a lineage edge, which reads `source kind target`."""

    PARENT = "parent"
    RESUMED_FROM = "resumed_from"
    FORKED_FROM = "forked_from"
    ROLLED_BACK = "rolled_back"
    EXPORTED_TO = "exported_to"
    IMPORTED_FROM = "imported_from"
    CONSUMED_BY = "consumed_by"


# A parent is a column of the checkpoint, and a consumer has lines in the journal.
_DERIVED: Final = frozenset({EdgeKind.PARENT, EdgeKind.CONSUMED_BY})
STORED_EDGES: Final = tuple(kind for kind in EdgeKind if kind not in _DERIVED)
