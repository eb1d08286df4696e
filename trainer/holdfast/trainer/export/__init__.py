"""Exports of a checkpoint in other formats: torch, safetensors, Hugging Face, stock DCP."""
