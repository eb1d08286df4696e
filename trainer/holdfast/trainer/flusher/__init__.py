"""The flusher, `python -m holdfast.trainer.flusher`: writes and commits the steps of one node.

It does not import torch, so it starts in a fraction of a second. It runs outside torchrun's process
group, so it outlives the ranks."""
