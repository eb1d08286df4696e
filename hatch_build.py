"""A hook of Hatch's builds: it refuses incomplete ones, and adds the migrations to a wheel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Without one of these folders, the package could be built and would lack a part.
FOLDERS: Final = (
    "src/holdfast/api",
    "src/holdfast/cli",
    "src/holdfast/contracts",
    "src/holdfast/lineage",
    "trainer/holdfast/trainer",
    "workers/holdfast/workers",
    "flows/holdfast/flows",
    "alembic",
    "alembic/versions",
)
PAGE: Final = "src/holdfast/api/static/index.html"
VARIABLE: Final = "HOLDFAST_WHEEL_WITHOUT_PAGE"
# In a checkout and in an editable install, `alembic` itself is used.
MIGRATIONS: Final = {"alembic": "holdfast/lineage/migrations"}


class CompleteBuild(BuildHookInterface):
    """A wheel or an archive of the sources that contains all parts of Holdfast."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Check the folders. For a wheel, check the page too and add the migrations."""
        root = Path(self.root)
        missing = [folder for folder in FOLDERS if not any((root / folder).glob("*.py"))]
        if missing:
            raise SystemExit(
                f"{root} has no Python files in {', '.join(missing)}, so parts of Holdfast would "
                "be missing. Build from a complete checkout or from its source archive."
            )
        if self.target_name != "wheel" or version != "standard":
            return
        if not (root / PAGE).is_file() and not os.environ.get(VARIABLE):
            raise SystemExit(
                f"{root / PAGE} does not exist, so `holdfast serve` of this wheel would have no "
                "page. Build it with `make page` (needs Node 18 or newer), or set "
                f"{VARIABLE}=1 for a wheel without the page, such as for training containers."
            )
        build_data["force_include"] |= MIGRATIONS
