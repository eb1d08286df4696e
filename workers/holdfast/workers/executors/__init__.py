"""The launcher of a local job, under the name by which supervisors of every version start it.

A supervisor starts `holdfast.workers.executors.local_launch` with the Python of the job, where
another version of Holdfast may be installed. Nothing else belongs here.
"""
