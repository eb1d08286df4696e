"""The entry point of the agent, which submitit starts on every node of an attempt."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.contracts.node.descriptors import raise_descriptor_limit
from holdfast.workers.agent.claim import claim
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.leading import AgentJournal, lead_attempt
from holdfast.workers.agent.member import run_member_agent
from holdfast.workers.agent.stops.signals import SignalBox


def run_agent(request_path: str) -> str:
    """Run this node's part of the attempt whose `request.json` is at `request_path`.

    Returns a description of how it ended, for the job's log.
    """
    signals = SignalBox()
    signals.install()
    # Node 0 needs a descriptor for each other node.
    raise_descriptor_limit()
    context = load_context(Path(request_path))
    if not context.is_lead:
        return run_member_agent(context, signals)
    with AgentJournal(context) as journal:
        if not claim(context, journal):
            return f"attempt {context.attempt.number} belongs to another job"
        return lead_attempt(context, signals, journal)


if __name__ == "__main__":
    print(run_agent(sys.argv[1]))
