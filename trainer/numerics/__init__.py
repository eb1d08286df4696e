"""Losses that are not finite, or far above what they were: detected, resolved, rolled back."""
