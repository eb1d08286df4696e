"""Lightning's loops and its checkpoint connector, with the places that a resume needs.

`Fit` gives the trainer's own objects these classes, so they keep all that Lightning has put into
them. The batch loop of Lightning 2.6, and where its boundary is:

    advance           fetch, forward, backward, optimizer step, on_train_batch_end
                      ── boundary: the step is complete, all ranks may stop here ──
    on_advance_end    evaluation if it is due, plateau schedulers, counters of the loggers

So a stop does not wait for an evaluation. A resume starts at the boundary and runs what follows it.
Lightning itself saves before the counters are complete, and skips the evaluation after a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from holdfast.trainer.frameworks.lightning.state import Place

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.lightning.fit import Fit


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of one epoch."""

    holdfast: Fit

    @property
    def done(self) -> bool:
        """False until the resume has run what follows the restored step."""
        return not self.holdfast.resumes_inside and super().done

    def reset(self) -> None:
        """Keep the restored counters if the epoch continues. They are those after a whole step."""
        if not self.holdfast.resumes_inside:
            super().reset()
            return
        # The evaluation that follows the restored step starts from its first batch.
        self._restarting = self.val_loop._restarting = False

    def on_run_start(self, data_fetcher: Any) -> None:
        """Note the state of the random generators before a new epoch's iterator is created."""
        fit_loop = self.trainer.fit_loop
        is_new = self.trainer.current_epoch > 0 and not fit_loop.is_resuming
        if is_new and not self.restarting:
            self.holdfast.data.before_iterator(fit_loop._combined_loader)
        super().on_run_start(data_fetcher)

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch, unless the checkpoint was made after it."""
        if self.holdfast.resumes_inside:
            return
        if self.batch_progress.current.ready == 0:
            self.holdfast.data.before_first_batch()
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End the step if the optimizer has stepped, and run what follows it."""
        place = self.holdfast.pass_resumed_place()
        if place is Place.AFTER_EVALUATION:
            return
        step = self.global_step
        has_stepped = place is Place.AFTER_STEP or step != self.holdfast.reached
        # An evaluation between two steps, while gradients accumulate, is no place for a save.
        has_end = has_stepped and self.has_end(data_fetcher)
        if has_stepped and place is None:
            self.holdfast.end_step(step, has_end=has_end)
        super().on_advance_end(data_fetcher)
        if has_end and not super().done:
            self.holdfast.finish_end(Place.AFTER_EVALUATION)

    def has_end(self, data_fetcher: Any) -> bool:
        """Return True if an evaluation or the end of the epoch follows, the same on all ranks."""
        if self._is_training_done or self.trainer.should_stop:
            return True
        # With an interval in seconds, each rank asks its own clock.
        is_timed = self.trainer._val_check_time_interval is not None
        return not is_timed and bool(self._should_check_val_fx(data_fetcher))


class FitLoop(_FitLoop):
    """The loop over epochs."""

    holdfast: Fit

    @property
    def done(self) -> bool:
        """False until the resume has run what follows the restored step."""
        return not self.holdfast.resumes_inside and super().done

    def run(self) -> None:
        """Train, then commit the last checkpoint."""
        self.holdfast.before_training()
        super().run()
        self.holdfast.close()

    def setup_data(self) -> None:
        """Create the loaders, at the restored position."""
        with self.holdfast.data.loading():
            super().setup_data()

    def _load_combined_loader_states(self) -> None:
        """Called by `setup_data` between the creation of the loaders and of their iterators."""
        if self.holdfast.resumed_place is None:
            super()._load_combined_loader_states()
        self.holdfast.data.before_iterator(self._combined_loader)

    def reset(self) -> None:
        """Find out where training continues."""
        super().reset()
        if self.holdfast.resumes_inside:
            # Lightning steps no plateau scheduler at the end of an epoch that was restarted.
            self._restarting = False
        elif self.holdfast.resumed_place is Place.BETWEEN_EPOCHS:
            # A new epoch begins as in an uninterrupted run: with a new iterator, and counters at 0.
            self.holdfast.pass_resumed_place()
            self._resuming_from_checkpoint = False
            for loop in (self, self.epoch_loop, self.epoch_loop.val_loop):
                loop._restarting = False

    def on_advance_start(self) -> None:
        """Begin an epoch, or continue it."""
        self.holdfast.enter()
        super().on_advance_start()

    def on_advance_end(self) -> None:
        """End an epoch."""
        super().on_advance_end()
        self.holdfast.finish_end(Place.BETWEEN_EPOCHS)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Leave the loaders out of a checkpoint of Holdfast, which has those of all ranks."""
        return {} if self.holdfast.is_capturing else super().on_save_checkpoint()

    def teardown(self) -> None:
        """Release the loaders. After a stop, end the program with status 0."""
        super().teardown()
        self.holdfast.leave_if_stopped()


class CheckpointConnector(_CheckpointConnector):
    """The connector that loads `ckpt_path`."""

    holdfast: Fit

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load `checkpoint_path`, unless the run has a newer checkpoint of Holdfast."""
        super().resume_start(self.holdfast.choose_start(checkpoint_path), weights_only)
