"""`holdfast schema`: the JSON Schema of a run spec, for editors."""

from __future__ import annotations

from holdfast.cli.shared.output import echo, to_json_text
from holdfast.contracts.spec.schema import run_spec_schema


def schema() -> None:
    """Print the JSON Schema of a run spec, with which an editor completes and checks its keys.

    `holdfast init` writes it beside the spec. After an upgrade, write it again.
    """
    echo(to_json_text(run_spec_schema(), 1))
