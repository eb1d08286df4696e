"""The agent: one process per node that runs torchrun, signals, heartbeats and the flusher.

The modules here lead an attempt on its nodes. What they observe is in `watch`, why they stop in
`stops`, what they start in `launch`, and the checks of nodes are in `health` and `notices`.
"""
