"""Import rules: import-linter's contracts, and which parts may import each large library."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from tests.support.runs import build_sample_runs
from tests.support.statements import statements

from holdfast.cli.main import COMMANDS, all_commands

CHECKOUT = Path(__file__).resolve().parents[2]
# Part → its folder.
PARTS = {
    "contracts": "src/holdfast/contracts",
    "lineage": "src/holdfast/lineage",
    "api": "src/holdfast/api",
    "cli": "src/holdfast/cli",
    "flows": "flows/holdfast/flows",
    "workers": "workers/holdfast/workers",
    "trainer": "trainer/holdfast/trainer",
    "migrations": "alembic",
    # Not in the package: the distribution holdfast-bench.
    "bench": "benchmarks/src/holdfast_bench",
}
LIBRARIES = {
    "holdfast_bench": {"bench", "cli", "flows"},
    "torch": {"trainer", "bench"},
    "fsspec": {"trainer"},
    "safetensors": {"trainer"},
    "s3fs": {"trainer"},
    "prefect": {"flows", "cli"},
    "sqlalchemy": {"lineage", "migrations"},
    "alembic": {"lineage", "migrations"},
    "submitit": {"workers"},
    "grpc": {"workers"},
}
CLOSED = {
    "contracts": {"holdfast", "pydantic", "xxhash"},
    "trainer": {
        *("holdfast", "pydantic", "torch", "numpy", "psutil", "fsspec", "s3fs", "safetensors"),
        "packaging",
    },
}
# Runs the command with the words of this process, and prints the modules that it has imported.
COMMAND = """
import json, sys
from holdfast.cli.entry import main
try:
    main()
except SystemExit as end:
    status = end.code
print(json.dumps(sorted(sys.modules)))
sys.exit(status)
"""
ADAPTERS = tuple(f"trainer/holdfast/trainer/{folder}/" for folder in ("frameworks", "trackers"))
# Library → the adapters that may import it, by the names of their modules.
FRAMEWORKS = {
    "transformers": {"transformers"},
    "accelerate": {"accelerate", "transformers"},
    "lightning": {"lightning"},
    # A part of every installation of Lightning.
    "torchmetrics": {"lightning"},
    "deepspeed": {"deepspeed"},
    "torchtitan": {"torchtitan"},
    # A part of every installation of torchtitan.
    "torchdata": {"torchtitan"},
    "wandb": {"wandb"},
    "mlflow": {"mlflow"},
}


@cache
def imports_of(part: str) -> list[tuple[str, str]]:
    """(place, module) of every import in a part, those inside functions too."""
    found = []
    for path in sorted((CHECKOUT / PARTS[part]).rglob("*.py")):
        for node in statements(ast.parse(path.read_text(), str(path))):
            place = f"{path.relative_to(CHECKOUT)}:{getattr(node, 'lineno', 0)}"
            found += [(place, name) for name in imported(node)]
    return found


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"a relative import of {node.module}: expected holdfast.…"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("holdfast")


def top(module: str) -> str:
    return module.partition(".")[0]


def test_the_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache", "--no-logo"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tools_see_the_parts_in_all_folders_of_the_package() -> None:
    graph = import_graph()
    parts = PARTS.keys() - {"migrations", "bench"}
    assert graph.find_children("holdfast") == {f"holdfast.{part}" for part in parts}
    # With this file, tools and Python would no longer look into the other folders.
    assert not [*CHECKOUT.glob("*/holdfast/__init__.py")]


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and imports for annotations count too."""
    graph = import_graph()
    imports = {one: graph.find_modules_directly_imported_by(one) for one in graph.modules}
    assert len(imports) > 500
    circle: list[str] = []
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_library_is_imported_only_in_its_parts(library: str) -> None:
    violations = [
        f"{place} imports {module}"
        for part in PARTS
        if part not in LIBRARIES[library]
        for place, module in imports_of(part)
        if top(module) == library
    ]
    assert not violations, "\n".join(violations)


def is_own_framework(place: str, library: str) -> bool:
    """True if the importing file is an adapter of this library."""
    folder = next((one for one in ADAPTERS if place.startswith(one)), None)
    if folder is None:
        return False
    adapter = place.partition(":")[0].removeprefix(folder).removesuffix(".py")
    return adapter.split("/")[0] in FRAMEWORKS.get(library, ())


