"""Node 0's record of a checkpoint that is to blame for crashes."""

from __future__ import annotations

from itertools import islice

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records import checkpoint_choice, history_cache
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.decisions.blame import Blame, find_blame


def blame_checkpoint(context: AgentContext, launch: int, journal: JournalWriter) -> str:
    """If a checkpoint is to blame for the crash of `launch`, journal that; return why, or ''.

    Each later resume then passes over the checkpoint, as after a rollback. The journal must have
    the line that the launch has ended.
    """
    blame = _find(context, launch)
    if blame is None:
        return ""
    journal.append(
        EventKind.ROLLED_BACK,
        attempt=context.attempt.number,
        launch=launch,
        to=str(blame.to),
        excluded=[str(blame.checkpoint)],
        step=blame.checkpoint.step,
        crash=blame.crash,
        launches=[list(place) for place in blame.launches],
        reason=blame.reason,
    )
    return blame.reason


def _find(context: AgentContext, launch: int) -> Blame | None:
    if context.request.program.is_watched:
        # Such a program chooses its checkpoint itself.
        return None
    try:
        history = history_cache.load_tallied(context.run)
        newest = list(islice(checkpoint_choice.branch_of(context.run, history), 2))
    except (HoldfastError, OSError):
        # What cannot be read proves nothing.
        return None
    names = [name for one in newest if (name := CheckpointName.parse(one.name))]
    is_own = bool(newest) and newest[0].run_uid == context.request.run_uid
    if not is_own:
        return None
    return find_blame(
        history.events, newest[0].run, names, attempt=context.attempt.number, launch=launch
    )
