"""The entry point of the agent, which the job starts on every node of an attempt.

The agent itself is imported after torchrun has been started, so that both load at the same time.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from holdfast.contracts.node.limits import raise_descriptor_limit
from holdfast.workers.agent.launch.loaded_torchrun import LoadedTorchrun


def run_agent(request_path: str) -> str:
    """Run this node's part of the attempt whose `request.json` is at `request_path`.

    Returns a description of how it ended, for the job's log.
    """
    torchrun = LoadedTorchrun.of(Path(request_path))
    try:
        return _run(Path(request_path), torchrun)
    finally:
        if torchrun is not None:
            torchrun.discard()


def _run(request_path: Path, torchrun: LoadedTorchrun | None) -> str:
    # torchrun loads meanwhile.
    from holdfast.workers.agent.claim import claim
    from holdfast.workers.agent.context import load_context
    from holdfast.workers.agent.leading import AgentJournal, lead_attempt
    from holdfast.workers.agent.member import run_member_agent
    from holdfast.workers.agent.stops.signals import SignalBox

    signals = SignalBox()
    signals.install()
    # Node 0 needs a descriptor for each other node.
    raise_descriptor_limit()
    context = replace(load_context(request_path), torchrun=torchrun)
    if not context.is_lead:
        return run_member_agent(context, signals)
    with AgentJournal(context) as journal:
        if not claim(context, journal):
            return f"attempt {context.attempt.number} belongs to another job"
        return lead_attempt(context, signals, journal)


if __name__ == "__main__":
    print(run_agent(sys.argv[1]))
