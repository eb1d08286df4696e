"""Creates a virtual environment for each peer, with pinned versions. All share one torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INSTALL_S_MAX: Final = 600.0
TORCH: Final = ("torch==2.13.0", "numpy==2.4.6")
# DLRover imports gRPC, which only this extra declares, and protobuf, which it does not declare.
PACKAGES: Final = {
    "torchrun": (),
    "nvrx": ("nvidia-resiliency-ext==0.4.1",),
    "dlrover": ("dlrover[k8s]==0.6.1", "protobuf==4.25.8"),
    "submitit": ("submitit==1.5.4",),
    "lightning": ("lightning==2.6.6",),
}


class InstallError(Exception):
    """A peer could not be installed. The message ends with pip's last output."""


@dataclass(frozen=True)
class Environments:
    """Environments in subfolders of `folder`, which are created once and then reused."""

    folder: Path

    def python_of(self, peer: str) -> Path:
        """Return the interpreter of a peer and install the peer if necessary.

        Holdfast's interpreter is the one that runs this program. Raises `InstallError`.
        """
        if peer == "holdfast":
            return Path(sys.executable)
        return self._install(peer, PACKAGES[peer], self._install("torch", TORCH))

    def versions_of(self, peer: str) -> dict[str, str]:
        """Return a peer's pinned versions."""
        return dict(pin.split("==") for pin in (*PACKAGES.get(peer, ()), *TORCH))

    def _install(self, name: str, pins: tuple[str, ...], torch: Path | None = None) -> Path:
        place = self.folder / name
        python, done = place / "bin" / "python", place / "installed.txt"
        if done.is_file() and done.read_text() == "\n".join(pins):
            return python
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        if torch is not None:
            site = Path("lib") / f"python{sys.version_info[0]}.{sys.version_info[1]}"
            shared = torch.parents[1] / site / "site-packages"
            (place / site / "site-packages" / "torch.pth").write_text(f"{shared}\n")
        if pins:
            _run([str(python), "-m", "pip", "install", "--quiet", *pins])
        done.write_text("\n".join(pins))
        return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise InstallError(
            f"{' '.join(command)}: not finished within {INSTALL_S_MAX:.0f} s"
        ) from None
    if done.returncode:
        raise InstallError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
