"""What a checkpoint of a torchtitan trainer contains beside weights, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader

from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.records.topology import FIXED, GLOBAL_BATCHES
from holdfast.trainer.state.objects import RankLimited

FORMAT: Final = 1
TOKENS: Final = "ntokens_seen"


class TrainerState(RankLimited):
    """The state of a torchtitan `Trainer`: its step, its tokens and its pending validation.

    `saved` describes the launch that saved the restored checkpoint, and is None without one.
    `keeps_place` says that its loader has a place of its own, kept by each rank.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.keeps_place = False
        # True between the end of a step and the end of the validation that follows it.
        self.awaits_validation = False
        self.saved: Mapping[str, Any] | None = None

    @property
    def batch_parts(self) -> int:
        """The data-parallel degree: how many ranks get samples of their own."""
        dims = self._trainer.parallel_dims
        return int(dims.get_mesh("batch").size()) if dims.dp_enabled else 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step on all ranks together."""
        trainer = self._trainer
        local = trainer.config.training.local_batch_size * trainer.gradient_accumulation_steps
        return int(local) * self.batch_parts

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, the same on all ranks."""
        return {
            "format": FORMAT,
            "trainer": dict(self._trainer.state_dict()),
            "token_parts": self._token_parts,
            "batch_parts": self.batch_parts,
            "global_batch": self.global_batch,
            "awaits_validation": self.awaits_validation,
        }

    def rank_limits(self) -> dict[str, Any]:
        """Return which numbers of ranks can continue with the same samples in each step."""
        training = self._trainer.config.training
        if self.keeps_place:
            return {
                FIXED: "the place of its data loader is kept by rank; for a new run, use "
                "TokenDataLoader, which continues at every data-parallel degree"
            }
        if training.global_batch_size < 0:
            return {
                FIXED: "the global batch follows from the number of ranks; for a new run, set "
                f"training.global_batch_size={self.global_batch}"
            }
        return {GLOBAL_BATCHES: [self.global_batch // int(training.local_batch_size)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trainer's counters. Raises `CheckpointError` for a newer format."""
        if state["format"] > FORMAT:
            raise CheckpointError(
                f"this state of a torchtitan trainer has format {state['format']}; this version "
                f"of Holdfast reads {FORMAT}. Install the version that saved it, or a newer one"
            )
        own = dict(state["trainer"])
        if TOKENS in own:
            # Each rank counts its own tokens, and torchtitan logs the sum over the ranks.
            own[TOKENS] = own[TOKENS] * state["token_parts"] // self._token_parts
        self._trainer.load_state_dict(own)
        self.awaits_validation = state["awaits_validation"]
        self.saved = state

    @property
    def _token_parts(self) -> int:
        mesh = self._trainer.parallel_dims.get_optional_mesh("loss")
        return 1 if mesh is None else int(mesh.size())


class LoaderState:
    """This rank's state of a loader of torchtitan, which counts only at the same parallelism."""

    is_of_one_size = True

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader
        self.was_restored = False
        # torchtitan pickles the state of torchdata's loader, which is plain data itself.
        kind = type(loader)
        is_pickled = isinstance(loader, ParallelAwareDataloader) and (
            kind.state_dict is ParallelAwareDataloader.state_dict
            and kind.load_state_dict is ParallelAwareDataloader.load_state_dict
        )
        self._kind: Any = StatefulDataLoader if is_pickled else kind

    def state_dict(self) -> Any:
        return self._kind.state_dict(self._loader)

    def load_state_dict(self, state: Any) -> None:
        self._kind.load_state_dict(self._loader, state)
        self.was_restored = True

    def create_iterator(self) -> None:
        """Let the loader create its iterator, which draws a random number, if it has a state.

        An uninterrupted run draws none where a resumed one begins.
        """
        if self.was_restored and isinstance(self._loader, StatefulDataLoader):
            StatefulDataLoader.state_dict(self._loader)
