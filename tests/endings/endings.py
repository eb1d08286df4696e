"""The list of endings: how each is produced, what it needs, its cause, and the quoted evidence.

`quote` is text that the evidence must contain. It comes from the deciding record, not the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.contracts.states import Cause

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A crash of torchrun's ranks on this machine, captured as the agent sees it.

    `memory_bytes` limits the memory of the launch, `full_bytes` gives it a file system of that
    size, and `ends_torchrun` kills torchrun itself. `first` is the rank that must be named.
    """

    name: str
    cause: Cause
    quote: str
    first: int | None = 1
    command: tuple[str, ...] = ()
    memory_bytes: int = 0
    full_bytes: int = 0
    ends_torchrun: bool = False
    is_quick: bool = False
    is_confirmed: bool = True

    @property
    def argv(self) -> tuple[str, ...]:
        """The program's argv."""
        return self.command or ("ranks.py", self.name)


@dataclass(frozen=True, kw_only=True)
class JobEnding:
    """An ending of a whole job, captured as input of `classify`; `jobs.py` has it by name."""

    name: str
    cause: Cause | None
    quote: str
    on_slurm: bool = True
    is_confirmed: bool = True


# Written from the messages of torch, CUDA, NCCL and Slurm; not captured from real runs yet.
_GPU: Final = tuple(
    Crash(name=name, cause=cause, quote=quote, first=first, is_confirmed=False)
    for name, cause, quote, first in (
        ("gpu_oom", Cause.GPU_OOM, "CUDA out of memory", 1),
        ("gpu_oom_of_driver", Cause.GPU_OOM, "CUDA error: out of memory", 1),
        ("gpu_oom_of_library", Cause.GPU_OOM, "CUBLAS_STATUS_ALLOC_FAILED", 1),
        ("gpu_device_assert", Cause.USER_ERROR, "device-side assert triggered", 1),
        ("gpu_illegal_access", Cause.UNKNOWN, "an illegal memory access", 1),
        ("gpu_ecc", Cause.INFRASTRUCTURE, "uncorrectable ECC error", 1),
        ("gpu_missing", Cause.INFRASTRUCTURE, "No CUDA GPUs are available", 1),
        ("gpu_busy", Cause.INFRASTRUCTURE, "are busy or unavailable", 1),
        ("nccl_timeout", Cause.HANG, "Watchdog caught collective operation timeout", 0),
        ("nccl_remote_error", Cause.INFRASTRUCTURE, "signal 9 (SIGKILL)", 1),
        ("nccl_system_error", Cause.INFRASTRUCTURE, "unhandled system error", 0),
        ("nccl_duplicate_gpu", Cause.USER_ERROR, "ncclInvalidUsage", 1),
    )
)
CRASHES: Final = (
    *_GPU,
    Crash(name="rank_killed", cause=Cause.INFRASTRUCTURE, quote="signal 9 (SIGKILL)"),
    Crash(
        name="segmentation_fault", cause=Cause.UNKNOWN, quote="signal 11 (SIGSEGV)", is_quick=True
    ),
    Crash(name="abort", cause=Cause.UNKNOWN, quote="signal 6 (SIGABRT)"),
    Crash(name="bus_error", cause=Cause.UNKNOWN, quote="signal 7 (SIGBUS)"),
    Crash(name="terminated", cause=Cause.INFRASTRUCTURE, quote="signal 15 (SIGTERM)"),
    Crash(name="exit_code", cause=Cause.USER_ERROR, quote="exit code 3"),
    Crash(name="uncaught_exception", cause=Cause.USER_ERROR, quote="KeyError: 'labels'"),
    Crash(
        name="import_error",
        cause=Cause.USER_ERROR,
        quote="ModuleNotFoundError: No module named 'holdfast_needs_no_such_module'",
    ),
    Crash(name="missing_file", cause=Cause.USER_ERROR, quote="/data/train/shard-00017.bin"),
    Crash(
        name="bad_argument",
        cause=Cause.USER_ERROR,
        quote="error: the following arguments are required: --lr",
    ),
    Crash(name="assertion", cause=Cause.USER_ERROR, quote="AssertionError: expected (8, 4)"),
    Crash(name="nan_raised", cause=Cause.NUMERICS, quote="FloatingPointError: step 7: loss nan"),
    Crash(name="memory_error", cause=Cause.HOST_OOM, quote="MemoryError"),
    Crash(
        name="helper_out_of_memory",
        command=("variants.py", "helper_out_of_memory"),
        cause=Cause.HOST_OOM,
        quote="MemoryError",
    ),
    Crash(
        name="host_oom", cause=Cause.HOST_OOM, quote="kernel: oom_kill +1", memory_bytes=700 * MIB
    ),
    Crash(
        name="disk_full",
        cause=Cause.STORAGE_FULL,
        quote="No space left on device",
        full_bytes=MIB,
        is_quick=True,
    ),
    Crash(name="file_size_limit", cause=Cause.STORAGE_FULL, quote="File too large"),
    Crash(
        name="disk_full_while_handling",
        cause=Cause.STORAGE_FULL,
        quote="No space left on device",
        full_bytes=MIB,
    ),
    Crash(
        name="disk_full_in_group",
        cause=Cause.STORAGE_FULL,
        quote="No space left on device",
        full_bytes=MIB,
    ),
    Crash(
        name="database_full",
        cause=Cause.STORAGE_FULL,
        quote="database or disk is full",
        full_bytes=MIB,
    ),
    Crash(
        name="array_on_full_disk",
        cause=Cause.STORAGE_FULL,
        quote="requested and",
        full_bytes=MIB,
    ),
    Crash(
        name="copy_to_full_disk",
        cause=Cause.STORAGE_FULL,
        quote="No space left on device",
        full_bytes=MIB,
    ),
    Crash(name="port_in_use", cause=Cause.INFRASTRUCTURE, quote="Address already in use"),
    Crash(name="connection_refused", cause=Cause.INFRASTRUCTURE, quote="Connection refused"),
    Crash(
        name="store_hangs_up",
        cause=Cause.INFRASTRUCTURE,
        quote="Remote end closed connection",
    ),
    Crash(name="pool_worker_killed", cause=Cause.UNKNOWN, quote="BrokenProcessPool"),
    Crash(name="store_is_silent", cause=Cause.INFRASTRUCTURE, quote="timed out"),
    Crash(
        name="task_lost_its_server",
        cause=Cause.INFRASTRUCTURE,
        quote="IncompleteReadError",
    ),
    Crash(name="name_not_resolved", cause=Cause.INFRASTRUCTURE, quote="socket.gaierror"),
    Crash(name="permission_denied", cause=Cause.USER_ERROR, quote="PermissionError: [Errno 13]"),
    Crash(name="disk_read_error", cause=Cause.INFRASTRUCTURE, quote="Input/output error"),
    Crash(name="keyboard_interrupt", cause=Cause.INFRASTRUCTURE, quote="signal 2 (SIGINT)"),
    Crash(name="error_on_one_rank", cause=Cause.USER_ERROR, quote="expected 4 classes, got 5"),
    Crash(name="peer_left", cause=Cause.INFRASTRUCTURE, quote="by peer", first=0),
    Crash(name="collective_timeout", cause=Cause.HANG, quote="Timed out waiting", first=0),
    Crash(name="barrier_timeout", cause=Cause.HANG, quote="monitoredBarrier", first=0),
    Crash(
        name="rendezvous_timeout", cause=Cause.INFRASTRUCTURE, quote="wait timeout after", first=0
    ),
    Crash(name="store_unreachable", cause=Cause.INFRASTRUCTURE, quote="timed out"),
    Crash(name="store_port_taken", cause=Cause.INFRASTRUCTURE, quote="EADDRINUSE"),
    Crash(name="shape_mismatch", cause=Cause.USER_ERROR, quote="op.preamble.length", first=None),
    Crash(name="non_finite_gradients", cause=Cause.NUMERICS, quote="is non-finite"),
    Crash(name="anomaly", cause=Cause.NUMERICS, quote="returned nan values", first=None),
    Crash(name="tensor_too_large", cause=Cause.HOST_OOM, quote="DefaultCPUAllocator", first=None),
    Crash(
        # torch reports that a write failed, but not why.
        name="save_on_full_disk",
        cause=Cause.INFRASTRUCTURE,
        quote="iostream error",
        full_bytes=MIB,
    ),
    Crash(name="damaged_checkpoint", cause=Cause.USER_ERROR, quote="Error", first=None),
    Crash(name="loader_killed", cause=Cause.INFRASTRUCTURE, quote="killed by signal: Killed"),
    Crash(
        name="loader_segmentation_fault",
        cause=Cause.UNKNOWN,
        quote="killed by signal: Segmentation fault",
    ),
    Crash(name="loader_error", cause=Cause.USER_ERROR, quote="KeyError"),
    Crash(
        name="loader_oom",
        cause=Cause.HOST_OOM,
        quote="kernel: oom_kill +1",
        memory_bytes=2000 * MIB,
    ),
    Crash(
        name="program_missing",
        command=("no_such_program.py",),
        cause=Cause.USER_ERROR,
        quote="can't open file",
        first=None,
    ),
    Crash(
        name="torchrun_usage",
        command=("-m",),
        cause=Cause.USER_ERROR,
        quote="error: ",
        first=None,
        is_quick=True,
    ),
    Crash(
        name="torchrun_killed",
        command=("ranks.py", "waits"),
        cause=Cause.INFRASTRUCTURE,
        quote="torchrun failed without naming a rank",
        first=None,
        ends_torchrun=True,
    ),
)

