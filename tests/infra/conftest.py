"""Makes modules of infra importable: reference pages, trees of Debian, and the set-up."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("docs", "slurm", "setup"):
    sys.path.append(str(Path(__file__).parents[2] / "infra" / folder))
