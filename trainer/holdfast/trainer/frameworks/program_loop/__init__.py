"""Loops that a program writes itself, over epochs and over loaders that its framework prepared.

The adapters for Accelerate and for Fabric share this: the place in the data, the end of each step,
and the random generators.

| module | purpose |
|---|---|
| `order.py` | the order of a loader, noted when a pass over it begins |
| `loader.py` | a loader that reports each batch |
| `streamed.py` | a loader over a stream, which the session reads |
| `progress.py` | the passes under way, and the counters of the run |
| `training.py` | the session, the epochs, the end of each step, and what a program calls |
"""
