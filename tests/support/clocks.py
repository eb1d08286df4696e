"""Wall clocks that differ between the processes of a test, and that are set while they run."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("clock.c")
COMPILE_S: Final = 120
_SHIFT: Final = struct.Struct("=q")


def build_library(folder: Path) -> Path:
    """Compile `clock.c` into `folder`."""
    library = folder / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    return library


class Clock:
    """The wall clock of the processes that are started with `environment`."""

    def __init__(self, library: Path, file: Path, shift_s: float = 0.0) -> None:
        file.write_bytes(bytes(_SHIFT.size))
        with open(file, "r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(file)}
        self.set(shift_s)

    def set(self, shift_s: float) -> None:
        """Set the clock this many seconds ahead of the machine's."""
        _SHIFT.pack_into(self._map, 0, int(shift_s * 1e9))
