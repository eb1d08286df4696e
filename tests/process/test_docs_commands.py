"""The commands of the documentation, run page by page on one finished run.

A page's names of runs and checkpoints are replaced by those of the run. Each page has a home of
its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.docs.blocks import TUTORIAL, Block, unmarked
from tests.process.local_command import Local

BLOCKS: Final = [block for block in unmarked() if block.is_shell and block.page != TUTORIAL]
RUN: Final = "finished"
# The names of runs in the pages, but not in `$RUN` and `first.toml`.
NAMES: Final = re.compile(r"(?<![\w$./])(RUN|first|gpt|tour)(?![\w.])")
CHECKPOINT: Final = re.compile(r"step-\d{8}\.a\d{4}\.l\d{2}")
BLOCK_S_MAX: Final = 240.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A run of two ranks that has completed."""
    local = Local(tmp_path_factory.mktemp("finished"))
    resources = {"gpus_per_node": 2}
    spec = local.write_spec(RUN, {"steps": 25, "sleep_s": 0.02}, resources=resources)
    assert local.json("submit", str(spec), "--wait")["state"] == "completed"
    yield local
    local.end_all()


@pytest.fixture(scope="module")
def newest(finished: Local) -> str:
    """The name of the run's newest checkpoint."""
    id_of_newest: str = finished.json("checkpoints", RUN)[-1]["id"]
    return id_of_newest.partition(":")[2]


def script_of(block: Block, checkpoint: str) -> str:
    """The commands of a block, for the finished run."""
    return CHECKPOINT.sub(checkpoint, NAMES.sub(RUN, block.commands))


@pytest.mark.more
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_commands_of_a_page_succeed(
    page: str, finished: Local, newest: str, tmp_path: Path
) -> None:
    environment = {
        **finished.environment,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "HOLDFAST_ROOT": str(finished.root),
        # docs/object-stores.md stores them in files.
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for block in BLOCKS:
        if block.page == page:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script_of(block, newest)],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=BLOCK_S_MAX,
                check=False,
            )
            assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
