"""The agent's entry: what submitit starts on every node of an attempt."""

from __future__ import annotations


def run_agent(request_path: str) -> str:
    """Run this node's part of the attempt whose `request.json` is at `request_path`."""
    raise NotImplementedError(request_path)
