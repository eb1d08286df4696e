"""Each callback of the installed frameworks has a row in the framework's page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import accelerate
import pytest
from lightning.pytorch import callbacks as of_lightning
from transformers import TrainerCallback, trainer_callback
from transformers.integrations import integration_utils

from holdfast.trainer.frameworks.lightning.callback import REFUSED

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(page: str, heading: str) -> dict[str, str]:
    """Return what the table under a heading says, by the name of each callback."""
    part = (DOCS / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    return {name: said.strip() for names, said in rows for name in re.findall(r"`(\w+)`", names)}


def callbacks_in(module: ModuleType) -> set[str]:
    found = inspect.getmembers(module, inspect.isclass)
    return {name for name, kind in found if issubclass(kind, TrainerCallback)}


def test_each_callback_of_lightning_has_a_row_that_says_whether_it_is_refused() -> None:
    said = rows_of("lightning.md", "Callbacks of Lightning")
    assert set(said) == set(of_lightning.__all__)
    is_refused = {name: issubclass(getattr(of_lightning, name), tuple(REFUSED)) for name in said}
    assert is_refused == {name: text.startswith("refused") for name, text in said.items()}


@pytest.mark.parametrize("module", [trainer_callback, integration_utils])
def test_each_callback_of_transformers_has_a_row(module: ModuleType) -> None:
    said = rows_of("transformers.md", "Callbacks of Transformers")
    assert callbacks_in(module) <= set(said)
    known = callbacks_in(trainer_callback) | callbacks_in(integration_utils)
    assert set(said) <= known, "rows of callbacks that this version does not have"


def test_accelerate_has_no_callbacks_of_its_own() -> None:
    assert [name for name in dir(accelerate) if "callback" in name.lower()] == []
