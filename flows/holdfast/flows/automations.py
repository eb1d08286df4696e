"""Prefect automations for runs, from the files in `templates/automations`.

A file has Prefect's own format, with two names in the place of ids: that of a deployment, and
`notification` for the block that sends alerts.
"""

from __future__ import annotations

import copy
from importlib import resources
from typing import Any, Final

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore

from holdfast.contracts.errors import SpecError
from holdfast.flows.deployments import open_client, read_block, read_deployment

FOLDER: Final = "templates/automations"
_DEPLOYMENT: Final = "deployment_id"
_BLOCK: Final = "block_document_id"


def shipped() -> list[dict[str, Any]]:
    folder = resources.files("holdfast.flows").joinpath(FOLDER)
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".yaml")), key=str)
    return [yaml.safe_load(one.read_text()) for one in files]


def is_alert(automation: dict[str, Any]) -> bool:
    return any(_BLOCK in action for action in automation["actions"])


def create_automations(notification: str = "") -> list[str]:
    """Create the automations or update those of the same names; return their names.

    `notification` is a notification block, as `type/name`. Without it, alerts are left out. Raises
    `SpecError` for another form, and `ServiceError` if Prefect has no such block, lacks a
    deployment, or cannot be used.
    """
    done = []
    with open_client() as client:
        block = str(read_block(client, *_parts(notification)).id) if notification else ""
        wanted = [one for one in shipped() if block or not is_alert(one)]
        ready = [_with_ids(client, one, block) for one in wanted]
        for automation in ready:
            _write(client, AutomationCore.model_validate(automation))
            done.append(str(automation["name"]))
    return done


def _write(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create the automation, or update the one of its name. One that is off stays off."""
    for found in client.read_automations_by_name(automation.name):
        # An operator may have switched it off on purpose.
        changed = automation.model_copy(update={"enabled": found.enabled})
        client.update_automation(found.id, changed)
        return
    client.create_automation(automation)


def _parts(notification: str) -> tuple[str, str]:
    """Return the type and the name of `type/name`. Raises `SpecError` for anything else."""
    kind, _, name = notification.partition("/")
    if not kind or not name:
        raise SpecError(f"--notify {notification}: expected TYPE/NAME, such as slack-webhook/team")
    return kind, name


def _with_ids(client: SyncPrefectClient, automation: dict[str, Any], block: str) -> dict[str, Any]:
    found = copy.deepcopy(automation)
    for action in found["actions"]:
        if _DEPLOYMENT in action:
            action[_DEPLOYMENT] = str(read_deployment(client, action[_DEPLOYMENT]).id)
        if _BLOCK in action:
            action[_BLOCK] = block
    return found
