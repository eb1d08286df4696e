"""Errors of the one-machine Slurm cluster.

ClusterError (RuntimeError)
├── PrerequisiteError   the machine lacks a package or a permission
├── DaemonError         a daemon died or did not answer in time; contains the end of its log
└── ClusterStateError   the directory is not in the state that the command needs
"""


class ClusterError(RuntimeError):
    """Base class of the errors of a test cluster."""


class PrerequisiteError(ClusterError):
    """The machine lacks a package or a permission that the cluster needs."""


class DaemonError(ClusterError):
    """A daemon died, or an operation took too long.

    `log_tail` has the last lines of the relevant logs, or "" without any.
    """

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


class ClusterStateError(ClusterError):
    """A cluster's directory is missing or already in use, or there is no such node."""
