"""Specs from files, tables and overrides, and the message for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.flows.parameters import load_spec, parse_override

PLAIN: dict[str, Any] = {"name": "kelp", "command": ["train.py", "--lr", "1e-3"]}

TOML = """
name = "kelp"
command = ["train.py"]
[resources]
gpus_per_node = 4
[launch]
working_directory = "../code"
"""
YAML = """
name: kelp
command: [train.py]
resources: {gpus_per_node: 4}
launch: {working_directory: ../code}
"""


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML)])
def test_toml_and_yaml_give_the_same_spec(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"spec{suffix}"
    path.write_text(text)
    spec = load_spec(path)
    assert spec.gpus == 4
    assert spec.launch.working_directory == str((tmp_path.parent / "code").resolve())
    assert load_spec(str(path)).digest == spec.digest


def test_the_working_directory_of_a_table_is_relative_to_the_base(tmp_path: Path) -> None:
    spec = load_spec({**PLAIN, "launch": {"working_directory": "code"}}, base=tmp_path)
    assert spec.launch.working_directory == str((tmp_path / "code").resolve())


def test_the_given_table_is_not_changed() -> None:
    table = {**PLAIN, "resources": {"nodes": 1}}
    load_spec(table, ["resources.gpus_per_node=2"])
    assert table == {**PLAIN, "resources": {"nodes": 1}}


def test_a_spec_read_back_from_a_run_is_the_same_spec(tmp_path: Path) -> None:
    spec = load_spec(PLAIN, base=tmp_path)
    assert load_spec(spec.model_dump(mode="json")).digest == spec.digest


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("resources.nodes=2", ["resources", "nodes"], 2),
        ("checkpoint.interval=10m", ["checkpoint", "interval"], "10m"),
        ("config.lr=1e-3", ["config", "lr"], 1e-3),
        ("config.on=true", ["config", "on"], True),
        ("elastic.on_preemption=[2, 1]", ["elastic", "on_preemption"], [2, 1]),
        ('name="a b"', ["name"], "a b"),
        ("name=plain words", ["name"], "plain words"),
        ("config.day=2024-01-01", ["config", "day"], "2024-01-01"),
        ("config.two=1\nthree=2", ["config", "two"], "1\nthree=2"),
        ("config.empty=", ["config", "empty"], ""),
        ("config.sum=a=b", ["config", "sum"], "a=b"),
        ("environment.OMP_NUM_THREADS=4", ["environment", "OMP_NUM_THREADS"], "4"),
    ],
)
def test_an_override_is_toml_or_else_a_string(text: str, keys: list[str], value: object) -> None:
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize("text", ["nodes", "=3", "resources.=3", ".nodes=3"])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="expected key=value"):
        parse_override(text)


def test_overrides_create_missing_tables() -> None:
    spec = load_spec(PLAIN, ["resources.gpus_per_node=4", "elastic.on_preemption=[2]"])
    assert (spec.gpus, spec.gpus_min) == (4, 2)


MISTAKES: list[tuple[dict[str, Any], list[str], str]] = [
    ({"comand": ["x"]}, [], "comand: unknown key; did you mean command?"),
    (
        {"resources": {"gpus_per_nod": 2}},
        [],
        "resources.gpus_per_nod: unknown key; did you mean resources.gpus_per_node?",
    ),
    ({"partition": "a"}, [], "partition: unknown key; did you mean resources.partition?"),
    ({"zzz": 1}, [], "zzz: unknown key; known keys: alerts, blocks, checkpoint, command"),
    ({"checkpoint": {"keep": {"lats": 3}}}, [], "did you mean checkpoint.keep.last?"),
    ({"resources": {"nodes": 0}}, [], "resources.nodes: given 0; expected greater than or equal"),
    ({"resources": {"executor": "slurn"}}, [], "expected 'local' or 'slurm' (did you mean slurm?)"),
    ({"resources": [1]}, [], "resources: given [1]; expected a table of keys"),
    ({"supervision": {"budgets": {"hangs": 1}}}, [], "did you mean hang?"),
    ({"checkpoint": {"interval": "often"}}, [], "expected steps (50), a time above 0"),
    ({"environment": {"A-B": "1"}}, [], "expected names such as OMP_NUM_THREADS"),
    ({"name": "a b"}, [], "expected up to 100 letters"),
    ({"elastic": {"on_preemption": [3], "max_gpus": 2}}, [], "outside elastic"),
    ({}, ["name.first=x"], 'name is "kelp", not a table'),
    ({}, ["nodes"], "expected key=value"),
]


@pytest.mark.parametrize(("change", "overrides", "expected"), MISTAKES)
def test_each_mistake_has_its_own_message(
    change: dict[str, Any], overrides: list[str], expected: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({**PLAIN, **change}, overrides)
    assert len(caught.value.problems) == 1
    assert expected in caught.value.problems[0]
    assert caught.value.problems[0] in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    table = {"nam": "x", "command": [], "resources": {"nodes": "many", "gpu": 1}}
    with pytest.raises(SpecError) as caught:
        load_spec(table, ["nonsense"])
    begins = [problem.split(":")[0] for problem in caught.value.problems]
    assert begins == ["--set nonsense", "nam", "resources.gpu", "command", "resources.nodes"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.toml", None, "no such file"),
        ("spec.ini", "x", "expected .toml, .yaml or .yml"),
        ("spec.toml", 'name = "a"\ncommand == 3', "line 2"),
        ("spec.yaml", "name: a\ncommand: [x\nother: 1", "at line 3"),
        ("spec.yaml", "- 1\n- 2\n", "contains a list; expected a table"),
        ("spec.yaml", "# nothing yet\n", "contains nothing; expected a table"),
        ("spec.yaml", "name: !!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, expected: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(NotFoundError if content is None else SpecError) as caught:
        load_spec(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
