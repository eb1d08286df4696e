"""Losses that are not finite, or far above what they were: noticed, settled, gone back from."""
