"""Settings of the documentation site. `make docs` builds it; infra/docs has its extension."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "infra" / "docs"))

from holdfast.contracts.version import holdfast_version

project = "Holdfast"
author = "The Holdfast authors"
copyright = author
version = release = holdfast_version()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "holdfast_docs",
]
root_doc = "index"
# For readers of the repository: the index, and the reference that the site generates itself.
exclude_patterns = ["README.md", "generated"]
nitpicky = True
# Documented elsewhere, and the build reads nothing from the network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|pathlib|typing|contextlib)\..*"),
    # Types in the signatures of classes that a session makes, not a program.
    ("py:class", r"holdfast\.trainer\.data\.(order\.DataOrder|sampler\.DataPlace)"),
    ("py:class", r"holdfast\.trainer\.session\.session\.T"),
]

myst_enable_extensions = ["colon_fence", "attrs_inline"]
# Headings are targets, down to this level, under the names that GitHub gives them.
myst_heading_anchors = 4
# Links to files of the repository that are not pages; see infra/docs/holdfast_docs/sources.py.
myst_url_schemes = ["http", "https", "mailto", "source"]

default_role = "code"
highlight_language = "none"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autoclass_content = "both"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = "Holdfast"
# The icon of the web UI.
html_favicon = "../web/public/icon.svg"
html_static_path = ["_static"]
html_css_files = ["holdfast.css"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_theme_options = {
    "logo": {"text": "Holdfast"},
    "navbar_align": "left",
    "navbar_end": ["version-switcher", "theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    # The extension sets the switcher. Its file is written after the build, beside this version.
    "check_switcher": False,
    "show_version_warning_banner": True,
}
