"""Secrets under a real Prefect server: a block, the submitter's variable, what Prefect keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from examples.demo_service import PrefectService
from tests.flow_runs import FlowRuns, supervisions, wait_for, wait_for_end

from holdfast.contracts.paths import RunPaths

PROGRAM: Final = Path(__file__).with_name("secrets_program.py")
BLOCK_VALUE: Final = "block-Tn6wQ1fG8zJe"
ENV_VALUE: Final = "env-Vb3kR7mX2pLa"
VARIABLE: Final = "TESTS_SUBMITTERS_TOKEN"
BLOCK: Final = "tests-token"


@pytest.fixture
def runs(prefect_service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(prefect_service, tmp_path)
    yield made
    made.end_all()
    prefect_service.environment.pop(VARIABLE, None)


def test_a_block_and_the_submitters_variable_reach_the_program_alone(runs: FlowRuns) -> None:
    save = f"from prefect.blocks.system import Secret; Secret(value={BLOCK_VALUE!r}).save({BLOCK!r}"
    runs.service.command("python", "-c", f"{save}, overwrite=True)")
    seen = runs.folder / "seen"
    settings = {"names": ["BLOCK", "TOKEN"], "seen": str(seen)}
    spec = runs.write_spec(
        "blocked",
        {},
        command=[PROGRAM.name, json.dumps(settings)],
        resources={"gpus_per_node": 1},
        environment={"BLOCK": {"prefect_secret": BLOCK}, "TOKEN": {"from_env": VARIABLE}},
    )
    refused = runs.service.command("holdfast", "submit", str(spec), check=False)
    assert refused.returncode != 0
    assert f"the variable {VARIABLE} is not set here" in refused.stderr
    paths = RunPaths(runs.root / "blocked")
    assert not paths.directory.exists()
    # The worker was started before, and does not have it.
    runs.service.environment[VARIABLE] = ENV_VALUE
    told = runs.service.command("holdfast", "submit", str(spec), "--json")
    runs.made.append(paths)
    wait_for_end(paths)
    wait_for("the record's end", lambda: not paths.private.exists())
    assert json.loads(seen.read_text()) == {
        "BLOCK": hashlib.sha256(BLOCK_VALUE.encode()).hexdigest(),
        "TOKEN": hashlib.sha256(ENV_VALUE.encode()).hexdigest(),
    }
    (taken,) = supervisions(paths)
    flow_run = runs.ask(f"flow_runs/{taken['flow_run']}")
    assert flow_run["parameters"]["spec"]["environment"]["BLOCK"] == {"prefect_secret": BLOCK}
    logs = runs.ask("logs/filter", logs={"flow_run_id": {"any_": [taken["flow_run"]]}}, limit=200)
    files = [p.read_bytes() for p in paths.directory.rglob("*") if p.is_file()]
    said = json.dumps([flow_run, logs, told.stdout, told.stderr])
    for value in (BLOCK_VALUE, ENV_VALUE):
        assert value not in said
        assert not any(value.encode() in content for content in files)
