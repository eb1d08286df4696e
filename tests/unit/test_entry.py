"""The console script: an interrupt before the commands are imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# Stands for Ctrl-C while the module is imported, which takes half a second.
INTERRUPT = """
import sys
from importlib.abc import MetaPathFinder
class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from {start} import main
sys.argv = ["holdfast", "runs"]
main()
"""


@pytest.mark.parametrize("module", ["holdfast.cli.main", "typer", "holdfast.cli.views"])
def test_an_interrupt_during_imports_prints_no_traceback(module: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    start, _, called = project["scripts"]["holdfast"].partition(":")
    assert called == "main"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT.format(module=module, start=start)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")
