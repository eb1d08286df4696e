"""The samples of each training step, the same at every rank count."""
