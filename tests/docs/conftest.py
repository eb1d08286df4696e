"""Makes the site builder and its Sphinx extension importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "infra" / "docs"))
