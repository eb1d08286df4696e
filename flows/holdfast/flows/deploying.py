"""`holdfast deploy`: the deployments of all flows, in a work pool that is created if need be."""

from __future__ import annotations

import copy
from importlib import resources
from typing import Any, Final

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect.workers.base import BaseWorker

from holdfast.contracts.errors import ServiceError, SpecError
from holdfast.flows import blocks, deployments, operations
from holdfast.flows.train import train

POOL: Final = "holdfast"
POOL_TYPES: Final = ("process", "holdfast")
FLOWS: Final[tuple[Flow[Any, Any], ...]] = (
    train,
    operations.submit,
    operations.relaunch,
    operations.supervise,
    operations.resume,
    operations.sweep,
    operations.verify,
    operations.prune,
    operations.export,
    operations.drill,
)
# With it, a flow whose host is lost is noticed: see templates/automations/lost-flow.yaml.
HEARTBEAT_S: Final = 30
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
    with deployments.open_client() as client:
        block = (
            str(deployments.read_block(client, *_parts(notification)).id) if notification else ""
        )
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
            action[_DEPLOYMENT] = str(deployments.read_deployment(client, action[_DEPLOYMENT]).id)
        if _BLOCK in action:
            action[_BLOCK] = block
    return found


def deploy(pool: str = POOL, pool_type: str = "") -> list[str]:
    """Create the types of blocks, the work pool and the deployments; return the deployments.

    A second call updates the deployments; their schedules stay. `pool_type` is one of
    `POOL_TYPES`; empty: that of the pool, or `process` for a new one. Raises `ServiceError`, also
    for a pool of another type.
    """
    with deployments.open_client() as client:
        blocks.register_blocks()
        try:
            found = client.read_work_pool(pool).type
        except ObjectNotFound:
            found = pool_type or POOL_TYPES[0]
            worker = BaseWorker.get_worker_class_from_type(found)
            assert worker is not None, "both types are registered where Holdfast is installed"
            template = worker.get_default_base_job_template()
            # A pool that exists keeps its settings, which an operator may have changed.
            client.create_work_pool(
                WorkPoolCreate(name=pool, type=found, base_job_template=template)
            )
        if pool_type not in {"", found}:
            raise ServiceError(
                f"work pool {pool} has the type {found}, not {pool_type}; give the name of another "
                "pool with --pool, or delete this one with `prefect work-pool delete`"
            )
    return [_deploy(flow, pool) for flow in FLOWS]


def _deploy(flow: Flow[Any, Any], pool: str) -> str:
    # A module entry point runs the installed package. A file would add its folder to `sys.path`.
    deployment = flow.to_deployment(
        name=deployments.DEPLOYMENT,
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
        description=" ".join((flow.fn.__doc__ or "").split("\n\n")[0].split()),
        tags=["holdfast"],
        job_variables={"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}},
    )
    assert isinstance(deployment, RunnerDeployment), "called outside of any event loop"
    with deployments.translate_errors():
        deployment.apply()
    return f"{flow.name}/{deployments.DEPLOYMENT}"
