"""Makes the reference pages importable, which name every metric, and the trees of Debian."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("docs", "slurm"):
    sys.path.append(str(Path(__file__).parents[2] / "infra" / folder))
