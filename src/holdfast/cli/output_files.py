"""Checks of the files that a command will write, before its work begins."""

from __future__ import annotations

from pathlib import Path

from holdfast.contracts.errors import NotFoundError, SpecError


def check_folder_of(option: str, path: Path) -> None:
    """Raise `NotFoundError` if the folder of `path`, the value of `option`, does not exist."""
    if not path.expanduser().absolute().parent.is_dir():
        raise NotFoundError(f"{option} {path}: there is no folder {path.parent}")


def check_plot(path: Path) -> None:
    """Raise `SpecError` or `NotFoundError` if the plot of `--plot` could not be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise SpecError("--plot needs matplotlib; run `pip install matplotlib`") from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise SpecError(
            f"--plot {path}: ends in {path.suffix or 'nothing'}; expected .svg, .png or another "
            f"of matplotlib's formats: {', '.join(known)}"
        )
    check_folder_of("--plot", path)
