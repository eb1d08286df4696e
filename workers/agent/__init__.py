"""The agent: one process per node that owns torchrun, signals, heartbeats and the flusher."""
