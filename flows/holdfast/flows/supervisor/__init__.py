"""The supervisor of a run: it watches, decides, relaunches, and delivers what happened.

A module belongs here if it works while a run is supervised. It does not import Prefect, so a run
needs no server; Prefect's flows, deployments and worker are in the folder above.
"""
