"""Run the core tests with other versions of the packages: `python infra/versions/matrix.py --help`.

Each environment has one Python and either the newest or the lowest versions that `pyproject.toml`
admits, and is made by uv. `make test-versions` runs all of them and writes the table of
`docs/versions.md`. One environment takes 6 GB if the index has no CPU build of its torch. It shares
its files with uv's cache, and is deleted after its tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
# In build/, for the environments, the logs and the results.
FOLDER: Final = CHECKOUT / "build" / "versions"
PAGE: Final = CHECKOUT / "docs" / "versions.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
PYTHONS: Final = ("3.11", "3.12", "3.13")
RESOLUTIONS: Final = {"newest": "highest", "lowest": "lowest-direct"}
EXTRAS: Final = (
    "trainer", "server", "s3", "redis", "nvrx",
    "transformers", "accelerate", "lightning", "deepspeed", "wandb", "mlflow", "tensorboard",
)  # fmt: skip
# They are not part of what is tested, so the newest ones serve in every environment.
TOOLS: Final = (
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "torchdata", "trustme"),
    *("schemathesis", "setuptools"),
)
# Shown in the table.
SHOWN: Final = (
    *("torch", "prefect", "fastapi", "sqlalchemy", "pydantic", "submitit"),
    *("transformers", "accelerate", "lightning", "deepspeed"),
)
TESTS: Final = {
    "spec": ("tests/unit/test_contracts_spec.py",),
    "journal": ("tests/unit/test_contracts_journal.py", "tests/unit/test_contracts_manifest.py"),
    "ingest": ("tests/process/test_lineage_ingest.py",),
    "session": ("tests/process/test_session.py", "tests/process/test_exact.py"),
    "DCP": (
        *("tests/unit/test_torch_metadata.py", "tests/unit/test_dcp_page.py"),
        *("tests/frameworks/test_dcp.py", "tests/frameworks/test_marked_shards.py"),
    ),
    "export": ("tests/unit/test_export.py",),
    "command": ("tests/unit/test_cli.py", "tests/process/test_cli_local.py"),
    "API": ("tests/api/test_reading.py", "tests/api/test_document.py"),
    "Prefect": ("tests/prefect/test_scheduler.py",),
    "Transformers": ("tests/frameworks/test_transformers_trainer.py",),
    "Accelerate": ("tests/frameworks/test_accelerate.py",),
    "Lightning": ("tests/frameworks/test_lightning.py",),
    "DeepSpeed": ("tests/frameworks/test_deepspeed.py",),
    "trackers": ("tests/frameworks/test_trackers.py",),
}
INSTALL_S: Final = 1800
TESTS_S: Final = 3600
FAILED_SHOWN: Final = 20


class MatrixError(Exception):
    """An environment that cannot be made."""


def run(*words: str | Path, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout. If it fails, raises `MatrixError` with its output."""
    command = [str(word) for word in words]
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout, check=False, **more
    )
    if done.returncode:
        raise MatrixError(
            f"{' '.join(command[:6])} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done


def find_uv() -> Path:
    """Return uv: the one on the PATH, or the set-up's. Raises `MatrixError` if there is none."""
    own = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(own) if own.exists() else None)
    if found is None:
        raise MatrixError(f"no uv on the PATH and no {own}; `make setup` installs it if it can")
    return Path(found)


def find_python(uv: Path, version: str) -> str:
    """Return a Python of this version: one of pyenv's, or what uv finds or can download."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in sorted(root.glob(f"versions/{version}.*/bin/python")):
        return str(path)
    return run(uv, "python", "find", version, timeout=INSTALL_S).stdout.strip()


def make_environment(uv: Path, folder: Path, python: str, resolution: str) -> None:
    """Make an environment with this checkout and all `EXTRAS`. Raises `MatrixError`."""
    run(uv, "venv", "--clear", "-p", find_python(uv, python), folder, timeout=INSTALL_S)
    install = (uv, "pip", "install", "-p", folder)
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    # Old source packages do not build with new Pythons and tools. DeepSpeed has nothing else.
    wheels = ("--only-binary", ":all:", "--no-binary", "deepspeed")
    wanted = ("-r", "pyproject.toml", *extras, "--resolution", RESOLUTIONS[resolution], *wheels)
    run(*install, *wanted, timeout=INSTALL_S)
    run(*install, *TOOLS, timeout=INSTALL_S)
    run(*install, "--no-deps", "-e", ".", "-e", "benchmarks", timeout=INSTALL_S)


def versions_in(uv: Path, folder: Path) -> dict[str, str]:
    """Return the versions of the environment's packages."""
    listed = run(uv, "pip", "list", "-p", folder, "--format", "json", timeout=INSTALL_S).stdout
    return {each["name"].lower(): each["version"] for each in json.loads(listed)}


