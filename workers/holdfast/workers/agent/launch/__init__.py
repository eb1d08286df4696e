"""One launch of torchrun on one node: its command, its warm standby, its flusher."""
