"""Hooks of Hatch: builds are complete and have the migrations, and links of the README work.

The README links to files of the repository. On the page of an index, such links lead nowhere. So a
release names the repository in HOLDFAST_REPOSITORY_URL.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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
README: Final = "README.md"
REPOSITORY: Final = "HOLDFAST_REPOSITORY_URL"
RELATIVE_LINK: Final = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)")


class Links(MetadataHookInterface):
    """The description and the URLs of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README, with absolute links and with URLs if the repository is named."""
        text = (Path(self.root) / README).read_text(encoding="utf-8")
        if repository := os.environ.get(REPOSITORY, "").rstrip("/"):
            files = f"{repository}/blob/v{metadata['version']}"
            text = RELATIVE_LINK.sub(rf"]({files}/\1)", text)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{files}/docs/README.md",
                "Changelog": f"{files}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


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
