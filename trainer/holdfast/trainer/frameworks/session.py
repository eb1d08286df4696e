"""A session for a framework that runs the training loop itself.

Adapters use it. Programs that have their own loop use `Session`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import checkpoint_id
from holdfast.trainer.data.order import local_batch
from holdfast.trainer.data.sampler import ElasticSampler
from holdfast.trainer.metrics import RESERVED
from holdfast.trainer.ranks import forks
from holdfast.trainer.session.lifetime import while_open
from holdfast.trainer.session.session import Session
from holdfast.trainer.staging.file_writers import Writer
from holdfast.trainer.streams.convert import is_streaming_dataset
from holdfast.trainer.streams.loader import EpochStream, StreamLoader, StreamOptions


class FrameworkSession(Session):
    """A `Session` whose steps, epochs and ends the framework reports."""

    def __init__(
        self,
        *parts: Any,
        start_from: str | Path | None = None,
        begins_at: int = 0,
        **options: Any,
    ) -> None:
        """Resumes as `Session` does, and takes its arguments.

        Args:
            parts: model, optimizers and schedulers, as for `Session`.
            start_from: the directory of a checkpoint of another run, with which this run begins
                while it has no checkpoint. The steps continue after it.
            begins_at: the steps that were complete before this run, if the program itself loads
                their state. It counts only while the run has no checkpoint.
            options: further arguments of `Session`.
        """
        self._start_from = Path(start_from) if start_from else None
        self._begins_at = begins_at
        super().__init__(*parts, **options)

    # --- the loop -------------------------------------------------------------------------

    @while_open
    def begin_steps(self, *, has_end: bool = False) -> bool:
        """Begins the steps of a loop that you write yourself, after its loader is in place.

        It restores the random generators to the resumed state. Without it, draws between the resume
        and the first step would change that step. Returns True when this rank must leave now. Pass
        `has_end` if the end of the epoch follows and no further step of it.
        """
        self._loop.is_at_end = has_end
        return self._enter_loop(is_last=True)

    @while_open
    def begin(self, total: int | None, *, has_end: bool = False) -> bool:
        """Begins the framework's loop, up to step `total`; `boundary` ends its steps.

        Restores the random generators. Returns True when this rank must leave now. Pass None
        if the number of steps is unknown. Pass `has_end` if a resume must first do the work that
        follows the restored step, and call `finish_end` after it.
        """
        self._loop.is_at_end = has_end
        if total is not None:
            self._loop.promise(steps=total)
        return self._enter_loop(is_last=True)

    def boundary(self, *, has_end: bool = False, ends_epoch: bool = False) -> bool:
        """Ends one step in a loop that you write yourself; saves if a checkpoint is due.

        Returns True when this rank must leave now. By then the last checkpoint is committed. Pass
        `has_end` if an evaluation or other work of this step follows, and call `finish_end` after
        it. A save that is due then waits for `finish_end`. `ends_epoch` marks the last step of an
        epoch of `epochs`: a due save then waits for the epoch's end.
        """
        # As `while_open`, which costs microseconds in each step.
        life = self._life
        if life.is_closed or life.forks != forks.count:
            life.require_open("boundary", self.step)
        return self._loop.boundary(has_end=has_end, ends_epoch=ends_epoch)

    @while_open
    def finish_end(self) -> None:
        """Completes the work that followed `boundary(has_end=True)`; saves if one is due."""
        self._loop.finish_end()

    @while_open
    def finish(self) -> None:
        """Commits the state after the last step. `close` then saves nothing more.

        For a framework that still changes the model, as by loading the best weights. The work that
        followed the last step is complete by then. An end before the promised number of steps is
        incomplete: see `close`. Raises `SaveError` if the last checkpoint could not be committed.
        """
        if not self._loop.is_finished:
            self._loop.is_at_end = False
            self._loop.finish(is_declared=False)

    # --- data -----------------------------------------------------------------------------

    @while_open
    def sampler_of_part(
        self, dataset_size: int, global_batch: int, total: int, *, part: int, parts: int
    ) -> ElasticSampler:
        """Returns a sampler as `sampler` does, where the framework divides the global batch.

        This rank gets part `part`, from 0, of `parts` equal parts of each step's samples.
        """
        return self._position.sampler(dataset_size, global_batch, total, (part, parts))

    @while_open
    def stream_of_part(
        self, source: Any, options: StreamOptions, name: str, *, part: int, parts: int
    ) -> StreamLoader:
        """Returns a loader as `stream` does, where the framework divides the global batch.

        This rank gets part `part`, from 0, of `parts` parts. Several ranks may get the same part.
        """
        self._require_before_steps()
        made = self._open_stream(source, options, name, part, parts)
        assert isinstance(made, StreamLoader)
        return made

    def stream_of_loader(self, source: Any, **options: Any) -> EpochStream:
        """Returns a loader as `stream` does, with the options of a framework's loader.

        The batch size of that loader counts, so a `StreamingDataset` gets it.
        """
        if is_streaming_dataset(source):
            size, ranks = options.get("batch_size"), self._position.world_size
            source.batch_size = size or local_batch(options["global_batch"], ranks)
        return self.stream(source, **options)

    # --- metrics --------------------------------------------------------------------------

    def log(self, /, **values: float) -> None:
        """Records metrics of the current step, as `Session.log` does.

        A framework's own `step` and `time` become `logged_step` and `logged_time`.
        """
        super().log(**{f"logged_{k}" if k in RESERVED else k: v for k, v in values.items()})

    # --- checkpoints ----------------------------------------------------------------------

    @while_open
    def checkpoint(self, *, wait: bool = False) -> None:
        """Requests a checkpoint at the end of this step or epoch. Call it on every rank.

        While both staging slots are still being written, the checkpoint is skipped. With `wait`,
        it waits for one of them.
        """
        super().checkpoint()
        self._loop.waits_for_slot = self._loop.waits_for_slot or wait

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that this rank knows to be committed, or 0."""
        return self._saver.committed_step

    @property
    def current_checkpoint(self) -> str | None:
        """The id of the checkpoint of the current step, or None while there is none.

        It was restored, or it is staged. Once it is committed, it has a manifest.
        """
        if not self._saver.has_staged(self.step):
            return None
        name = self._saver.staged_name
        return self.resumed_from if name is None else checkpoint_id(self._context.run.name, name)

    @while_open
    def write_file(self, path: Path, write: Writer) -> None:
        """Writes a file of the framework in the background, and replaces one that is there.

        `write` is called immediately, into memory. The node's flusher then makes the file durable,
        before it commits a checkpoint of a later moment, and also if this rank dies. Raises
        `SaveError` if an earlier file could not be written.
        """
        with self.phase("save"):
            self._saver.files.stage(path, write)

    @while_open
    def wait_for_files(self, path: Path | None = None) -> None:
        """Waits until the file last written to `path`, or every file, is there.

        Raises `SaveError` if a file could not be written.
        """
        with self.phase("save"):
            self._saver.files.wait(path)

    @while_open
    def keep_while_there(self, checkpoint: str, path: Path) -> None:
        """Keeps one of this run's checkpoints from deletion by keep rules while `path` exists."""
        name = checkpoint.rpartition(":")[2]
        self._recorder.event(EventKind.EXPORTED, checkpoint=name, format="link", path=str(path))

    def close(self, *, may_end_early: bool = True) -> None:
        """Waits for the files of `write_file`, then closes as `Session` does."""
        try:
            if not (self._life.is_over or self.has_failed):
                self._saver.files.wait()
        finally:
            super().close(may_end_early=may_end_early)

    def abandon(self) -> None:
        """Releases all resources without a save, so that another session can be made."""
        self._release(wait=True)
