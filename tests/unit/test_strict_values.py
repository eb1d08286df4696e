"""Every key of a spec refuses values of other kinds, with the same answer from every source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import pytest
from tests.support.cli_calls import Call

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.part import SpecPart, part_of
from holdfast.contracts.spec.run_spec import RunSpec, steps_total
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor import carry

PLAIN: Final[dict[str, Any]] = {"name": "kelp", "command": ["train.py"]}
DAY: Final = date(2026, 1, 2)
HUGE: Final = 10**30
LOOKALIKE: Final = "１０"
# Values of the programs, and tables of names.
FREE: Final = {"config"}


def kinds_of(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return {kind for one in get_args(annotation) for kind in kinds_of(one)}
    return {get_origin(annotation) or annotation}


def keys_of(part: type[SpecPart], *where: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Every key with its annotation and its default. A list of tables has the index 0."""
    for name, field in part.model_fields.items():
        inner = part_of(field.annotation)
        if inner is None:
            yield (*where, name), field.annotation, field.default
        elif tuple in kinds_of(field.annotation):
            yield from keys_of(inner, *where, name, 0)
        else:
            yield from keys_of(inner, *where, name)
    for name, field in part.model_fields.items():
        if part_of(field.annotation) is not None:
            # A table is no scalar.
            yield (*where, name), field.annotation, field.default


KEYS: Final = list(keys_of(RunSpec))


