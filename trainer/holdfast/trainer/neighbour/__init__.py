"""Copies of a node's snapshots in the memory of another node, its neighbour.

Threads of the flusher copy sealed snapshots, send them over the network and keep those that they
receive. They know bytes and files, not tensors. The flusher writes a copy when its node is lost.
"""
