"""Opens a source of weights: finds its form and its files, and reads where the tensors lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.errors import CheckpointError, ForeignFileError
from holdfast.trainer.format.metadata import METADATA
from holdfast.trainer.planning.compare_keys import shorten
from holdfast.trainer.sources import dcp, deepspeed_zero, safetensors_file, tensors, torch_file

AUTO: Final = "auto"
SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
DCP: Final = "dcp"
DEEPSPEED: Final = "deepspeed"
FORMS: Final = (AUTO, SAFETENSORS, TORCH, DCP, DEEPSPEED)
# The names that Hugging Face's libraries use, with those of their sharded form.
_WHOLE: Final = {SAFETENSORS: "model.safetensors", TORCH: "pytorch_model.bin"}
_INDEX: Final = {form: f"{name}.index.json" for form, name in _WHOLE.items()}
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    SAFETENSORS: (".safetensors",),
    TORCH: (".pt", ".pth", ".bin", ".ckpt"),
}
INDEX_BYTES_MAX: Final = 64 << 20


def open_source(place: Path, form: str = AUTO, *, reads_dcp: bool = True) -> tensors.WeightsSource:
    """Return the weights in `place`, a directory or a file, without reading their bytes.

    `form` is one of `FORMS`. With `auto`, the first of safetensors, DCP, DeepSpeed and torch files
    that is there counts, so a model folder with several forms is read once. Without `reads_dcp`, a
    DCP directory is recognised and not read. Raises `CheckpointError` if there is no such source,
    with what was found instead, and for a source that is damaged or hostile.
    """
    place = Path(os.path.abspath(place.expanduser()))
    directory = place if place.is_dir() else place.parent
    names = _names_in(place)
    found = form if form != AUTO else _form_of(directory, names)
    if found is None or not _has(found, directory, names):
        wanted = "weights" if form == AUTO else f"files of the form {form}"
        raise CheckpointError(
            f"{place}: it has no {wanted}; expected {_expected(form)}. It has "
            f"{shorten(sorted(names)) or 'no files'}"
        )
    if found == DCP:
        files = tensors.SourceFiles(directory)
        parts, left_out = dcp.read_dcp(files) if reads_dcp else ([], [])
    elif found == DEEPSPEED:
        files = tensors.SourceFiles(directory)
        parts, left_out = deepspeed_zero.read_zero(files, directory, names)
    else:
        files = tensors.SourceFiles.of(directory)
        parts, left_out = _read_files(files, directory, found, names, is_file=place.is_file())
    # Of two files with one tensor, the order of their names would decide.
    _check_twice(parts, place)
    tensors.check_all(parts, files, place)
    return tensors.WeightsSource(
        *(place, files.base, found, tuple(parts), files.states, tuple(left_out)),
        is_snapshot=files.is_snapshot,
    )


def _names_in(place: Path) -> list[str]:
    """Return the names in a directory, or the name of a file. Links and pipes count as names."""
    try:
        if place.is_dir():
            return os.listdir(place)
    except OSError as error:
        raise CheckpointError(f"{place}: {error.strerror}; expected a readable folder") from error
    if not os.path.lexists(place):
        raise CheckpointError(f"{place}: no such file or folder; expected a source of weights")
    return [place.name]


def _form_of(directory: Path, names: Sequence[str]) -> str | None:
    order = (SAFETENSORS, DCP, DEEPSPEED, TORCH)
    return next((form for form in order if _has(form, directory, names)), None)


def _has(form: str, directory: Path, names: Sequence[str]) -> bool:
    """Return True if files of this form are among the names in `directory`."""
    if form == DCP:
        # A checkpoint with pipeline stages has `.metadata` in the folder of each stage only.
        return METADATA in names or "pp0" in names
    if form == DEEPSPEED:
        return deepspeed_zero.is_zero_folder(directory, names)
    return any(name == _INDEX[form] or name.endswith(_SUFFIXES[form]) for name in names)


def _expected(form: str) -> str:
    kinds = {
        SAFETENSORS: "*.safetensors files",
        DCP: f"a DCP directory with {METADATA}",
        DEEPSPEED: "a DeepSpeed folder with `latest`, or one of its steps",
        TORCH: f"a file of torch.save ({', '.join(_SUFFIXES[TORCH])})",
    }
    return kinds[form] if form in kinds else ", ".join(kinds.values())


def _read_files(
    files: tensors.SourceFiles, directory: Path, form: str, names: Sequence[str], *, is_file: bool
) -> tuple[list[tensors.SourcePart], list[str]]:
    """Return the tensors of all files of a form, and what else the files have."""
    index = None if is_file else _index_of(files, directory, form, names)
    chosen = sorted(set(index.values())) if index is not None else _choose(directory, form, names)
    parts: list[tensors.SourcePart] = []
    left_out: list[str] = []
    for name in chosen:
        if name not in names:
            raise CheckpointError(
                f"{directory}: the file {name} is missing, which {_INDEX[form]} names; copy it "
                "there, or download the folder again"
            )
        # The index is a file of somebody else. Its names are resolved below the folder like any
        # other.
        place = files.resolve(os.path.relpath(directory / name, files.base))
        more, others = _reader(form)(files, place)
        parts += more
        left_out += others
    if index is not None:
        there = {part.name for part in parts}
        if missing := sorted(index.keys() - there):
            raise CheckpointError(
                f"{directory}: {shorten(missing)}: {_INDEX[form]} names them, but their files do "
                "not have them; download the folder again"
            )
    return parts, left_out


def _reader(
    form: str,
) -> Callable[[tensors.SourceFiles, str], tuple[list[tensors.SourcePart], list[str]]]:
    if form == TORCH:
        return torch_file.read_torch
    return lambda files, path: (safetensors_file.read_safetensors(files, path), [])


def _choose(directory: Path, form: str, names: Sequence[str]) -> list[str]:
    if _WHOLE[form] in names:
        return [_WHOLE[form]]
    found = sorted(name for name in names if name.endswith(_SUFFIXES[form]))
    # Without an index nobody knows whether they are parts of one model or several models.
    if form == TORCH and len(found) > 1:
        raise CheckpointError(
            f"{directory}: it has several torch files, {shorten(found)}; give the path of one"
        )
    return found


def _index_of(
    files: tensors.SourceFiles, directory: Path, form: str, names: Sequence[str]
) -> dict[str, str] | None:
    """Return the file of each tensor by the folder's index, or None without an index."""
    if _INDEX[form] not in names:
        return None
    path = directory / _INDEX[form]
    try:
        place = files.resolve(os.path.relpath(path, files.base))
        table = json.loads(files.read(place, INDEX_BYTES_MAX))
        where: Any = table["weight_map"]
        is_sound = isinstance(where, dict) and all(map(_is_file_name, where.values()))
    except (OSError, ForeignFileError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: {str(error)[:200]}; expected a JSON object with `weight_map`"
        ) from error
    if not is_sound:
        raise CheckpointError(
            f"{path}: its weight_map does not map names to files in the same folder; download "
            "the folder again"
        )
    return dict(where)


def _is_file_name(name: Any) -> bool:
    is_plain = isinstance(name, str) and name not in {"", ".", ".."}
    return is_plain and "/" not in name and "\0" not in name


def _check_twice(parts: Sequence[tensors.SourcePart], place: Path) -> None:
    again = tensors.twice([part.name for part in parts if not any(part.offsets)])
    if again:
        raise CheckpointError(
            f"{place}: {shorten(again)}: several of its files have this tensor; expected each "
            "tensor once"
        )