JOBS: Final[tuple[JobEnding, ...]] = (
    JobEnding(
        name="agent_killed",
        cause=Cause.INFRASTRUCTURE,
        quote="its agent was killed",
        on_slurm=False,
    ),
    JobEnding(name="terminated_by_sender", cause=Cause.PREEMPTION, quote="SIGTERM", on_slurm=False),
    JobEnding(name="paused", cause=Cause.OPERATOR, quote="pause by ann", on_slurm=False),
    JobEnding(name="completed", cause=None, quote="", on_slurm=False),
    JobEnding(name="slurm_cancelled", cause=Cause.OPERATOR, quote="is CANCELLED"),
    JobEnding(name="slurm_cancelled_while_queued", cause=Cause.OPERATOR, quote="is CANCELLED"),
    JobEnding(name="slurm_preempted", cause=Cause.PREEMPTION, quote="PreemptTime=2"),
    JobEnding(
        name="slurm_preempted_without_session", cause=Cause.PREEMPTION, quote="PreemptTime=2"
    ),
    JobEnding(name="slurm_time_limit", cause=Cause.TIME_LIMIT, quote="time is up"),
    # The remaining nodes cannot tell this from the loss of the whole node.
    JobEnding(name="slurm_agent_killed", cause=Cause.NODE_FAILURE, quote="its agent is lost"),
    JobEnding(name="slurm_node_lost", cause=Cause.NODE_FAILURE, quote="was lost"),
    JobEnding(name="slurm_leading_node_lost", cause=Cause.NODE_FAILURE, quote="agent is lost"),
    JobEnding(name="slurm_only_node_lost", cause=Cause.NODE_FAILURE, quote="NODE_FAIL"),
    JobEnding(
        name="slurm_python_missing",
        cause=Cause.USER_ERROR,
        quote="/opt/no-such-environment/bin/python",
    ),
    JobEnding(
        name="slurm_out_of_memory",
        cause=Cause.HOST_OOM,
        quote="is OUT_OF_MEMORY",
        is_confirmed=False,
    ),
    JobEnding(
        name="slurm_boot_failed",
        cause=Cause.NODE_FAILURE,
        quote="is BOOT_FAIL",
        is_confirmed=False,
    ),
    JobEnding(
        name="slurm_option_refused",
        cause=Cause.USER_ERROR,
        quote="srun: unrecognized option '--no-such-option=3'",
        is_confirmed=False,
    ),
    JobEnding(name="slurm_module_missing", cause=Cause.USER_ERROR, quote="holdfast"),
)
EVERY: Final[tuple[Crash | JobEnding, ...]] = (*CRASHES, *JOBS)
