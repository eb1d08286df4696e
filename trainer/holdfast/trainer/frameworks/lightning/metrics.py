"""Values that Lightning accumulates over an epoch, and those that callbacks read.

`self.log(..., on_epoch=True)` accumulates in the trainer, and torchmetrics in the module. Neither
is in a checkpoint of Lightning. After a resume in the middle of an epoch, the epoch's value, and a
choice of the best model by it, would cover the rest of the epoch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

# The fields of Lightning's description of a logged value that are plain data.
PLAIN: Final = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
SHARED: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
OF_CONNECTOR: Final = ("_first_loop_iter", "_current_fx")


class EpochMetrics:
    """The metrics of a trainer's `fit`, as plain data and back."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._modules: Mapping[str, Any] = {}

    def shared_state(self) -> dict[str, Any]:
        """Return the latest values, which monitors and plateau schedulers read."""
        connector = self._trainer._logger_connector
        return {name: dict(getattr(connector, name)) for name in SHARED}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        for name in SHARED:
            setattr(self._trainer._logger_connector, name, dict(state[name]))

    def rank_state(self) -> dict[str, Any]:
        """Return the values that this rank has accumulated since the epoch began."""
        connector = self._trainer._logger_connector
        results = self._trainer.fit_loop.epoch_loop._results
        return {
            "shared": self.shared_state(),
            "connector": {name: getattr(connector, name) for name in OF_CONNECTOR},
            "results": {k: _describe(m) for k, m in results.items() if _is_portable(m)},
            "modules": {
                name: {"updates": metric._update_count, "state": _values_of(metric)}
                for name, metric in self._metric_modules()
            },
        }

    def load_rank(self, state: Mapping[str, Any]) -> None:
        self.load_shared(state["shared"])
        for name in OF_CONNECTOR:
            setattr(self._trainer._logger_connector, name, state["connector"][name])
        self._modules = state["modules"]
        self._restore_modules()
        results = self._trainer.fit_loop.epoch_loop._results
        for key, one in state["results"].items():
            results[key] = self._logged(one)

    def restore_modules_again(self) -> None:
        """Restore the metrics of the module, which its `on_train_start` may have reset."""
        self._restore_modules()
        self._modules = {}

    def _restore_modules(self) -> None:
        for name, metric in self._metric_modules():
            if name in self._modules:
                saved = self._modules[name]
                _restore(metric, saved["state"], saved["updates"])

    def _metric_modules(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._trainer.lightning_module.named_modules():
            if isinstance(module, Metric):
                yield name, module

    def _logged(self, one: Mapping[str, Any]) -> Any:
        """Return a logged value of Lightning from what `_describe` returned."""
        trainer = self._trainer
        meta = _Metadata(
            **{name: one[name] for name in PLAIN}, reduce_fx=getattr(torch, one["reduce"])
        )
        # As in `LightningModule.log`, which compares the description with its own.
        meta.sync = _Sync(
            fn=trainer.strategy.reduce,
            _should=one["sync"],
            rank_zero_only=one["rank_zero_only"],
        )
        logged = _ResultMetric(meta, is_tensor=one["is_tensor"])
        if one["is_tensor"]:
            logged.to(trainer.strategy.root_device)
            _restore(logged, one["state"], one["updates"])
        else:
            logged.value = trainer.lightning_module.get_submodule(one["metric_attribute"])
            logged._update_count = one["updates"]
        logged.has_reset = one["has_reset"]
        return logged


def _is_portable(logged: Any) -> bool:
    """Return False for values over a process group of the program's own, which has no name."""
    return logged.meta.sync.group is None and (
        logged.is_tensor or logged.meta.metric_attribute is not None
    )


def _describe(logged: Any) -> dict[str, Any]:
    """Return a logged value and its description as plain data."""
    meta = logged.meta
    return {
        **{name: getattr(meta, name) for name in PLAIN},
        "reduce": meta.reduce_fx.__name__,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "is_tensor": logged.is_tensor,
        "has_reset": logged.has_reset,
        "updates": logged._update_count,
        "state": _values_of(logged) if logged.is_tensor else {},
    }


def _values_of(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _restore(metric: Any, values: Mapping[str, Any], updates: int) -> None:
    for name, value in values.items():
        live = getattr(metric, name)
        if isinstance(value, list):
            setattr(metric, name, [item.to(metric.device) for item in value])
        else:
            setattr(metric, name, value.to(live.device if torch.is_tensor(live) else "cpu"))
    metric._update_count = updates
    metric._computed = None
