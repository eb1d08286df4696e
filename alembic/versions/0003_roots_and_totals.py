"""Adds root UUIDs, totals of each run for sorting, and the compatibility table.

All new columns have defaults. So programs of revision 0003 and later can read and write newer
schemas as long as `compatibility.oldest` permits it. A migration that breaks older programs must
raise that value. Every run is read again at its next ingest.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COUNTS = (
    *("attempts", "kept", "kept_bytes", "damaged", "damaged_bytes"),
    *("deleted", "deleted_bytes"),
)
TEXT = sa.Text()
NUMBER = sa.BigInteger()
DOCUMENT: sa.types.TypeEngine[Any] = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Upgrade the schema from the previous revision."""
    _add(TEXT, "root_id", "")
    _add(DOCUMENT, "unknown_kinds", "[]")
    for name in COUNTS:
        _add(NUMBER, name, "0")
    op.add_column("runs", sa.Column("world_size", NUMBER))
    op.execute("UPDATE runs SET fingerprint = ''")
    op.create_table(
        "compatibility",
        sa.Column("oldest", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("oldest", name=op.f("pk_compatibility")),
    )
    op.execute(f"INSERT INTO compatibility (oldest) VALUES ('{revision}')")


def downgrade() -> None:
    """Revert `upgrade`."""
    op.drop_table("compatibility")
    for name in ("world_size", *reversed(COUNTS), "unknown_kinds", "root_id"):
        op.drop_column("runs", name)
    op.execute("UPDATE runs SET fingerprint = ''")


def _add(kind: sa.types.TypeEngine[Any], name: str, default: str) -> None:
    """Add a column with a default, which rows written by older programs get."""
    op.add_column("runs", sa.Column(name, kind, nullable=False, server_default=default))
