"""What every part of Holdfast agrees on: words, files, states, events and the node's shared memory.

Standard library, pydantic and xxhash only; nothing here imports another part of Holdfast.
"""
