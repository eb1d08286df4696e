"""`RunSpec`: the description of a run, validated on construction and then frozen.

A spec defines what to run and within which limits. It does not contain the state of a run, which
is on disk (`history`). A supervisor compares the spec's digest to recognise its run.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from holdfast.contracts.disk import digests, paths
from holdfast.contracts.environment import KEYS_OF_VARIABLES, S3_ENDPOINT
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec import effects, sections, written
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.consumers import CONSUMERS_MAX, Consumer, problem_with_names
from holdfast.contracts.spec.part import SpecPart, is_recorded
from holdfast.contracts.spec.resources import NodeShare, Resources, share_of
from holdfast.contracts.spec.secrets import EnvironmentValue, SecretReference
from holdfast.contracts.spec.tags import problem_with_tags

_OWN = "HOLDFAST_"
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RunSpec(SpecPart):
    """One training job, from its first step to its last.

    `command` holds the arguments for torchrun: a script and its arguments, or `-m` and a module.
    The program gets `config` unchanged, as `holdfast.trainer.config`.
    """

    name: str = Field(
        description="up to 100 letters, digits, `-` and `_`, starting with a letter or digit. "
        "Only one live run under a root can have a given name"
    )
    command: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="arguments that torchrun gets: a script and its arguments, or `-m` and a module"
    )
    tags: tuple[str, ...] = Field(
        default=(),
        description="the first tags of the run, up to 32. Each has up to 64 letters, digits, `-`, "
        "`_`, `.` and `/`, and starts with a letter or digit. `holdfast annotate` changes them. A "
        "spec that differs only in them is the same spec",
    )
    environment: dict[str, EnvironmentValue] = Field(
        default_factory=dict,
        description="environment variables for the program. Each value is a string or a "
        "reference to a secret",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="settings for the program. Holdfast passes them on as "
        "`holdfast.trainer.config`. It reads only two things. It digests `data`, "
        "with the size and modification time of each file that `data` names. The first of "
        "`steps`, `max_steps`, `total_steps` and `train_steps` that is a whole number above 0 is "
        "the program's last step: Holdfast shows progress against it, and reports a program that "
        "exits before it as incomplete",
    )
    launch: sections.Launch = sections.Launch()
    program: sections.Program = sections.Program()
    resources: Resources = Resources()
    elastic: sections.Elastic = sections.Elastic()
    checkpoint: Checkpointing = Checkpointing()
    supervision: sections.Supervision = sections.Supervision()
    health: sections.Health = sections.Health()
    cost: sections.Cost = sections.Cost()
    alerts: sections.Alerts = sections.Alerts()
    blocks: sections.Blocks = sections.Blocks()
    on: Annotated[tuple[Consumer, ...], Field(max_length=CONSUMERS_MAX)] = Field(
        default=(),
        description="consumers: commands that are started for committed checkpoints, such as "
        "evaluations. Each is a table `[[on]]`",
    )
    # Where keys come from that were not written in the spec itself: see `contracts.written`.
    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not paths.SPEC_NAME.fullmatch(value):
            raise ValueError(
                f"{value[:120]!r}: expected up to 100 letters, digits, '-' and '_', starting "
                "with a letter or digit"
            )
        return value

    @field_validator("tags")
    @classmethod
    def _tags_are_tags(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        problem = problem_with_tags(value)
        if problem and not is_recorded(info):
            raise ValueError(problem)
        return value

    @field_validator("environment")
    @classmethod
    def _environment_names_are_names(
        cls, value: dict[str, str | SecretReference], info: ValidationInfo
    ) -> dict[str, str | SecretReference]:
        wrong = [name for name in value if not ENVIRONMENT_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong}: expected names such as OMP_NUM_THREADS")
        own = [name for name in value if name.startswith(_OWN) and name != S3_ENDPOINT]
        if own and not is_recorded(info):
            key = KEYS_OF_VARIABLES.get(own[0])
            advice = f"set {key}" if key else "leave it out"
            raise ValueError(f"{own[0]}: Holdfast sets the variables HOLDFAST_… itself; {advice}")
        return value

    @field_validator("config")
    @classmethod
    def _steps_are_a_number(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        problem = problem_with_steps(value)
        if problem and not is_recorded(info):
            raise ValueError(problem)
        return value

    @field_validator("on")
    @classmethod
    def _consumers_have_names_of_their_own(
        cls, value: tuple[Consumer, ...]
    ) -> tuple[Consumer, ...]:
        if problem := problem_with_names(value):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> RunSpec:
        low, high = self.gpus_min, self.gpus_max
        if low > high:
            raise ValueError(
                f"elastic.min_gpus {low} is above elastic.max_gpus {high}; the default of each is "
                "the smallest or largest GPU count in the spec"
            )
        if self.resources.executor == "local" and self.resources.nodes > 1:
            raise ValueError("the local executor has one node; set resources.nodes = 1")
        elastic = self.elastic
        counts = [("resources", self.gpus)]
        counts += [("elastic.choices", count) for count in elastic.choices]
        counts += [("elastic.on_preemption", count) for count in elastic.on_preemption]
        for key, count in counts:
            if not low <= count <= high:
                raise ValueError(f"{key}: {counted(count, 'GPU')}: outside elastic {low} to {high}")
            self._require_share(key, count)
        if low < self.resources.size_per_node:
            # Below one node, the least count must have a whole number of ranks.
            self._require_share("elastic.min_gpus", low)
        return self

    def _require_share(self, key: str, count: int) -> None:
        try:
            self.share(count)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    @model_validator(mode="after")
    def _every_key_has_an_effect(self, info: ValidationInfo) -> RunSpec:
        """Refuse keys that cannot act in this run, one problem a line; see `spec_effects`."""
        if not is_recorded(info) and (
            problems := effects.problems_of_effects(self, effects.written_keys(self))
        ):
            raise ValueError("\n".join(problems))
        return self

    @property
    def gpus(self) -> int:
        """The size of the first attempt: its GPUs, or its ranks if it has none."""
        return self.resources.nodes * self.resources.size_per_node

    @property
    def gpus_min(self) -> int:
        """The fewest GPUs that a relaunch may use; by default the smallest count in the spec."""
        smallest = min((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.min_gpus or smallest

    @property
    def gpus_max(self) -> int:
        """The most GPUs that a relaunch may use; by default the largest count in the spec."""
        largest = max((self.gpus, *self.elastic.choices, *self.elastic.on_preemption))
        return self.elastic.max_gpus or largest

    def share(self, gpus: int) -> NodeShare:
        """Return the nodes of an attempt of size `gpus`, and the GPUs and ranks of each.

        Raises `ValueError` when it does not fill whole nodes or has no whole number of ranks.
        """
        return share_of(gpus, self.resources.gpus_per_node, self.resources.nproc_per_node)

    def can_split(self, gpus: int) -> bool:
        """Return True if an attempt can have the size `gpus`."""
        with contextlib.suppress(ValueError):
            return bool(self.share(gpus))
        return False

    def ranks(self, gpus: int) -> int:
        """Return the world size of an attempt of size `gpus`. Raises `ValueError` like `share`."""
        share = self.share(gpus)
        return share.nodes * share.ranks

    def size_of(self, ranks: int) -> int | None:
        """Return the size of an attempt of world size `ranks`; None if there is none."""
        size, rest = divmod(ranks * self.resources.size_per_node, self._ranks_per_node)
        return size if not rest and self.can_split(size) else None

    def gpus_held(self, ranks: int) -> int:
        """Return the GPUs that an attempt of world size `ranks` holds, with its spare nodes."""
        resources, nodes = self.resources, -(-ranks // self._ranks_per_node)
        idle = resources.spares_beside(nodes) * resources.gpus_on_node
        if resources.gres:
            return nodes * resources.gpus_on_node + idle
        return ranks * resources.gpus_per_node // self._ranks_per_node + idle

    @property
    def _ranks_per_node(self) -> int:
        return self.resources.nproc_per_node or self.resources.size_per_node

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the user gave, without the defaults."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def sources(self) -> dict[str, str]:
        """Where each key that somebody wrote comes from, by dotted names: see `written`."""
        keys = written.keys_of(self, written=True)
        return {key: written.source_of(key, self._origins) for key, _ in keys}

    @property
    def origins(self) -> dict[str, str]:
        """Where keys come from that were not written in the spec itself."""
        return dict(self._origins)

    def with_origins(self, origins: Mapping[str, str]) -> RunSpec:
        """Return this spec with the origins of keys that were not written in the spec itself."""
        spec = self.model_copy()
        spec._origins = dict(origins)
        return spec

    @property
    def digest(self) -> str:
        """SHA-256 of the spec without its tags, with the defaults of this version of Holdfast."""
        # Tags only help to find a run, and they may change while it trains.
        return digests.document_digest(self.model_dump(mode="json", exclude={"tags"}))


STEPS_TOTAL_NAMES: Final = ("steps", "max_steps", "total_steps", "train_steps")


def steps_total(config: Mapping[str, Any]) -> int | None:
    """Return the last step of a program by its spec's `[config]`; None if that does not say.

    The first of `STEPS_TOTAL_NAMES` that is a whole number above 0 counts, such as 1000 or 1e3.
    """
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value > 0 and math.isfinite(value) and value == int(value):
            return int(value)
    return None


def problem_with_steps(config: Mapping[str, Any]) -> str | None:
    """Return the problem with a number of steps that would not count, as text, or None."""
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        is_number = isinstance(value, float) and value != value // 1
        if isinstance(value, bool) or is_number or (isinstance(value, str) and _is_number(value)):
            return (
                f"{name}: given {json.dumps(value)}; expected a whole number above 0, such as "
                "1000, because it is the program's last step"
            )
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
