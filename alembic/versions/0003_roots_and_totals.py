"""Roots by their UUID, totals of each run for sorting, and which older programs may still work.

All of it is added with defaults, so that programs of revision 0003 and later can read and write
newer schemas for as long as `compatibility.oldest` allows it. A migration that older programs
cannot live with raises that value. Every run is read once more at its next ingest.
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
    """Bring the schema from the revision before to this one."""
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
    """Take back what `upgrade` did."""
    op.drop_table("compatibility")
    for name in ("world_size", *reversed(COUNTS), "unknown_kinds", "root_id"):
        op.drop_column("runs", name)
    op.execute("UPDATE runs SET fingerprint = ''")


def _add(kind: sa.types.TypeEngine[Any], name: str, default: str) -> None:
    """A column that rows of older programs, which do not name it, get with its default."""
    op.add_column("runs", sa.Column(name, kind, nullable=False, server_default=default))
