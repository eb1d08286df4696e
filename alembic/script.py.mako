"""${message}"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Bring the schema from the revision before to this one."""
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade() -> None:
    """Take back what `upgrade` did."""
    ${downgrades if downgrades else "raise NotImplementedError"}