def run_tests(folder: Path, groups: Sequence[str], report: Path) -> dict[str, Any]:
    """Run the tests of `groups` in an environment, and return what became of them."""
    files = [file for group in groups for file in TESTS[group]]
    pytest = ("-m", "pytest", "-q", "-m", "not slow", "-n", "2", "--dist", "loadfile")
    options = ("-p", "no:cacheprovider", f"--junit-xml={report}")
    began = time.monotonic()
    with open(report.with_suffix(".log"), "wb") as log:
        status = subprocess.run(
            [folder / "bin" / "python", *pytest, *options, *files],
            cwd=CHECKOUT,
            stdout=log,
            stderr=log,
            timeout=TESTS_S,
            check=False,
        ).returncode
    counts = count(report) if report.exists() else {}
    return {"status": status, "seconds": round(time.monotonic() - began), **counts}


def count(report: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, by a JUnit file, and the failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if {child.tag for child in case} & {"failure", "error"}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "names": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def try_one(
    uv: Path, place: Path, resolution: str, python: str, groups: Sequence[str], *, keep: bool
) -> dict[str, Any]:
    """Make one environment in `place`, run the tests in it, delete it, and return the result."""
    folder, report = place / f"{resolution}-{python}", place / f"{resolution}-{python}.xml"
    report.unlink(missing_ok=True)
    result: dict[str, Any] = {"set": resolution, "python": python, "groups": list(groups)}
    result["day"] = datetime.now(UTC).date().isoformat()
    try:
        make_environment(uv, folder, python, resolution)
        found = versions_in(uv, folder)
        python_version = (folder / "pyvenv.cfg").read_text().split("version_info = ")[1].split()[0]
        result |= {"python_version": python_version}
        result |= {"versions": {each: found.get(each, "–") for each in SHOWN}}
        result |= run_tests(folder, groups, report)
    except (MatrixError, subprocess.TimeoutExpired) as error:
        result |= {"error": str(error)}
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def tables(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's two tables: what was run, and with which versions."""
    yield from _table(
        ("set", "Python", "tests", "passed", "failed", "skipped", "minutes", "day"),
        (
            (
                each["set"],
                _python_of(each),
                "all" if set(each["groups"]) == set(TESTS) else ", ".join(each["groups"]),
                *(str(each.get(key, "–")) for key in ("passed", "failed", "skipped")),
                f"{each['seconds'] / 60:.0f}" if "seconds" in each else "–",
                each["day"],
            )
            for each in results
        ),
    )
    yield ""
    yield from _table(
        ("package", *(f"{each['set']}, {_python_of(each)}" for each in results)),
        ((name, *(each.get("versions", {}).get(name, "–") for each in results)) for name in SHOWN),
    )


def _python_of(result: dict[str, Any]) -> str:
    return str(result.get("python_version", result["python"]))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write_page(results: Sequence[dict[str, Any]]) -> None:
    """Replace the tables of the page, and the line about the machine before it."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    machine = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU. The test files "
        f"are in `TESTS` of `infra/versions/matrix.py`."
    )
    PAGE.write_text("\n".join([before + BEGIN, "", machine, "", *tables(results), "", END]) + after)


def main() -> int:
    """Return 0 if all tests of all environments passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="*", choices=RESOLUTIONS, default=list(RESOLUTIONS))
    parser.add_argument("--python", nargs="*", default=list(PYTHONS), metavar="X.Y")
    parser.add_argument("--group", nargs="*", choices=TESTS, default=list(TESTS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/versions")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/versions.md")
    options = parser.parse_args()
    place = options.folder.resolve()
    place.mkdir(parents=True, exist_ok=True)
    kept = place / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else []
    uv, is_good = find_uv(), True
    for python in options.python:
        for resolution in options.set:
            result = try_one(uv, place, resolution, python, options.group, keep=options.keep)
            mine = (resolution, python)
            results = [each for each in results if (each["set"], each["python"]) != mine]
            results = sorted([*results, result], key=lambda each: (each["set"], each["python"]))
            kept.write_text(json.dumps(results, indent=1))
            is_good &= result.get("status") == 0
            for name in result.get("names", [])[:FAILED_SHOWN]:
                print(f"{resolution}-{python}: failed: {name}", file=sys.stderr)
            if "error" in result:
                print(f"{resolution}-{python}: {result['error']}", file=sys.stderr)
    print("\n".join(tables(results)))
    if options.page:
        write_page(results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
