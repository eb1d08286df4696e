"""Lightning's `Fabric` with Holdfast's checkpoints, stops and resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric as LightningFabric
from lightning.fabric.connector import _is_using_cli
from torch.distributed import is_torchelastic_launched

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.lightning import fabric_schedulers
from holdfast.trainer.frameworks.lightning.callback import torchrun_size
from holdfast.trainer.frameworks.lightning.fabric_elastic import check_strategy
from holdfast.trainer.frameworks.lightning.fabric_training import FabricLoader, FabricTraining
from holdfast.trainer.frameworks.program_loop.methods import LoopMethods

fabric_schedulers.watch()


class Fabric(LoopMethods[FabricTraining], LightningFabric):
    """A `Fabric` that resumes by itself and stops on all ranks after the same step.

    Loop over `fabric.epochs(n)` in place of `range(n)`. A step is complete when the program asks
    the loader for the batch after the optimizer's step. Then Holdfast saves if a save is due. When
    the ranks have agreed to stop, the process ends there with status 0.
    """

    def __init__(self, *, session: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes the arguments of Lightning's, and in `session` further ones of `Session`.

        `session={"interval": "10m"}` is an example. Under torchrun, `devices` and `num_nodes` are
        those of torchrun, and Fabric is launched. Raises `SpecError` for a strategy that is not
        supported, and if Fabric itself would start the processes.
        """
        is_under_torchrun = is_torchelastic_launched()
        if (
            is_under_torchrun
            and not _is_using_cli()
            and not isinstance(kwargs.get("devices"), list)
        ):
            kwargs |= torchrun_size()
        super().__init__(**kwargs)
        check_strategy(self.strategy)
        self._require_started(is_under_torchrun)
        self._training = FabricTraining(self, session or {})
        if is_under_torchrun and not self._launched:
            super().launch()

    # --- the loop -------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints, by name.

        Models, optimizers and torch's schedulers are there without it. The states must be the same
        on all ranks. Raises `SpecError` for a name that is taken, and after the run has resumed.
        """
        self._training.register(objects)

    def close(self) -> None:
        """Saves the state that is not saved yet, waits for the commit, and closes the session.

        The end of `epochs` does so. Call it only if the program leaves that loop early, for example
        by `break`. Such a run is complete. Raises `SaveError` if the commit failed.
        """
        self._training.close()

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs to the loggers as Lightning does, and numbers to the run's metrics too."""
        super().log_dict(metrics, step=step)
        self._record_numbers(metrics)

    # --- preparation ----------------------------------------------------------------------

    def setup(self, module: Any, *optimizers: Any, scheduler: Any = None, **kwargs: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        self._training.require_unopened(module)
        given = super().setup(module, *optimizers, scheduler=scheduler, **kwargs)
        parts = given if isinstance(given, tuple) else (given,)
        self._training.add_model(parts[0])
        for each in parts[1 : 1 + len(optimizers)]:
            self._training.add_optimizer(each)
        self._training.add_scheduler(scheduler)
        return given

    def setup_module(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        self._training.require_unopened(module)
        given = super().setup_module(module, *args, **kwargs)
        self._training.add_model(given)
        return given

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        for each in optimizers:
            self._training.require_unopened(each)
        given = super().setup_optimizers(*optimizers)
        for each in given if isinstance(given, tuple) else (given,):
            self._training.add_optimizer(each)
        return given

    def _setup_dataloader(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets up a loader as Lightning does, so that its place can be restored."""
        inner = super()._setup_dataloader(dataloader, *args, **kwargs)
        progress = self._training.progress
        loader = FabricLoader(inner, len(progress.loaders), self._training.iterate)
        progress.add(loader)
        return loader

    # --- the processes --------------------------------------------------------------------

    def _require_started(self, is_under_torchrun: bool) -> None:
        """Raise `SpecError` if Fabric itself would start processes, or would not use them all."""
        environment = getattr(self.strategy, "cluster_environment", None)
        is_external = environment is None or environment.creates_processes_externally
        starts = getattr(self.strategy, "_start_method", "popen") != "popen"
        if self.world_size > 1 and (starts or not is_external):
            raise SpecError(
                f"Fabric would start {self.world_size} processes itself; start the program with "
                "`holdfast submit`, or with torchrun, so that each rank has its place in the run"
            )
        if is_under_torchrun and self.world_size != _ranks_of_torchrun():
            raise SpecError(
                f"Fabric has {self.world_size} ranks and torchrun started {_ranks_of_torchrun()}, "
                "so each would train alone; leave out devices, num_nodes and strategy"
            )


def _ranks_of_torchrun() -> int:
    size = torchrun_size()
    return size["devices"] * size["num_nodes"]
