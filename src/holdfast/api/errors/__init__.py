"""Why a run failed: the errors of all its processes in one order, equal stacks, and what differs.

Only functions that read or merge records of failures belong here. What decides about a run is in
`workers.decisions`.
"""
