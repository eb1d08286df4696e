"""`python -m holdfast.trainer.flusher`: the process of each node that makes staged steps durable.

Free of torch, so that it starts in a fraction of a second, and outside of torchrun's group, so that
it outlives the ranks."""
