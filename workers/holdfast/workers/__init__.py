"""Everything that happens to a run outside of its training ranks, and without Prefect.

`nodes` and `schedulers` know machines and Slurm, `decisions` decides, `runs` and `checkpoints` act,
and `agent` runs on each node of a job. submitit is imported only here.
"""

# One import name only: under a second one every class would exist twice.
if __name__ != "holdfast.workers":
    raise ImportError(
        f"import holdfast.workers, not {__name__}: the folder is a part of the package"
    )
