"""Repositories of the Hugging Face Hub: where an export is pushed to, and weights come from.

The library `huggingface_hub` finds the address and the token itself, in `HF_ENDPOINT`, `HF_TOKEN`
or its own files. Holdfast neither reads, stores nor prints the token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.errors import PreflightError, ServiceError, SpecError
from holdfast.contracts.plain_text import plain_line

SCHEME: Final = "hf://"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPOSITORY: Final = re.compile(rf"{_NAME}/{_NAME}")
_PLACE: Final = re.compile(rf"{SCHEME}({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
# Weights and the list of their shards. No pickle and no code is fetched.
FETCHED: Final = ("*.safetensors", "*.safetensors.index.json")
TEXT_CHARACTERS_MAX: Final = 400


@dataclass(frozen=True)
class HubPlace:
    """A repository of models, at a branch, a tag or a commit; by default its main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repository}{at}"


def parse_place(text: str) -> HubPlace:
    """Parse `hf://OWNER/NAME` or `hf://OWNER/NAME@REVISION`. Raises `SpecError`."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise SpecError(f"{text[:200]!r}: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return HubPlace(found[1], found[2])


def check_repository(text: str) -> str:
    """Return the name of a repository. Raises `SpecError` if it is none."""
    if not _REPOSITORY.fullmatch(text):
        raise SpecError(f"--push {text[:200]!r}: expected OWNER/NAME of a repository of the Hub")
    return text


def create(repository: str, *, private: bool) -> None:
    """Create a repository of models, unless it is there.

    A missing token or right is found out before an export takes hours. Raises `ServiceError` if the
    Hub refuses, and `PreflightError` without its library.
    """
    library = _library()
    with _translated(repository):
        library.HfApi().create_repo(repository, private=private or None, exist_ok=True)


def push(folder: Path, repository: str, *, message: str) -> HubPlace:
    """Commit the files of `folder` to the main branch; return the place of the commit.

    Files that the repository has besides stay. Raises like `create`.
    """
    library = _library()
    with _translated(repository):
        done = library.HfApi().upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message=message
        )
        return HubPlace(repository, str(done.oid))


def fetch(place: HubPlace) -> tuple[Path, HubPlace]:
    """Fetch the weights of a repository into the Hub's own cache.

    Return their folder, and the place with the commit that the revision stands for. Raises
    `ServiceError` if there is no such repository or revision, or no safetensors in it.
    """
    library = _library()
    with _translated(place.repository):
        facts = library.HfApi().model_info(place.repository, revision=place.revision)
        names = [one.rfilename for one in facts.siblings or ()]
        if not any(name.endswith(".safetensors") for name in names):
            raise ServiceError(
                f"{place}: has no safetensors, and nothing else is fetched; convert its weights "
                "first"
            )
        folder = library.snapshot_download(
            place.repository, revision=facts.sha, allow_patterns=list(FETCHED)
        )
    return Path(folder), HubPlace(place.repository, str(facts.sha))


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise PreflightError(
            f"the Hugging Face Hub needs huggingface_hub: {error}; install Holdfast with the extra "
            "`hub`"
        ) from error
    return huggingface_hub


@contextmanager
def _translated(repository: str) -> Iterator[None]:
    """Turn the errors of the library, which name no token, into a `ServiceError`."""
    # The library depends on it.
    import httpx

    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:
        text = plain_line(error)[:TEXT_CHARACTERS_MAX]
        raise ServiceError(
            f"{SCHEME}{repository}: {type(error).__name__}: {text}. Check the name, the network "
            "and `hf auth whoami`"
        ) from error
