"""The response models of the errors of a run.

Times are ISO 8601 in UTC. Ranks are in short form: `0-7`, `3,9` or, with equal gaps, `0-1016:8`.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, Field


class ErrorSource(StrEnum):
    """Which record tells of an error."""

    RANK = "rank"
    TORCHRUN = "torchrun"
    AGENT = "agent"
    FLUSHER = "flusher"
    SUPERVISOR = "supervisor"
    JOURNAL = "journal"


class ErrorEntry(BaseModel):
    """One error, or equal errors of several ranks."""

    attempt: int
    launch: int | None = Field(description="null for an error outside any launch")
    source: ErrorSource
    kind: str = Field(description="`exception`, `killed` or `exit`, or the kind of a journal line")
    is_first: bool = Field(description="the first cause of its launch, as the records show it")
    is_secondary: bool = Field(description="it only reports the failure of another rank")
    text: str
    ranks: str
    ranks_count: int
    hosts: list[str]
    signal: str | None
    exit_code: int | None
    at: str | None
    until: str | None = Field(description="the time of the last of several equal errors")
    clock: str | None = Field(description="the host or the journal by whose clock `at` is")
    traceback: str | None
    file: str | None = Field(description="a log file that has the error")


class StackGroup(BaseModel):
    """Ranks with the same stack. `frames` are those of the main thread, innermost first."""

    ranks: str
    ranks_count: int
    frames: list[str]
    waits: bool = Field(description="the ranks wait for their peers")
    is_odd: bool = Field(description="most other ranks are elsewhere")
    problem: str | None = Field(description="why there are no frames")


class FlightGroup(BaseModel):
    """Ranks that are at the same call in a process group, by their flight records."""

    group: str
    ranks: str
    ranks_count: int
    call: str
    state: str
    place: str
    is_odd: bool


class StackDump(BaseModel):
    """The stacks of one suspected hang, from all nodes, the largest group first."""

    attempt: int
    launch: int | None
    number: int
    at: str | None
    state: str = Field(description="`confirmed`, `suspected` or `cleared`; else `unreported`")
    finding: str
    groups: list[StackGroup]
    flights: list[FlightGroup]
    flight_finding: str | None
    files: list[str] = Field(description="the folders of the dump, in the run's folder")
    unread: int = Field(description="how many files of stacks were not read")


class DifferingFact(BaseModel):
    """A fact that differs between two launches. Null: it is not recorded, or not set."""

    name: str
    before: str | None
    now: str | None


class LaunchName(BaseModel):
    """A launch. `number` is null for an attempt without one."""

    attempt: int
    number: int | None


class LaunchDifference(BaseModel):
    """What differs between the launch that failed and the last one before it that worked.

    A launch worked if it finished a step that no launch before it had, or committed a checkpoint.
    """

    failed: LaunchName
    worked: LaunchName | None = Field(description="null: no earlier launch did")
    reached: str = Field(description="the steps that the failed launch itself finished, as text")
    facts: list[DifferingFact]
    left_out: int = Field(description="how many more facts differ")


class AttemptErrors(BaseModel):
    """An attempt with errors, to choose from. `launches` are those that crashed or hung."""

    number: int
    state: str
    cause: str | None
    launches: list[int]


class RunErrors(BaseModel):
    """Why an attempt failed, and the attempts of its run that have errors.

    `first` is the first cause of the last launch with errors. `order_note` says how far the
    order of `entries` is certain. `unread` and `left_out` count what bounds have left out.
    """

    run: str
    attempt: int | None = Field(description="null if no attempt has errors")
    attempts: list[AttemptErrors]
    first: ErrorEntry | None
    entries: list[ErrorEntry]
    left_out: int
    unread: int
    order_note: str
    stacks: list[StackDump]
    difference: LaunchDifference | None
