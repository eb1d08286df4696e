"""What the processes of one node, and the nodes of one attempt, tell each other.

A module belongs here if it is shared memory, a socket, or an agreement over them: the rank status
table, the channel between nodes, the stop agreement, the environment of a rank.
"""
