"""The train state of a checkpoint that was imported: weights, and nothing else.

A program starts from it with the optimizer, schedulers, data position and random state that it has
made itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.trainer.planning.compare_keys import Selection

IMPORTED: Final = "imported"
FORMAT: Final = 1
MODEL: Final = "model."


def document_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `train_state.json`. `origin` describes the source."""
    return {
        "format": FORMAT,
        "step": 0,
        "seed": 0,
        "epoch": 0,
        "in_epoch": False,
        "data": {},
        "best": {},
        "world_size": 1,
        "rng": [],
        "forms": {},
        "empty_groups": {},
        "objects": {},
        IMPORTED: dict(origin),
    }


def is_imported(document: Mapping[str, Any]) -> bool:
    return IMPORTED in document


def names_in(metadata: Metadata, pick: Selection) -> set[str]:
    """Return the names of the parameters that a checkpoint has for a model, after renames."""
    keys = map(pick.renamed, metadata.state_dict_metadata)
    return {key.removeprefix(MODEL) for key in keys if pick.takes(key)}


def find_ties(tensors: Mapping[str, torch.Tensor], saved: Collection[str]) -> dict[str, str]:
    """Return the tied names that were not saved, each with a saved name of the same tensor.

    Other programs save a tied weight once. `tensors` are a model's own, by name, and `saved` are
    the names of a checkpoint in this model.
    """
    # By identity of the tensor, as torch ties weights: one tensor under several names.
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name in saved:
            first.setdefault(id(tensor), name)
    return {
        name: first[id(tensor)]
        for name, tensor in tensors.items()
        if name not in saved and id(tensor) in first
    }
