"""Errors of the one-machine Slurm cluster.

ClusterError (RuntimeError)
├── PrerequisiteError   the machine lacks a package or a right
├── DaemonError         a daemon died, or a wait on it ran out; carries the tail of its log
└── ClusterStateError   the directory is not in the state that the command needs
"""


class ClusterError(RuntimeError):
    """Whatever goes wrong with a test cluster."""


class PrerequisiteError(ClusterError):
    """The machine lacks a package or a right that the cluster needs."""


class DaemonError(ClusterError):
    """A daemon died, or did not do in time what was waited for.

    `log_tail` holds the last lines of the logs that tell why ("" where there are none).
    """

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


class ClusterStateError(ClusterError):
    """A cluster's directory is missing, already in use, or names no such node."""