def table_with(key: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A spec that is right except for `key`."""
    table: dict[str, Any] = json.loads(json.dumps(PLAIN))
    if "fallbacks" in key:
        table["resources"] = {"executor": "slurm", "fallbacks": [{"partition": "b"}]}
    if key[:-1] == ("checkpoint", "keep", "best"):
        table["checkpoint"] = {"keep": {"best": {"metric": "loss"}}}
    if key[:2] == ("on", 0):
        table["on"] = [{"name": "eval", "command": ["eval.py"]}]
    level: Any = table
    for part in key[:-1]:
        level = level[part] if isinstance(part, int) else level.setdefault(part, {})
    level[key[-1]] = value
    return table


def bad_values(annotation: Any, default: Any) -> list[Any]:
    """Values that no key of this kind can have."""
    kinds = kinds_of(annotation)
    bad: list[Any] = [DAY, [[]]]
    if kinds & {int, float}:
        # The bounds of all numbers exclude these.
        bad += [-1, HUGE]
    if type(None) not in kinds:
        bad.append(None)
    for kind, value in ((bool, True), (float, 1.5), (int, 3)):
        if kind not in kinds and not (kind is int and float in kinds):
            bad.append(value)
    if str not in kinds:
        bad += ["", LOOKALIKE]
    elif default is None:
        bad.append("")
    return bad


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return value.isoformat() if isinstance(value, date) else json.dumps(value, ensure_ascii=False)


def yaml(value: Any) -> str:
    """JSON is YAML 1.2. A date is one without quotes."""
    return json.dumps(value, default=lambda day: f"@{day}", ensure_ascii=False).replace(
        f'"@{DAY}"', str(DAY)
    )


def has_null(value: Any) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(has_null, below))


def answers(
    key: tuple[Any, ...], value: Any, folder: Path, *, can_set: bool
) -> dict[str, tuple[str, ...]]:
    """The problems that each source reports, without those that cannot express the value."""
    table = table_with(key, value)
    sources: dict[str, Any] = {"yaml": lambda: load_spec(write(folder, "r.yaml", yaml(table)))}
    if not has_null(table):
        text = "".join(f"{name} = {toml(one)}\n" for name, one in table.items())
        sources["toml"] = lambda: load_spec(write(folder, "r.toml", text))
    if value is not DAY:
        given = json.loads(json.dumps(table))
        sources["flow"] = lambda: carry.given_spec(given, (), folder, None)
    if can_set and value is not None and value is not DAY and 0 not in key:
        base = table_with(key, value)
        level = base
        for part in key[:-1]:
            level = level[part]
        del level[key[-1]]
        change = f"{'.'.join(key)}={toml(value)}"
        sources["--set"] = lambda: load_spec(base, [change])
    found = {}
    for name, load in sources.items():
        with pytest.raises(SpecError) as caught:
            pytest.fail(f"{name}: {key} = {value!r} gives {load()!r}")
        found[name] = caught.value.problems
    return found


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def is_text(annotation: Any) -> bool:
    """By --set, such a key takes what is written as text."""
    return kinds_of(annotation) - {type(None)} <= {str, Literal}


@pytest.mark.more
def test_every_key_refuses_every_value_of_another_kind(tmp_path: Path) -> None:
    assert len(KEYS) > 100
    tried = 0
    for key, annotation, default in KEYS:
        if key[0] in FREE:
            continue
        for value in bad_values(annotation, default):
            found = answers(key, value, tmp_path, can_set=not is_text(annotation))
            name = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in key)[1:]
            for source, problems in found.items():
                assert any(name in one for one in problems), (source, key, value, problems)
                assert not any("constrained" in one or "tuple" in one for one in problems)
            assert len(set(found.values())) == 1, (key, value, found)
            assert all("expected" in one or "quotes" in one for one in found["yaml"]), found
            tried += 1
    assert tried > 500


YAML_PROBLEMS: Final = {
    "supervision: {grace_s: 120}\nsupervision: {poll_s: 2}": 'found duplicate key "supervision"',
    "checkpoint: {interval: 5, interval: 6}": "(at line 3, column 27)",
    "checkpoint: {keep: {last: yes}}": 'checkpoint.keep.last: given "yes"; expected a whole number',
    "resources: {time_limit_min: 12:00:00}": 'given "12:00:00"; expected a whole number of minutes',
    "supervision: {grace_s: 1:30}": 'supervision.grace_s: given "1:30"; expected a number of secon',
    "supervision: {hangs: off}": 'supervision.hangs: given "off"; expected true or false',
    "config: {when: 2026-01-02}": "config: 2026-01-02: a date or a time; write it in quotes",
    "config: {4: x}": "config: given 4; expected text",
    "config: {a: !!set {x}}": "config: a set; expected text",
    "checkpoint:": "checkpoint: given null; expected a table of keys",
}


@pytest.mark.parametrize(("text", "expected"), YAML_PROBLEMS.items())
def test_yaml_is_yaml_1_2_without_repeated_keys(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", f"name: kelp\ncommand: [train.py]\n{text}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert expected in str(caught.value)


def test_words_of_yaml_1_1_are_text(tmp_path: Path) -> None:
    words = "supervision: {standby_after_s: off}\nconfig: {a: yes, b: 010}\n"
    text = f"name: kelp\ncommand: [t.py]\n{words}"
    spec = load_spec(write(tmp_path, "r.yaml", text))
    assert spec.supervision.standby_after_s == "off"
    assert spec.config == {"a": "yes", "b": 10}
    with pytest.raises(SpecError, match=r"%YAML 1\.1: expected YAML 1\.2"):
        load_spec(write(tmp_path, "r.yaml", f"%YAML 1.1\n---\n{text}"))


LOOKALIKES: Final = (
    "checkpoint.interval=１０m",
    "checkpoint.budget=５GB",
    "checkpoint.keep.ttl=７d",
    "supervision.ports=４００００-４００６３",
    "resources.gpu_type=hа100",
    "name=kеlp",
)


@pytest.mark.parametrize("override", LOOKALIKES)
def test_digits_and_letters_of_other_alphabets_are_refused(override: str) -> None:
    with pytest.raises(SpecError, match=f"{override.partition('=')[0]}: .*expected"):
        load_spec(PLAIN, [override])


def test_an_override_is_read_by_the_type_of_its_key() -> None:
    changes = ["name=1000", "resources.partition=007", "launch.python=true", "config.name=1000"]
    spec = load_spec({**PLAIN, "resources": {"executor": "slurm"}}, changes)
    assert (spec.name, spec.resources.partition, spec.launch.python) == ("1000", "007", "true")
    assert spec.config == {"name": 1000}


PROBLEMS: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"checkpoint": {"keep": {"best": {"metrik": "x"}}}},
        "did you mean checkpoint.keep.best.metric?",
    ),
    (
        {"resources": {"executor": "slurm", "fallbacks": [{"qos": "a", "partiton": "x"}]}},
        ".fallbacks[0].partiton: unknown key; did you mean resources.fallbacks[0].partition?",
    ),
    ({"command": [1]}, "command[0]: given 1; expected text; fix it or use --set command=…"),
    ({"command": []}, "command: given []; expected 1 item or more"),
    (
        {"supervision": {"silence_s": {"train": True}}},
        "silence_s.train: given true; expected a nu",
    ),
    ({"supervision": {"grace_s": HUGE}}, "supervision.grace_s: 1e+30: expected a finite number"),
    ({"environment": {"HOLDFAST_CONFIG": "{}"}}, "environment.HOLDFAST_CONFIG: Holdfast sets"),
    ({"environment": {"HOLDFAST_CHECKPOINT_INTERVAL": "5"}}, "itself; set checkpoint.interval"),
    ({"config": {"steps": "1000"}}, 'config.steps: given "1000"; expected a whole number above 0'),
    ({"config": {"max_steps": "1e3"}}, 'config.max_steps: given "1e3"; expected a whole number'),
    ({"config": {"steps": 10.5}}, "config.steps: given 10.5; expected a whole number above 0"),
    ({"config": {"steps": True}}, "config.steps: given true; expected a whole number above 0"),
]


@pytest.mark.parametrize(("change", "expected"), PROBLEMS)
def test_a_problem_names_the_key_as_it_was_written(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({**PLAIN, **change})
    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_number_of_steps_may_be_written_as_1e3() -> None:
    assert steps_total(load_spec(PLAIN, ["config.steps=1e3"]).config) == 1000
    # Frameworks write -1 for "none", and `auto` is a word of the program.
    assert (
        steps_total(load_spec(PLAIN, ["config.max_steps=-1", "config.steps=auto"]).config) is None
    )
    # A record of an older version stays readable.
    old = {**PLAIN, "config": {"steps": "1000"}, "environment": {"HOLDFAST_ROOT": "/r"}}
    assert RunSpec.read(old).config == {"steps": "1000"}


def test_variables_of_object_stores_may_be_in_a_spec() -> None:
    given = {"HOLDFAST_S3_ENDPOINT": "https://s3.example.org"}
    assert load_spec({**PLAIN, "environment": given}).environment == given


def test_a_wrong_value_starts_nothing(call: Call, tmp_path: Path, root: Path) -> None:
    text = "name: kelp\ncommand: [t.py]\ncheckpoint: {keep: {last: yes}}\n"
    answer = call("submit", write(tmp_path, "r.yaml", text))
    assert answer.status == 2
    assert 'checkpoint.keep.last: given "yes"' in answer.err
    assert not root.exists()
