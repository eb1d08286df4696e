"""Each environment variable: set, with its effect, and with bad values.

The variables are the names in the code. One without a row, or without a description, fails the
test. Those that only Holdfast sets are refused in a spec.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.histories import spec_of
from tests.support.runs import RunFolder

from holdfast.cli.mcp import chosen_token
from holdfast.cli.shared.index import choose_root
from holdfast.contracts import environment
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import default_root, holdfast_home
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import HoldfastError, NoticeError, SpecError
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.checkpoint import doubling_steps, write_limit
from holdfast.flows.parameters import load_spec
from holdfast.flows.train import artifacts
from holdfast.lineage.database.engine import parse_url
from holdfast.trainer.config import config
from holdfast.trainer.mirror import s3
from holdfast.trainer.numerics.guard import chosen_numerics
from holdfast.trainer.ranks.rank_context import choose_directory
from holdfast.trainer.session.settings import Settings
from holdfast.workers.agent.notices.watch import build_clouds
from holdfast.workers.runs.preflight import check
from holdfast_docs.variables import VARIABLES, Setter

CHECKOUT: Final = Path(__file__).resolve().parents[2]
CODE: Final = ("src/holdfast", "workers", "trainer", "flows", "benchmarks/src", "tests/gpu")
# Names in files that are no Python.
ELSEWHERE: Final = {
    "HOLDFAST_PYTHON": "infra/setup/setup.sh",
    "HOLDFAST_SERVER": "web/vite.config.ts",
}
WITHOUT_AGENT: Final = "Without an agent, you can set it"
BUILDS: Final = {one.name for one in VARIABLES if one.setter is Setter.BUILD}
PEOPLE: Final = {
    one.name
    for one in VARIABLES
    if one.setter is Setter.PERSON or WITHOUT_AGENT.lower() in one.meaning.lower()
}
OWN: Final = {one.name for one in VARIABLES} - BUILDS - {environment.S3_ENDPOINT}


def names_in_code() -> set[str]:
    """The names of variables in string constants of the code."""
    files = [path for folder in CODE for path in (CHECKOUT / folder).rglob("*.py")]
    found = set()
    for path in {*files, CHECKOUT / "hatch_build.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                if name.startswith("HOLDFAST_") and name[9:].replace("_", "").isalnum():
                    found.add(name)
    return found | {
        name for name, file in ELSEWHERE.items() if name in Path(CHECKOUT, file).read_text()
    }


def page_of(folder: Path) -> str:
    """What Prefect shows of a run."""
    run = RunFolder(folder, "gpt", "a" * 32)
    return str(dict(artifacts(load_history(run.paths)))["run"].data)


def notices_from() -> str:
    """The address that a node asks for notices, from its failure there."""
    (cloud,) = build_clouds("aws", "", os.environ)
    with pytest.raises(NoticeError) as failed:
        cloud.probe()
    return str(failed.value)


def settings() -> str:
    return " ".join(map(str, Settings.of(None, None).chosen))


def checked(folder: Path, **fields: Any) -> None:
    """The checks before a run is submitted."""
    check(spec_of(launch={"wrapper": ["env"], "working_directory": str(folder)}, **fields), folder)


def read_root(folder: Path) -> None:
    default_root()
    choose_directory(None, os.environ, "train")


def token() -> str | None:
    return chosen_token(None) if os.environ.get(environment.TOKEN) else None


def tiers() -> Tiers:
    return Tiers.from_environment(os.environ)


# A value, and whether it acts.
EFFECTS: Final[Mapping[str, tuple[str, Callable[[Path], bool]]]] = {
    "HOLDFAST_ROOT": (
        "x",
        lambda f: (
            default_root() == f / "x"
            and choose_directory(None, os.environ, "train") == f / "x" / "train"
        ),
    ),
    "HOLDFAST_HOME": ("x", lambda f: holdfast_home() == f / "x"),
    "HOLDFAST_DATABASE_URL": ("sqlite:///x.db", lambda f: parse_url(None).database == f"{f}/x.db"),
    "HOLDFAST_PAGE_URL": (
        "https://h.example.org/",
        lambda f: "(https://h.example.org/runs/gpt)" in page_of(f),
    ),
    environment.TOKEN: ("hold_x", lambda _: token() == "hold_x"),
    environment.S3_ENDPOINT: (
        "http://127.0.0.1:9",
        lambda _: s3._connect("s3://b/x").endpoint_url == "http://127.0.0.1:9",
    ),
    environment.NOTICES_URL: ("http://127.0.0.1:7", lambda _: "127.0.0.1:7" in notices_from()),
    environment.CONFIG: ('{"steps": 5}', lambda f: config(f / "run.toml") == {"steps": 5}),
    environment.CHECKPOINT_INTERVAL: ("7m", lambda _: "checkpoint.interval = 7m" in settings()),
    environment.CHECKPOINT_SNAPSHOTS: ("7", lambda _: "checkpoint.snapshots = 7" in settings()),
    environment.CHECKPOINT_OVERLAP: (
        "true",
        lambda _: "checkpoint.overlap = true" in settings(),
    ),
    environment.CHECKPOINT_STAGING: (
        "single",
        lambda _: Settings.of(None, None).staging.slots == 1,
    ),
    environment.STAGING_DIRECTORY: (
        "/scratch",
        lambda _: Settings.of(None, None).staging.directory == "/scratch",
    ),
    environment.CHECKPOINT_DOUBLING_STEPS: ("7", lambda _: doubling_steps() == 7),
    environment.CHECKPOINT_MIRROR: ("s3://b/x", lambda _: tiers().mirror == "s3://b/x"),
    environment.CHECKPOINT_LOCAL: ("/scratch", lambda _: tiers().local == "/scratch"),
    environment.NUMERICS: ('{"on_nan": "warn"}', lambda _: chosen_numerics().on_nan == "warn"),
    environment.CHECKPOINT_WRITE_LIMIT: ("7kB", lambda _: write_limit() == 7000),
    environment.FLUSH_TIMEOUT: ("7", lambda _: flush_timeout_s() == 7),
}
FOLDERS: Final = ("s3://b/x", "~nobody_here/x", " ", "{folder}/run.toml")
ADDRESSES: Final = ("x", "x.example.org:80", "ftp://x", "https://", "http://x:y", "http://a b", " ")
# Values that are refused by name, and what reads them.
BAD: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Path], object]]]] = {
    "HOLDFAST_ROOT": (FOLDERS, read_root),
    "HOLDFAST_HOME": (FOLDERS, lambda _: holdfast_home()),
    "HOLDFAST_DATABASE_URL": (
        ("x", " ", "sqlite://", "sqlite:///:memory:", "mysql://h/x", "sqlite:///~nobody_here/x"),
        lambda _: parse_url(None),
    ),
    "HOLDFAST_PAGE_URL": (ADDRESSES, checked),
    environment.TOKEN: (("a b", "tök", "x" * 300, " "), lambda _: chosen_token(None)),
    environment.S3_ENDPOINT: (ADDRESSES, checked),
    environment.NOTICES_URL: ((*ADDRESSES, "https://127.0.0.1"), checked),
    environment.CONFIG: (("", "{", "[]", "5", " "), lambda _: config()),
    environment.CHECKPOINT_INTERVAL: (
        ("-5", "0", "1.5", "x", "5x", " ", "9" * 30, "9" * 5000),
        lambda _: settings(),
    ),
    environment.CHECKPOINT_SNAPSHOTS: (
        ("-5", "0", "1.5", "x", "7m", " ", "9" * 30, "9" * 5000),
        lambda _: settings(),
    ),
    environment.CHECKPOINT_OVERLAP: (("x", "1", " ", "auto"), lambda _: settings()),
    environment.CHECKPOINT_STAGING: (("x", "1", " ", "Disk"), lambda _: settings()),
    environment.STAGING_DIRECTORY: (("x", " ", "~/x"), lambda _: settings()),
    environment.CHECKPOINT_WRITE_LIMIT: (
        ("x", "-5", "0", "1.5", " ", "7m", "200mb", "9" * 30, "9" * 5000),
        lambda _: write_limit(),
    ),
    environment.CHECKPOINT_DOUBLING_STEPS: (
        ("x", "-5", "0", "1.5", " ", "\u0664", "9" * 30, "9" * 5000),
        lambda _: settings(),
    ),
    environment.CHECKPOINT_MIRROR: (("x", "s3://", "s3://u:p@b/x", " "), lambda _: tiers()),
    environment.CHECKPOINT_LOCAL: (("x", " ", "s3://b/x", "~/x"), lambda _: tiers()),
    environment.NUMERICS: (("{", "[]", " ", '{"on_nan": "x"}'), lambda _: chosen_numerics()),
    environment.FLUSH_TIMEOUT: (
        ("-1", "0", "x", "nan", "inf", "1e300", " "),
        lambda _: flush_timeout_s(),
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an environment that sets no variable."""
    for name in {one.name for one in VARIABLES} | {"PREFECT_API_URL"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # So that no test asks the cloud.
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[config]\nsteps = 1\n")
    return tmp_path


def test_the_names_in_the_code_are_the_described_ones() -> None:
    assert names_in_code() == {one.name for one in VARIABLES}
    assert EFFECTS.keys() == PEOPLE == BAD.keys()


@pytest.mark.parametrize("name", EFFECTS)
def test_each_variable_has_its_effect(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value, acts = EFFECTS[name]
    assert not acts(folder)
    if name != environment.CONFIG:
        # An empty one is as good as none.
        monkeypatch.setenv(name, "")
        assert not acts(folder)
    if name == environment.CHECKPOINT_LOCAL:
        monkeypatch.setenv(environment.CHECKPOINT_MIRROR, "s3://b/x")
    monkeypatch.setenv(name, value)
    assert acts(folder)


@pytest.mark.parametrize(("name", "value"), [(n, one) for n, row in BAD.items() for one in row[0]])
def test_each_variable_refuses_bad_values_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value.replace("{folder}", str(folder)))
    if name == environment.CHECKPOINT_LOCAL:
        monkeypatch.setenv(environment.CHECKPOINT_MIRROR, "s3://b/x")
    with pytest.raises(HoldfastError, match=name):
        BAD[name][1](folder)


def test_a_node_local_tier_needs_a_mirror(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CHECKPOINT_LOCAL, "/scratch")
    with pytest.raises(SpecError, match=environment.CHECKPOINT_MIRROR):
        tiers()


def test_relative_paths_hold_for_processes_that_start_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"ROOT": "x", "HOME": "~/h", "DATABASE_URL": "sqlite:///~/x.db"}
    for name, value in given.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    read = default_root(), holdfast_home(), parse_url(None)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert (default_root(), holdfast_home(), parse_url(None)) == read
    assert os.environ["HOLDFAST_DATABASE_URL"] == f"sqlite:///{folder}/home/x.db"


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_spec_cannot_set_a_variable_of_holdfast(name: str) -> None:
    table = {"name": "kelp", "command": ["train.py"], "environment": {name: "1"}}
    with pytest.raises(SpecError, match=rf"environment\.{name}: Holdfast sets"):
        load_spec(table)


def test_a_spec_s_own_address_of_a_store_is_checked(folder: Path) -> None:
    right = {environment.S3_ENDPOINT: "https://s3.example.org"}
    checked(folder, environment=right)
    with pytest.raises(HoldfastError, match=environment.S3_ENDPOINT):
        checked(folder, environment={environment.S3_ENDPOINT: "s3.example.org"})


@pytest.mark.parametrize("value", FOLDERS[:-1])
@pytest.mark.usefixtures("folder")
def test_roots_that_are_given_otherwise_are_checked_too(value: str) -> None:
    # A `Path` has one slash where the person wrote several.
    for given in (value, str(Path(value))):
        with pytest.raises(SpecError, match="--root"):
            choose_root(given)


def test_a_flow_says_why_its_artifacts_have_no_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.PAGE_URL, "x.example.org")
    shown = page_of(folder)
    assert "No links to the page: HOLDFAST_PAGE_URL='x.example.org'" in shown
    assert "(x.example.org" not in shown
