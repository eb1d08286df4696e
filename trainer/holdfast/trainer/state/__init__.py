"""The state that a checkpoint saves: canonical names, optimizers, objects, random generators."""
