"""`save` and `async_save`, with the parameters of stock DCP's.

Each save costs one exchange of small messages between the ranks of the group, before the copy. So
an error of one rank before its copy is raised on all ranks. A copy that fails is reported to the
other ranks through their flushers.
"""

from __future__ import annotations

import os
import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as stock_async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.checkpoint.utils import _api_bc_check

from holdfast.contracts.disk.paths import MANIFEST, METADATA, CheckpointName
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import SaveError, SpecError
from holdfast.trainer.dcp import delegation, record
from holdfast.trainer.dcp.channel import (
    Channel,
    CommitFuture,
    DcpSaveError,
    channel_of,
    choose_group,
    describe,
    portable,
)
from holdfast.trainer.dcp.state import (
    SaveForm,
    State,
    call_stateful,
    find_unreadable,
    form_of,
    stageable,
)
from holdfast.trainer.placed import SavePlace, clear, new_token
from holdfast.trainer.ranks.collective import attempt

KEYS_WARNED_MAX: Final = 8
_warned: Final[set[str]] = set()


@_api_bc_check  # type: ignore[untyped-decorator]
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save `state_dict` into the directory `checkpoint_id`. Return when it is committed.

    All ranks of `process_group` call this together, as for `torch.distributed.checkpoint.save`. A
    checkpoint that was in the directory stays complete until the new one is durable.

    Raises `DcpSaveError` on all ranks if the save failed on one of them. It is a `SaveError` and
    stock DCP's `CheckpointException`.
    """
    group = choose_group(process_group, no_dist=no_dist)
    begun = _begin(
        state_dict,
        _Target.of(checkpoint_id, storage_writer, use_collectives=use_collectives),
        planner,
        group,
    )
    if isinstance(begun, str):
        if begun:
            delegation.warn("save", begun)
        metadata: Metadata = stock_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return metadata
    # The wait is over on all ranks before any rank raises, or the others would hang in the next
    # collective.
    _, error = attempt(lambda: _wait(begun))
    _raise_together(channel_of(group), error)
    return begun.result()


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Stage `state_dict` and return a future of its commit, whose result is the metadata.

    The state may change when the call returns. The node's flusher writes it, so both values of
    `async_checkpointer_type` do the same. With a `DefaultStager` that stages asynchronously, it
    returns an `AsyncSaveResponse`, as stock DCP does.

    Raises `DcpSaveError` on all ranks if the state of one of them cannot be saved. The future
    raises `SaveError` if the save was not committed.
    """
    group = choose_group(process_group, no_dist=no_dist)
    target = _Target.of(checkpoint_id, storage_writer, use_collectives=use_collectives)
    begun: CommitFuture | str = delegation.why_not_staged(async_stager) or ""
    if not begun:
        begun = _begin(state_dict, target, planner, group)
    if isinstance(begun, str):
        if begun:
            delegation.warn("async_save", begun)
        return stock_async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    if isinstance(async_stager, DefaultStager) and async_stager._config.use_async_staging:
        staged: Future[None] = Future()
        staged.set_result(None)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=begun)
    return begun


@dataclass(frozen=True)
class _Target:
    """The directory of a save. `reason` says why stock DCP must write it, if it must."""

    directory: Path
    may_overwrite: bool = True
    save_id: str | None = None
    reason: str | None = None

    @classmethod
    def of(
        cls,
        checkpoint_id: str | os.PathLike[str] | None,
        writer: StorageWriter | None,
        *,
        use_collectives: bool,
    ) -> _Target:
        found = delegation.directory_of_save(checkpoint_id, writer)
        if isinstance(found, str):
            return cls(Path(), reason=found)
        if not use_collectives:
            return cls(found, reason="use_collectives is False")
        may_overwrite = bool(getattr(writer, "overwrite", True))
        return cls(found, may_overwrite, getattr(writer, "save_id", None))

    def check(self) -> None:
        """Raise if a checkpoint must not be written here."""
        # Resume would take a directory of that name for a checkpoint of the session.
        if CheckpointName.parse(self.directory.name) is not None:
            raise SpecError(
                f"checkpoint_id={self.directory}: this is the name of a checkpoint of a run, which "
                "a Session writes; choose another name"
            )
        if not self.may_overwrite and (self.directory / METADATA).exists():
            # The same error as stock DCP's.
            raise RuntimeError("Checkpoint already exists and self.overwrite=False.")


