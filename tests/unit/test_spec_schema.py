"""The JSON Schema of a run spec accepts what the parser accepts, and refuses wrong keys and types.

It is checked with `jsonschema`, as an editor would check a spec.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft7Validator
from pydantic import ValidationError
from tests.docs.blocks import ROOT, Block, unmarked
from tests.support.cli_calls import Call
from tests.support.spec_keys import spec_keys

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.schema import PATTERNS, run_spec_schema

SCHEMA: Final = run_spec_schema()
NEEDED: Final = {"name": "a", "command": ["train.py"]}
EXAMPLES: Final = sorted(
    path for path in (ROOT / "examples").glob("*/*.toml") if "command" in path.read_text()
)
BLOCKS: Final = [block for block in unmarked() if block.language == "toml"]
# A value that no key takes, but those of `config`, which only the program reads.
NO_VALUE: Final[list[Any]] = [[{"x": [{}]}]]


def problems(spec: Any) -> list[str]:
    """The problems that an editor shows."""
    return [str(one.message) for one in Draft7Validator(SCHEMA).iter_errors(spec)]


def is_accepted(spec: Any) -> bool:
    """Whether the parser accepts it."""
    try:
        RunSpec.model_validate(spec)
    except ValidationError:
        return False
    return True


def spec_with(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return {**NEEDED, **value}


def keys_in(part: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of the keys in a schema. The tables of a list are one key."""
    found = set()
    for name, value in part["properties"].items():
        target = value.get("$ref", "").removeprefix("#/$defs/")
        inner = SCHEMA["$defs"].get(target, {})
        if "properties" in inner:
            found |= keys_in(inner, f"{prefix}{name}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def test_it_is_a_schema_of_all_keys() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert keys_in(SCHEMA) == spec_keys(RunSpec)
    # Words of newer drafts would be ignored.
    assert "prefixItems" not in json.dumps(SCHEMA)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_examples_fit(path: Path) -> None:
    spec = tomllib.loads(path.read_text())
    assert spec["command"]
    assert problems(spec) == []


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_specs_of_the_pages_fit(block: Block) -> None:
    assert problems({**NEEDED, **tomllib.loads(block.text)}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.interval", 50),
        ("checkpoint.interval", "auto"),
        ("checkpoint.interval", "10m"),
        ("checkpoint.interval", "1.5 h"),
        ("checkpoint.budget", 10**12),
        ("checkpoint.budget", "500GB"),
        ("checkpoint.budget", "2 TiB"),
        ("checkpoint.keep.ttl", "7d"),
        ("checkpoint.keep.best", {"metric": "loss"}),
        ("checkpoint.snapshots", "off"),
        ("supervision.silence_s", {"train": 60, "eval": 900}),
        ("supervision.budgets", {"hang": 2}),
        ("supervision.standby_after_s", "off"),
        ("environment", {"A": "1", "B": {"from_env": "B"}, "C": {"from_file": "/a"}}),
        ("alerts.targets", {"team": {"prefect_secret": "chat"}}),
        ("config", {"steps": 3, "data": "x", "any": [1, {"a": None}]}),
        ("tags", ["llm", "team/ablation-3_b.1", "2024"]),
        # YAML has a null.
        ("resources.partition", None),
    ],
)
def test_each_form_of_a_value_fits(key: str, value: Any) -> None:
    spec = spec_with(key, value)
    assert is_accepted(spec)
    assert problems(spec) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("nmae", "a", "'nmae' was unexpected"),
        ("checkpoint.keep.lsat", 3, "'lsat' was unexpected"),
        ("resources.fallbacks", [{"partiton": "x"}], "'partiton' was unexpected"),
        ("resources.nodes", "2", "'2' is not of type 'integer'"),
        ("resources.nodes", True, "True is not of type 'integer'"),
        ("resources.nodes", 0, "0 is less than the minimum"),
        ("resources.executor", "kubernetes", "'kubernetes' is not one of"),
        ("command", "train.py", "'train.py' is not of type 'array'"),
        ("command", [], "[]"),
        ("name", "a/b", "'a/b' does not match"),
        ("tags", ["a b"], "'a b' does not match"),
        ("tags", [""], "'' does not match"),
        ("tags", [f"t{number}" for number in range(33)], "is too long"),
        ("elastic.grow", 1, "1 is not of type 'boolean'"),
        ("checkpoint.interval", "10 minutes", "'10 minutes' is not valid"),
        ("checkpoint.interval", 1.5, "1.5 is not valid"),
        ("checkpoint.budget", "500", "'500' is not valid"),
        ("checkpoint.keep.ttl", "week", "'week' is not valid"),
        ("environment", {"A": 1}, "1 is not valid"),
        ("environment", {"A-B": "1"}, "'A-B' does not match"),
        ("environment", {"A": {"from_vault": "x"}}, "is not valid"),
        ("alerts.targets", {"team": "slack://x"}, "'slack://x' is not of type 'object'"),
        ("supervision.budgets", {"boredom": 2}, "'boredom' is not one of"),
        ("supervision.ports", "many", "'many' does not match"),
    ],
)
def test_unknown_keys_and_wrong_values_are_refused(key: str, value: Any, said: str) -> None:
    spec = spec_with(key, value)
    assert not is_accepted(spec)
    assert any(said in problem for problem in problems(spec)), problems(spec)


@pytest.mark.parametrize("key", sorted(spec_keys(RunSpec)))
def test_no_key_takes_a_value_of_a_wrong_type(key: str) -> None:
    spec = spec_with(key, NO_VALUE)
    assert not is_accepted(spec)
    assert problems(spec) != []


def test_a_spec_needs_a_name_and_a_command() -> None:
    assert sorted(problems({})) == [
        "'command' is a required property",
        "'name' is a required property",
    ]


def test_nothing_is_completed_with_null_or_a_whole_table() -> None:
    parts = [SCHEMA, *SCHEMA["$defs"].values()]
    defaults = [
        value["default"]
        for part in parts
        for value in part.get("properties", {}).values()
        if "default" in value
    ]
    assert defaults
    assert [one for one in defaults if one is None or isinstance(one, dict)] == []


def test_each_pattern_is_that_of_a_key_of_text() -> None:
    for part, key in PATTERNS:
        found = {"RunSpec": SCHEMA, **SCHEMA["$defs"]}[part]["properties"][key]
        assert any("pattern" in one for one in (found, *found.get("anyOf", ())))


def test_the_command_prints_it(call: Call) -> None:
    assert json.loads(call("schema").out) == SCHEMA


def test_the_spec_of_a_new_project_names_its_schema(call: Call, tmp_path: Path) -> None:
    assert call("init", str(tmp_path / "new"), "--executor", "local").status == 0
    text = (tmp_path / "new" / "run.toml").read_text()
    directive, _, relative = text.splitlines()[0].partition(" ")
    assert directive == "#:schema"
    written = json.loads((tmp_path / "new" / relative).read_text())
    assert written == SCHEMA
    assert list(Draft7Validator(written).iter_errors(tomllib.loads(text))) == []
