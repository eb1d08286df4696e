"""A hold-out set: endings that were not used to write the rules of `evidence.py`.

Do not change the rules and this set in the same commit. `MISSED` lists the variants that the rules
classify wrongly today. If you teach the rules a variant, move it to `endings.py` and add another
one here.
"""

from __future__ import annotations

from typing import Final

from tests.endings.endings import MIB, Crash
from tests.endings.records import FOLDER

from holdfast.contracts.states import Cause

VARIANTS_FOLDER: Final = FOLDER / "variants"
VARIANTS: Final = tuple(
    Crash(
        name=name,
        command=("variants.py", name),
        cause=cause,
        quote=quote,
        full_bytes=MIB if "full" in name else 0,
    )
    for name, cause, quote in (
        ("array_too_large", Cause.HOST_OOM, "Unable to allocate"),
        ("disk_full_renamed", Cause.STORAGE_FULL, "No space left on device"),
        ("helper_disk_full", Cause.STORAGE_FULL, "No space left on device"),
        ("distribution_of_nan", Cause.NUMERICS, "nan"),
        ("unknown_option", Cause.USER_ERROR, "KeyError: 'ReadTimeout'"),
        ("store_has_no_space", Cause.STORAGE_FULL, "507"),
        ("store_busy", Cause.INFRASTRUCTURE, "HTTP Error 503"),
        ("too_many_files", Cause.USER_ERROR, "Too many open files"),
        ("error_in_thread", Cause.INFRASTRUCTURE, "Input/output error"),
        ("peer_fails_first", Cause.USER_ERROR, "vocabulary of 50257"),
    )
)
# Both are classified as the program's own error.
MISSED: Final = frozenset({"distribution_of_nan", "store_has_no_space"})
