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
from prefect.exceptions import ObjectNotFound

from holdfast.contracts.errors import ServiceError
from holdfast.flows.deployments import api_url, open_client

FOLDER: Final = "templates/automations"
NOTIFICATION: Final = "notification"
_DEPLOYMENT: Final = "deployment_id"
_BLOCK: Final = "block_document_id"


def shipped() -> list[dict[str, Any]]:
    """Return the automations of the files, by name."""
    folder = resources.files("holdfast.flows").joinpath(FOLDER)
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".yaml")), key=str)
    return [yaml.safe_load(one.read_text()) for one in files]


def is_alert(automation: dict[str, Any]) -> bool:
    """Return whether the automation sends a notification."""
    return any(_BLOCK in action for action in automation["actions"])


def create_automations(notification: str = "") -> list[str]:
    """Create the automations or update those of the same names; return their names.

    `notification` is a notification block, as `type/name`. Without it, alerts are left out. Raises
    `ServiceError` if Prefect has no such block, lacks a deployment, or cannot be used.
    """
    done = []
    with open_client() as client:
        block = _block_id(client, notification) if notification else ""
        wanted = [one for one in shipped() if block or not is_alert(one)]
        ready = [_with_ids(client, one, block) for one in wanted]
        for automation in ready:
            _write(client, AutomationCore.model_validate(automation))
            done.append(str(automation["name"]))
    return done


def _write(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create the automation, or update the one of its name, which keeps its being on or off."""
    for found in client.read_automations_by_name(automation.name):
        changed = automation.model_copy(update={"enabled": found.enabled})
        client.update_automation(found.id, changed)
        return
    client.create_automation(automation)


def _with_ids(client: SyncPrefectClient, automation: dict[str, Any], block: str) -> dict[str, Any]:
    """Return the automation with ids in the place of names."""
    found = copy.deepcopy(automation)
    for action in found["actions"]:
        if _DEPLOYMENT in action:
            action[_DEPLOYMENT] = _deployment_id(client, action[_DEPLOYMENT])
        if _BLOCK in action:
            action[_BLOCK] = block
    return found


def _deployment_id(client: SyncPrefectClient, name: str) -> str:
    try:
        return str(client.read_deployment_by_name(name).id)
    except ObjectNotFound as error:
        raise ServiceError(
            f"Prefect has no deployment {name} at {api_url()}; `holdfast deploy` creates it"
        ) from error


def _block_id(client: SyncPrefectClient, text: str) -> str:
    kind, _, name = text.partition("/")
    try:
        return str(client.read_block_document_by_name(name, kind, include_secrets=False).id)
    except ObjectNotFound as error:
        there = client.read_block_documents(offset=0, limit=50)
        names = sorted(f"{one.block_type.slug}/{one.name}" for one in there if one.block_type)
        raise ServiceError(
            f"--notify {text}: Prefect has no such block at {api_url()}; expected type/name, such "
            f"as slack-webhook/team. It has: {', '.join(names) or 'no blocks'}"
        ) from error