@pytest.mark.parametrize("part", sorted(CLOSED))
def test_a_closed_part_imports_only_its_allowed_libraries(part: str) -> None:
    allowed = CLOSED[part] | set(sys.stdlib_module_names)
    violations = [
        f"{place} imports {m}"
        for place, m in imports_of(part)
        if top(m) not in allowed and not is_own_framework(place, top(m))
    ]
    others = [
        f"{place} imports {module}"
        for place, module in imports_of(part)
        if top(module) == "holdfast"
        and not f"{module}.".startswith((f"holdfast.{part}.", "holdfast.contracts."))
    ]
    assert not violations + others, "\n".join(violations + others)


def test_only_programs_benchmarks_and_tests_import_the_trainer() -> None:
    violations = [
        f"{place} imports {module}"
        for part in PARTS
        if part not in {"trainer", "bench"}
        for place, module in imports_of(part)
        if f"{module}.".startswith("holdfast.trainer.")
    ]
    assert not violations, "\n".join(violations)


def test_each_part_has_one_import_name() -> None:
    violations = [
        f"{place} imports {module}: expected holdfast.{module}"
        for part in PARTS
        for place, module in imports_of(part)
        if top(module) in {"flows", "workers", "trainer"}
    ]
    assert not violations, "\n".join(violations)
    done = subprocess.run(
        [sys.executable, "-c", "import trainer.holdfast.trainer"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "import holdfast.trainer, not trainer.holdfast.trainer" in done.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "holdfast.contracts.records.history",
            {"torch", "numpy", "prefect", "sqlalchemy", "submitit"},
        ),
        ("holdfast.trainer", {"torch", "prefect", "sqlalchemy", "submitit"}),
        (
            "holdfast.trainer.flusher.service",
            {"torch", "numpy", "prefect", "sqlalchemy", "submitit"},
        ),
        ("holdfast.trainer.loading.resume", {"torch", "prefect", "sqlalchemy", "submitit"}),
        ("holdfast.workers.agent", {"torch", "prefect", "sqlalchemy"}),
        ("holdfast.workers.runs.reconcile", {"torch", "prefect", "sqlalchemy", "submitit"}),
        (
            "holdfast.lineage.database.tables, sqlalchemy.dialects.sqlite",
            {"alembic", "sqlalchemy.orm", "sqlalchemy.dialects.postgresql"},
        ),
        ("holdfast.cli.views", {"torch", "prefect", "sqlalchemy", "submitit", "rich"}),
    ],
)
def test_modules_that_start_quickly_import_no_large_libraries(
    module: str, absent: set[str]
) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not absent & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("word", "absent"),
    [
        ("--version", {"torch", "prefect", "sqlalchemy", "submitit", "pydantic", "rich"}),
        ("--help", {"torch", "prefect", "sqlalchemy", "submitit", "pydantic"}),
        (
            "runs",
            {
                *("torch", "prefect", "submitit", "fastapi", "sqlalchemy.orm"),
                # One of the two runs is live, and its attempt has not ended.
                *("holdfast.workers.decisions.causes", "holdfast.workers.runs.attempts"),
            },
        ),
    ],
)
def test_a_command_imports_no_large_libraries_that_it_does_not_use(
    word: str, absent: set[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    assert len({run.name for run in build_sample_runs(home / "runs")}) == 2
    foreign = ("HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL")
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, word],
        env={k: v for k, v in os.environ.items() if k not in foreign}
        | {"HOLDFAST_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert absent & modules == set()
    listed = {f"holdfast.cli.{module}" for module, _ in COMMANDS.values()}
    assert ("holdfast.cli.views" in modules) == (word == "runs")
    assert word == "runs" or not listed & modules


def test_the_list_of_commands_agrees_with_their_modules() -> None:
    loaded = all_commands().commands
    summaries = {name: (one.help or "").partition("\n\n")[0] for name, one in loaded.items()}
    assert summaries == {name: summary for name, (_, summary) in COMMANDS.items()}
    # Each module of the folder has commands, except those that are the program itself.
    stems = {path.stem for path in (CHECKOUT / PARTS["cli"]).glob("*.py")}
    assert stems - {"__init__", "commands", "entry", "main"} == {m for m, _ in COMMANDS.values()}