@dataclass(frozen=True)
class _Own:
    """What one rank has to save, and how. `changes` says what of it does not fit the plan.

    `staged` is the state as the engine stages it, None if the engine cannot.
    """

    state: State
    form: SaveForm
    save_id: str | None = None
    staged: State | None = None
    changes: str | None = None


@dataclass(frozen=True)
class _Message:
    """What a rank sends to all others before a save. The first rank chooses the last four.

    `target` is the directory without a link.
    """

    problem: WRAPPED_EXCEPTION | None
    directory: Path
    form: SaveForm
    is_changed: bool
    target: Path
    step: int
    token: str
    parent: str | None


def _begin(
    state_dict: dict[str, Any],
    target: _Target,
    planner: SavePlanner | None,
    group: dist.ProcessGroup | None,
) -> CommitFuture | str:
    """Stage a save and return its future, or return as text why stock DCP must save.

    The text is empty if stock DCP raises an error for the arguments. Raises `DcpSaveError` on all
    ranks.
    """
    if target.reason is not None:
        return target.reason
    began = time.monotonic()
    channel = channel_of(group)
    given = target.directory
    if channel.is_root:
        # A link may be moved meanwhile, so the first rank follows it for all.
        target = replace(target, directory=delegation.target_of(given))
    own, error = attempt(lambda: _prepare(channel, state_dict, target, planner))
    step = record.RECORD.next_step(target.directory) if channel.is_root else 0
    message = _Message(
        problem=portable(error),
        directory=given,
        form=own.form if own else SaveForm.ENGINE,
        is_changed=own is not None and own.changes is not None,
        target=target.directory,
        step=step,
        token=new_token() if channel.is_root else "",
        parent=record.RECORD.parent,
    )
    messages: list[_Message] = channel.tree.gather_all(message)
    _raise_failures(error, {rank: one.problem for rank, one in enumerate(messages)})
    _check_same_directory(messages)
    form = max(one.form for one in messages)
    if form is SaveForm.STOCK:
        if channel.is_root:
            # The old manifest would not match the files that stock DCP writes.
            (target.directory / MANIFEST).unlink(missing_ok=True)
        return "the state has tensors whose bytes are not their values"
    assert own is not None
    is_changed = any(one.is_changed for one in messages)
    return _stage(channel, own, messages[0], _planner_for(form, planner), is_changed, began)


def _prepare(
    channel: Channel, state_dict: dict[str, Any], target: _Target, planner: SavePlanner | None
) -> _Own:
    """Return this rank's state in the form that is staged, once a slot is free for it."""
    target.check()
    directory, pending = target.directory, channel.pending
    if channel.is_root:
        # The remains of saves that were cut off, but not those of saves in flight.
        clear(directory, besides=pending.tokens_in(directory))
    state = call_stateful(state_dict)
    form = max(form_of(state), SaveForm.ENGINE if _is_default(planner) else SaveForm.PLANNER)
    # Before the exchange of messages, so that a rank with full slots cannot hold others in the
    # copy.
    if not pending.wait_for_slot(flush_timeout_s()):
        raise SaveError(
            f"{directory}: the two saves before this one are still being written after "
            f"{flush_timeout_s():.0f} s; the storage may be hanging"
        )
    if form is not SaveForm.ENGINE:
        return _Own(state, form, target.save_id)
    staged = stageable(state)
    with pending.engine() as engine:
        engine.plan_with(None)
        changes = engine.changes(staged)
    if changes is not None:
        _warn_of_unreadable(staged)
    return _Own(state, form, target.save_id, staged, changes)


