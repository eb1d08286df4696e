"""What node 0's agent does when other nodes are lost: it continues on those that are left."""

from __future__ import annotations

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.history import load_history
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.decisions.lost_nodes import NodePlan, plan_nodes
from holdfast.workers.runs.feasibility import Feasibility


def plan_without(context: AgentContext, nodes: int, group: NodeGroup) -> NodePlan:
    """Return how the attempt continues, which trained on `nodes` nodes, without the lost ones.

    The sizes are those that a relaunch may have: by the spec, and by the newest checkpoint.
    """
    try:
        history = load_history(context.run)
        fits = Feasibility.of(history).allows
        return plan_nodes(
            history.spec,
            nodes=nodes,
            lost=group.lost,
            spares=len(group.spares),
            restarts_max=context.request.supervision.restarts_in_place,
            fits=fits,
        )
    except (HoldfastError, OSError) as error:
        # The supervisor reports why the run's records cannot be read.
        return NodePlan(reason=f"lost nodes: {', '.join(group.lost)}; {error}")
