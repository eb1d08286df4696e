"""What a person writes about a run: `RunSpec`, its parts, and where each value came from.

A module belongs here if it describes or checks keys of a spec. Reading a spec from a file is the
work of `flows.parameters`; what the program or the environment adds is resolved in the trainer.
"""
