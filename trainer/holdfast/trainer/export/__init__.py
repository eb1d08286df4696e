"""Exports of a checkpoint in other formats: torch, safetensors, Hugging Face, stock DCP.

It runs in the job's environment as `python -m holdfast.trainer.export`, never in a training rank.
"""
