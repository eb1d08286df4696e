"""What happens to a run's checkpoints outside of training: keep, delete, verify and export them.

A module belongs here if it works on committed checkpoints. It reads manifests and bytes, never
tensors: code that needs torch runs in the job's environment, see `trainer_call`.
"""