def _stage(
    channel: Channel,
    own: _Own,
    first: _Message,
    planner: SavePlanner | None,
    is_changed: bool,
    began: float,
) -> CommitFuture:
    """Plan if needed and copy the state. All ranks call this together.

    If the copy of one rank fails, the futures of all ranks fail.
    """
    directory = first.target
    state = own.state if planner is not None or own.staged is None else own.staged
    with channel.pending.engine() as engine:
        engine.plan_with(planner)
        if is_changed and planner is None:
            try:
                # Agreed in the messages, so all ranks plan, or none does.
                engine.prepare(state, timeout_s=flush_timeout_s())
            except SaveError as error:
                # All ranks raise it.
                failures = {channel.tree.index: _wrap_exception(error)}
                raise DcpSaveError(f"nothing was saved: {error}", failures) from error

        def stage() -> str:
            return engine.save(
                state,
                None,
                step=first.step,
                reason=record.REASON,
                parent=first.parent,
                timeout_s=flush_timeout_s(),
                place=SavePlace(directory, first.token, own.save_id or first.token),
            )

        future = channel.pending.add(stage, directory, first.token)
        if channel.is_root and not future.done():
            record.RECORD.staged(
                directory, first.step, engine.tensor_bytes, time.monotonic() - began
            )
    return future


def _is_default(planner: SavePlanner | None) -> bool:
    """Return True for stock DCP's default planner, whose plan the engine can make and keep."""
    if planner is None:
        return True
    if type(planner) is not DefaultSavePlanner:
        return False
    # The engine's plan balances what each rank writes.
    is_balanced = not planner.dedup_save_to_lowest_rank
    return is_balanced and planner.flatten_state_dict and planner.flatten_sharded_tensors


def _planner_for(form: SaveForm, planner: SavePlanner | None) -> SavePlanner | None:
    """Return the planner that plans this save, None for the plan that the engine keeps."""
    if form is SaveForm.ENGINE:
        return None
    if planner is None:
        return _PerSavePlanner()
    if type(planner) is DefaultSavePlanner:
        return _PerSavePlanner(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )
    return planner


class _PerSavePlanner(DefaultSavePlanner):
    """Stock DCP's default planner, treated as a custom planner: it plans every save."""


def _wait(future: CommitFuture) -> None:
    """Wait until a save is committed. Raises `SaveError`."""
    try:
        if (error := future.exception(flush_timeout_s())) is not None:
            raise error
    except TimeoutError as error:
        raise SaveError(
            f"the save was not committed within {flush_timeout_s():.0f} s; the storage may be "
            "hanging"
        ) from error


def _raise_together(channel: Channel, error: Exception | None) -> None:
    """Raise on all ranks if one of them has an error. All ranks call this."""
    found = channel.tree.gather_all(portable(error))
    _raise_failures(error, dict(enumerate(found)))


def _raise_failures(own: Exception | None, problems: dict[int, WRAPPED_EXCEPTION | None]) -> None:
    failures = {rank: problem for rank, problem in problems.items() if problem is not None}
    if failures:
        raise DcpSaveError(f"nothing was saved: {describe(failures)}", failures) from own


def _check_same_directory(messages: list[_Message]) -> None:
    different = {str(one.directory) for one in messages}
    if len(different) > 1:
        raise DcpSaveError(
            f"the ranks gave different values of checkpoint_id: {', '.join(sorted(different))}. "
            "Give the same directory on all ranks",
            {},
        )


def _warn_of_unreadable(state: State) -> None:
    """Warn once of each entry that a load will refuse, because opening it may run code."""
    found = {key: why for key, why in find_unreadable(state).items() if key not in _warned}
    if not found:
        return
    _warned.update(found)
    shown = "; ".join(f"{key}: {why}" for key, why in [*found.items()][:KEYS_WARNED_MAX])
    more = f" and {len(found) - KEYS_WARNED_MAX} more" if len(found) > KEYS_WARNED_MAX else ""
    warnings.warn(
        f"dcp.save stores entries that dcp.load opens only if you allow their classes: {shown}"
        f"{more}. Save plain values instead, or call torch.serialization.add_safe_globals before "
        "dcp.load",
        stacklevel=6,
    )
