"""The device mesh that a state is sharded over, as the manifest records it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor


def describe_mesh(flat: Mapping[str, Any]) -> dict[str, int]:
    """Return mesh dimension names and sizes, outermost first. Empty if there is no DTensor.

    A state may use several meshes, for example another one for experts. For equal names the larger
    size counts. A dimension without a name is called `dim0`, `dim1`, …
    """
    found: dict[str, int] = {}
    seen = set()
    for value in flat.values():
        if not isinstance(value, DTensor) or id(value.device_mesh) in seen:
            continue
        mesh = value.device_mesh
        seen.add(id(mesh))
        names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
        for name, size in zip(names, mesh.shape, strict=True):
            found[name] = max(found.get(name, 0), int(size))
    return found
