"""The generated parts of pages, by the name in their marker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast_docs import (
    cli_page,
    events_page,
    exits_page,
    metrics_page,
    rest_page,
    spec_page,
    variables_page,
)

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "spec": spec_page.render,
    "cli": cli_page.render,
    "rest": rest_page.render,
    "events": events_page.render,
    "metrics": metrics_page.render,
    "variables": variables_page.render,
    "exits": exits_page.render,
}
