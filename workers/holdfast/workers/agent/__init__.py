"""The agent: one process per node that runs torchrun, signals, heartbeats and the flusher."""
