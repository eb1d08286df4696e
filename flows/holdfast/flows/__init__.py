"""Prefect's flows, deployments, events and worker, and the supervisor that they start.

A module in this folder imports Prefect or serves one that does. The supervisor itself is in
`supervisor` and needs no Prefect.
"""

# Allow one import name only: a second one would create a second copy of every class.
if __name__ != "holdfast.flows":
    raise ImportError(f"import holdfast.flows, not {__name__}: the folder is part of the package")
