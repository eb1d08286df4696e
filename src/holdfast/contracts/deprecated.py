"""Warnings about deprecated names of the public interface. CONTRIBUTING.md has the policy."""

from __future__ import annotations

import warnings


class HoldfastDeprecationWarning(DeprecationWarning):
    """A program uses a name that a later version of Holdfast will remove."""


def warn_deprecated(old: str, advice: str, *, removed_in: str, stacklevel: int = 2) -> None:
    """Warn that `old` is deprecated. `advice` says what to write instead.

    `removed_in` is the first version without it. The warning names the line that calls the caller
    of this function; a larger `stacklevel` names a line further up.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in Holdfast {removed_in}: {advice}",
        HoldfastDeprecationWarning,
        stacklevel=stacklevel + 1,
    )
