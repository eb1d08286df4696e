"""Which versions of each framework and tracker Holdfast supports, and the check for them.

The optional extras in `pyproject.toml` have the same ranges. A test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import Version

from holdfast.contracts.errors import PreflightError


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The versions of `package` from `oldest` on, and before `below`, work with Holdfast."""

    package: str
    oldest: str
    below: str

    @property
    def range(self) -> str:
        """The range as pip writes it, such as ">=5.23,<6"."""
        return f">={self.oldest},<{self.below}"


# The name of an extra of Holdfast, and the package that it is for.
FRAMEWORKS: Final = {
    "transformers": Supported(package="transformers", oldest="5.6", below="6"),
    "accelerate": Supported(package="accelerate", oldest="1.15", below="2"),
    "lightning": Supported(package="lightning", oldest="2.6", below="2.7"),
    "deepspeed": Supported(package="deepspeed", oldest="0.19.4", below="0.20"),
    "torchtitan": Supported(package="torchtitan", oldest="0.3", below="0.4"),
    "wandb": Supported(package="wandb", oldest="0.20", below="1"),
    "mlflow": Supported(package="mlflow-skinny", oldest="3", below="4"),
    "tensorboard": Supported(package="tensorboard", oldest="2.17.1", below="3"),
}
# More packages that an adapter uses, by the name of its extra.
COMPANIONS: Final = {
    "transformers": (Supported(package="accelerate", oldest="1.11", below="2"),),
}


def require(extra: str) -> str:
    """Return the installed version of the extra's package, whose companions are checked, too.

    Raises `PreflightError` if one is missing or outside the supported range. The message names the
    extra and the range.
    """
    for companion in COMPANIONS.get(extra, ()):
        _check(companion, extra)
    return _check(FRAMEWORKS[extra], extra)


def _check(wanted: Supported, extra: str) -> str:
    """Return the installed version of a package of the extra. Raises `PreflightError`."""
    advice = (
        f"Install Holdfast with the extra `{extra}` in the job's environment: it needs "
        f"{wanted.package}{wanted.range}"
    )
    try:
        found = version(wanted.package)
    except PackageNotFoundError:
        raise PreflightError(f"{wanted.package} is not installed. {advice}") from None
    if not Version(wanted.oldest) <= Version(found) < Version(wanted.below):
        raise PreflightError(
            f"{wanted.package} {found} is installed, and Holdfast supports {wanted.range}. {advice}"
        )
    return found
