"""`holdfast deploy`: the deployments of all flows, in a work pool that is created if need be."""

from __future__ import annotations

from typing import Any, Final

from prefect import Flow
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect.workers.base import BaseWorker

from holdfast.contracts.errors import ServiceError
from holdfast.flows import operations
from holdfast.flows.blocks import register_blocks
from holdfast.flows.deployments import DEPLOYMENT, open_client, translate_errors
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


def deploy(pool: str = POOL, pool_type: str = "") -> list[str]:
    """Create the types of blocks, the work pool and the deployments; return the deployments.

    A second call updates the deployments; their schedules stay. `pool_type` is one of
    `POOL_TYPES`; empty: that of the pool, or `process` for a new one. Raises `ServiceError`, also
    for a pool of another type.
    """
    with open_client() as client:
        register_blocks()
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
        name=DEPLOYMENT,
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
        description=" ".join((flow.fn.__doc__ or "").split("\n\n")[0].split()),
        tags=["holdfast"],
        job_variables={"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}},
    )
    assert isinstance(deployment, RunnerDeployment), "called outside of any event loop"
    with translate_errors():
        deployment.apply()
    return f"{flow.name}/{DEPLOYMENT}"
