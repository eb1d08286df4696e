"""Who leads an attempt: node 0, and after its loss the node that has taken the next term.

Terms are numbered files, created exclusively. Node 0 has term 1, the claim. A lead takes the next
term before it continues without lost nodes, and before it writes the outcome. A node that took part
in the newest launch may take the next one when its lead is lost. So of two nodes that each believe
the other to be lost, only one continues, and the other neither trains nor ends the attempt.

A lead may be lost after it took a term and before its nodes know of it. So one more file, created
exclusively, decides whether launches begin in a term: the lead creates it once all nodes of the
launch know the term, or a node that does not know the term, before it takes the next one.

Only the node that would take the term reads whether the attempt can continue. If it cannot, that
node leaves a file. The others read nothing but the terms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records import documents
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.nodes.heartbeats import heartbeat_stamp, interval_s

FIRST: Final = 1
POLL_S: Final = 0.2
# With a thousand nodes, the run's storage lists the terms two thousand times a second.
POLL_S_PER_NODE: Final = 0.0005
# Lower places take the term earlier.
TURN_S: Final = 2.0
# How late a heartbeat may be. With many nodes, they are seconds apart already.
LATE_BEATS_MAX: Final = 0.5
LATE_S_MAX: Final = 2.0
QUIET_S_MIN: Final = 1.0
# For how long a node that cannot lead waits for another one to do so.
FOLLOW_WAIT_S: Final = 90.0


class SupersededError(HoldfastError):
    """Another node leads the attempt now."""


class StillLeadsError(HoldfastError):
    """The lead that this node has lost is alive."""


def take_term(context: AgentContext, number: int, *, is_end: bool = False) -> bool:
    """Create term `number` for this node. Return False if another node has it."""
    make_directory(context.attempt.terms)
    term = _term(context, number, is_end=is_end)
    return documents.create_document(context.attempt.term(number), term)


def _term(context: AgentContext, number: int, *, is_end: bool) -> documents.Term:
    return documents.Term(
        number=number,
        node=context.node,
        host=context.host,
        job_id=context.job_id,
        taken_at=time.time(),
        is_end=is_end,
    )


def _announce_end(context: AgentContext, number: int) -> None:
    """Tell the other nodes that the attempt cannot continue after term `number`."""
    make_directory(context.attempt.terms)
    documents.create_document(context.attempt.term_end(number), _term(context, number, is_end=True))


def begin_term(context: AgentContext, number: int) -> None:
    """Let launches begin in term `number`, which this node has taken.

    Every node of the first launch must know the term: it may take the next one. Raises
    `SupersededError` if another node has decided that none begins.
    """
    if _decide_on(context, number) != context.node:
        raise SupersededError(
            f"attempt {context.attempt.number}: another node continues after term {number}, so "
            f"{context.host} leaves"
        )


def _is_void(context: AgentContext, number: int) -> bool:
    """Decide that no launch begins in a term of another node. False if one may have begun."""
    taken = documents.read_document(documents.Term, context.attempt.term(number))
    return taken is not None and _decide_on(context, number) not in {taken.node, None}


def _decide_on(context: AgentContext, number: int) -> int | None:
    """Return the node that decided whether launches begin in a term: this one if none had."""
    make_directory(context.attempt.terms)
    path = context.attempt.term_begin(number)
    documents.create_document(path, _term(context, number, is_end=False))
    found = documents.read_document(documents.Term, path)
    return found.node if found is not None else None


def leads(context: AgentContext) -> bool:
    """Return True if no other node has taken a term since this one led."""
    return _leads(context, documents.newest_term(context.attempt))


def _leads(context: AgentContext, newest: documents.Term | None) -> bool:
    return newest.node == context.node if newest is not None else context.node == 0


def renew(context: AgentContext, *, is_end: bool = False) -> int:
    """Take the next term for the node that leads; return its number.

    With `is_end`, no other term can follow. Raises `SupersededError` if another node has taken one.
    """
    newest = documents.newest_term(context.attempt)
    number = (newest.number if newest is not None else FIRST) + 1
    if not _leads(context, newest) or not take_term(context, number, is_end=is_end):
        raise SupersededError(
            f"attempt {context.attempt.number}: another node leads it, so {context.host} leaves"
        )
    return number


def quiet_s(every_s: float) -> float:
    """Return for how long a lead that writes heartbeats every `every_s` seconds has written none.

    A lead that is alive after all cannot continue without the next term.
    """
    return max(QUIET_S_MIN, every_s + min(LATE_BEATS_MAX * every_s, LATE_S_MAX))


def next_lead(
    context: AgentContext,
    runtime: NodeRuntime,
    lead: int,
    may_continue: Callable[[], bool] = lambda: True,
) -> documents.Term | None:
    """Return the term that follows the loss of node `lead`, which may be this node's own.

    Lower places come first. `may_continue()` reads whether the attempt can continue. The first node
    in turn calls it, and the others only when it has done nothing. Returns None if the attempt
    cannot continue, if the lost node still leads without this one, or if no node takes the term in
    time. Raises `StillLeadsError` if nothing stopped the heartbeats of the lost node.
    """
    may_lead = runtime.is_training
    nodes = context.nodes_of_job
    every_s = interval_s(context.request.supervision.heartbeat_s, nodes)
    turn_s = TURN_S * max(0, runtime.place.node - 1)
    stamp, began = heartbeat_stamp(context.attempt), time.monotonic()
    claim_at = began + quiet_s(every_s) + turn_s
    # The first in turn reads while the heartbeats are watched.
    asks_at, is_asked = claim_at if turn_s else began, False
    beats_on = False
    while time.monotonic() < began + FOLLOW_WAIT_S:
        newest, ends = documents.read_terms(context.attempt)
        number = newest.number if newest is not None else FIRST
        if newest is not None and newest.is_end:
            return None
        if newest is not None and number > runtime.place.term and newest.node != lead:
            return newest
        if number in ends:
            return None
        if not is_asked and number == runtime.place.term and time.monotonic() >= asks_at:
            is_asked = True
            if not may_continue():
                _announce_end(context, number)
                return None
            continue
        if may_lead and time.monotonic() >= claim_at:
            seen = heartbeat_stamp(context.attempt)
            beats_on = seen != stamp
            if not beats_on:
                # A launch of a later term may train without this node.
                later = range(runtime.place.term + 1, number + 1)
                may_lead = all(_is_void(context, one) for one in later)
                if may_lead and take_term(context, number + 1):
                    return documents.newest_term(context.attempt)
            # The lead may find only later that it is cut off, and then steps back.
            stamp, claim_at = seen, time.monotonic() + quiet_s(every_s) + turn_s
        time.sleep(max(POLL_S, POLL_S_PER_NODE * nodes))
    if beats_on and may_lead:
        raise StillLeadsError(f"node {lead} still writes heartbeats, so this node leaves it")
    return None


def step_back(context: AgentContext, is_over: Callable[[], bool]) -> None:
    """Let another node take the next term, for as long as a node waits for that.

    For a lead that has probably been cut off from the others. It must write no heartbeats
    meanwhile. Returns at once when `is_over()`, or when no other node can continue.
    """
    newest = documents.newest_term(context.attempt)
    known = newest.number if newest is not None else FIRST
    give_up = time.monotonic() + FOLLOW_WAIT_S
    while time.monotonic() < give_up and not is_over():
        newest, ends = documents.read_terms(context.attempt)
        if known in ends or (newest is not None and newest.number > known):
            return
        time.sleep(POLL_S)
