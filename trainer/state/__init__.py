"""What a checkpoint holds of a program: canonical names, optimizers, objects, random states."""
