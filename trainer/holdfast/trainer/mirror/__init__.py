"""`python -m holdfast.trainer.mirror`: copies of checkpoints in a directory or an object store."""
