"""Who leads an attempt: node 0, and after its loss the node that has taken the next term.

Terms are numbered files, created exclusively. Node 0 has term 1, the claim. A lead takes the next
term before it continues without lost nodes, and before it writes the outcome. A node that took part
in the newest term's launch may take the next one when that lead is lost. So of two nodes that each
believe the other to be lost, only one continues, and the other neither trains nor ends the attempt.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.attempt import Term, create_document, newest_term
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.nodes.heartbeats import heartbeat_stamp, interval_s

FIRST: Final = 1
POLL_S: Final = 0.2
# Lower places take the term earlier.
TURN_S: Final = 2.0
QUIET_BEATS: Final = 1.5
QUIET_S_MIN: Final = 1.0
# For how long a node that cannot lead waits for another one to do so.
FOLLOW_WAIT_S: Final = 90.0


class SupersededError(HoldfastError):
    """Another node leads the attempt now."""


def take_term(context: AgentContext, number: int, *, is_end: bool = False) -> bool:
    """Create term `number` for this node. Return False if another node has it."""
    make_directory(context.attempt.terms)
    term = Term(
        number=number,
        node=context.node,
        host=context.host,
        job_id=context.job_id,
        taken_at=time.time(),
        is_end=is_end,
    )
    return create_document(context.attempt.term(number), term)


def renew(context: AgentContext, *, is_end: bool = False) -> int:
    """Take the next term for the node that leads; return its number.

    With `is_end`, no other term can follow. Raises `SupersededError` if another node has taken one.
    """
    newest = newest_term(context.attempt)
    leads = newest.node == context.node if newest is not None else context.node == 0
    number = (newest.number if newest is not None else FIRST) + 1
    if not leads or not take_term(context, number, is_end=is_end):
        raise SupersededError(
            f"attempt {context.attempt.number}: another node leads it, so {context.host} leaves"
        )
    return number


def next_lead(context: AgentContext, runtime: NodeRuntime, lead: int) -> Term | None:
    """Return the term that follows the loss of node `lead`, which may be this node's own.

    Lower places come first. Returns None if the lost node still leads without this one, or if no
    node takes the term in time.
    """
    may_lead = runtime.is_training
    every_s = interval_s(context.request.supervision.heartbeat_s, context.nodes_of_job)
    turn_s = TURN_S * max(0, runtime.place.node - 1)
    stamp, began = heartbeat_stamp(context.attempt), time.monotonic()
    claim_at = began + max(QUIET_S_MIN, QUIET_BEATS * every_s) + turn_s
    while time.monotonic() < began + FOLLOW_WAIT_S:
        newest = newest_term(context.attempt)
        number = newest.number if newest is not None else FIRST
        if newest is not None and newest.is_end:
            return None
        if newest is not None and number > runtime.place.term and newest.node != lead:
            return newest
        # A later term of the lost lead left this node out.
        may_lead = may_lead and number == runtime.place.term
        if may_lead and time.monotonic() >= claim_at:
            if heartbeat_stamp(context.attempt) != stamp:
                return None
            if take_term(context, number + 1):
                return newest_term(context.attempt)
        time.sleep(POLL_S)
    return None
