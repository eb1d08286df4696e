"""Who may read a run's folder: the columns by which queries hide private runs.

Rows from before have no values. Only root sees them until the run is read again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INDEX = "ix_runs_owner_uid"


def upgrade() -> None:
    """Upgrade the schema from the previous revision."""
    op.add_column("runs", sa.Column("owner_uid", sa.BigInteger()))
    op.add_column("runs", sa.Column("reader_gid", sa.BigInteger()))
    op.add_column(
        "runs", sa.Column("is_public", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_index(INDEX, "runs", ["owner_uid"])


def downgrade() -> None:
    """Revert `upgrade`."""
    op.drop_index(INDEX, "runs")
    for column in ("is_public", "reader_gid", "owner_uid"):
        op.drop_column("runs", column)
