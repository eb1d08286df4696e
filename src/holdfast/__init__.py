"""Holdfast keeps cluster training jobs alive."""

__version__ = "0.1.0"
