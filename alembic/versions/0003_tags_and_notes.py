"""Tags and notes of runs and checkpoints.

Rows from before have none until the run is read again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("runs", "checkpoints")
LIST = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Upgrade the schema from the previous revision."""
    for table in TABLES:
        op.add_column(table, sa.Column("tags", LIST, nullable=False, server_default="[]"))
        op.add_column(table, sa.Column("note", sa.Text()))
        op.add_column(table, sa.Column("note_by", sa.Text()))
        op.add_column(table, sa.Column("note_at", sa.Double()))


def downgrade() -> None:
    """Revert `upgrade`."""
    for table in TABLES:
        for column in ("note_at", "note_by", "note", "tags"):
            op.drop_column(table, column)
