"""Every environment variable of Holdfast, with its effect and who sets it.

The documentation is generated from this table. A test compares it with the names in the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.contracts import environment
from holdfast_docs.markdown import code, section, sentence, table


class Setter(StrEnum):
    """Who sets a variable. The value is the heading of its table."""

    PERSON = "Set by you"
    AGENT = "Set by the agent for the program"
    CONSUMER = "Set for a consumer of a checkpoint"
    BUILD = "Set by you for builds and tests"


@dataclass(frozen=True)
class Variable:
    """One environment variable. `default` applies if it is not set."""

    name: str
    setter: Setter
    meaning: str
    default: str = ""


VARIABLES: Final = (
    Variable(
        "HOLDFAST_ROOT",
        Setter.PERSON,
        "folder of all runs; every node must see it. `--root` has precedence. An agent sets it for "
        "the program",
        "`$HOLDFAST_HOME/runs`",
    ),
    Variable(
        "HOLDFAST_HOME",
        Setter.PERSON,
        "folder of your database, your tokens and your settings",
        "`~/.holdfast`",
    ),
    Variable(
        "HOLDFAST_DATABASE_URL",
        Setter.PERSON,
        "URL of the lineage database, SQLite or PostgreSQL, as SQLAlchemy writes it. The path of "
        "an SQLite file may be relative or begin with `~`",
        "SQLite in `$HOLDFAST_HOME/holdfast.db`",
    ),
    Variable(
        environment.PAGE_URL,
        Setter.PERSON,
        "address of `holdfast serve`, for links to the page in Prefect's artifacts, and for "
        "`holdfast mcp`",
        "no links; `http://127.0.0.1:8470`",
    ),
    Variable(
        environment.TOKEN,
        Setter.PERSON,
        "the token with which `holdfast mcp` calls the API. `--token-file` has precedence",
        "none",
    ),
    Variable(
        environment.S3_ENDPOINT,
        Setter.PERSON,
        "address of an object store other than Amazon's, for `checkpoint.mirror`",
        "`$AWS_ENDPOINT_URL`, otherwise Amazon's own address",
    ),
    Variable(
        environment.NOTICES_URL,
        Setter.PERSON,
        "address at which nodes ask for the cloud's interruption notices. "
        "`supervision.notices_url` has precedence",
        "the cloud's own address",
    ),
    Variable(
        environment.RUN_DIRECTORY,
        Setter.AGENT,
        "the run's folder. A program that finds this variable runs under an agent",
    ),
    Variable(environment.ATTEMPT, Setter.AGENT, "number of the attempt, from 1"),
    Variable(environment.LAUNCH, Setter.AGENT, "number of the launch in the attempt, from 1"),
    Variable(environment.NODE, Setter.AGENT, "number of this node, from 0"),
    Variable(environment.NODES, Setter.AGENT, "number of nodes of the attempt"),
    Variable(
        environment.RANK_STATUS,
        Setter.AGENT,
        "path of the node's shared memory for the rank status",
    ),
    Variable(
        environment.FLUSHER,
        Setter.AGENT,
        "path of the file that contains the name of the flusher's socket",
    ),
    Variable(
        environment.CONFIG,
        Setter.AGENT,
        "the spec's `[config]` table, as JSON. `holdfast.trainer.config` reads it. Without an "
        "agent, you can set it",
    ),
    Variable(
        environment.SOURCES,
        Setter.AGENT,
        "where the written keys of `checkpoint` come from, as JSON: `spec`, `--set` or `block`",
    ),
    Variable(
        environment.CHECKPOINT_INTERVAL,
        Setter.AGENT,
        "`checkpoint.interval`, if the spec has that key. Without an agent, you can set it",
        "the program's own value",
    ),
    Variable(
        environment.CHECKPOINT_MIRROR,
        Setter.AGENT,
        "`checkpoint.mirror` of the spec. Without an agent, you can set it",
    ),
    Variable(
        environment.CHECKPOINT_LOCAL,
        Setter.AGENT,
        "`checkpoint.local` of the spec. Without an agent, you can set it, with a mirror",
    ),
    Variable(
        environment.CHECKPOINT_SNAPSHOTS,
        Setter.AGENT,
        "`checkpoint.snapshots`, if the spec has that key. Without an agent, you can set it",
        "the program's own value",
    ),
    Variable(
        environment.CHECKPOINT_OVERLAP,
        Setter.AGENT,
        "`checkpoint.overlap`, if the spec has that key. Without an agent, you can set it",
        "the program's own value",
    ),
    Variable(
        environment.CHECKPOINT_STAGING,
        Setter.AGENT,
        "`checkpoint.staging`, if the spec has that key. Without an agent, you can set it",
        "the program's own value",
    ),
    Variable(
        environment.CHECKPOINT_DOUBLING_STEPS,
        Setter.AGENT,
        "`checkpoint.doubling_steps` of the spec. Without an agent, you can set it",
    ),
    Variable(
        environment.STAGING_DIRECTORY,
        Setter.AGENT,
        "`checkpoint.staging_directory` of the spec. Without an agent, you can set it",
    ),
    Variable(
        environment.CHECKPOINT_NEIGHBOUR,
        Setter.AGENT,
        "`checkpoint.neighbour`, if it is not false",
    ),
    Variable(
        environment.CHECKPOINT_WRITE_LIMIT,
        Setter.AGENT,
        "`checkpoint.write_limit` of the spec. Without an agent, you can set it",
    ),
    Variable(
        environment.NUMERICS,
        Setter.AGENT,
        "`supervision.numerics` of the spec, as JSON. Without an agent, you can set it",
    ),
    Variable(
        environment.FLUSH_TIMEOUT,
        Setter.AGENT,
        "`supervision.flush_timeout_s` of the spec, in seconds. Without an agent, you can set it",
        f"{environment.FLUSH_TIMEOUT_DEFAULT_S:g}",
    ),
    Variable(
        environment.PLACE,
        Setter.AGENT,
        "path of the file with a rank's place, if each node has a torchrun without the others",
    ),
    Variable(
        environment.STANDBY_PIPE,
        Setter.AGENT,
        "path of the standby pipe, on which a warm standby waits for its start",
    ),
    Variable(environment.RUN, Setter.CONSUMER, "name of the run"),
    Variable(environment.CONSUMER, Setter.CONSUMER, "name of the consumer in `on` of the spec"),
    Variable(environment.CHECKPOINT, Setter.CONSUMER, "id of the checkpoint"),
    Variable(
        environment.CHECKPOINT_PATH,
        Setter.CONSUMER,
        "path of the checkpoint's directory, or of the export that the consumer asks for",
    ),
    Variable(environment.CHECKPOINT_STEP, Setter.CONSUMER, "step of the checkpoint"),
    Variable(
        environment.METRICS_FILE,
        Setter.CONSUMER,
        "file to which the consumer may write its metrics, as JSON: numbers by name",
    ),
    Variable(
        "HOLDFAST_PYTHON",
        Setter.BUILD,
        "Python interpreter from which `make` creates `.venv`",
        "`python3.11`, `python3.12`, `python3.13` or `python3`, whichever is found first",
    ),
    Variable(
        "HOLDFAST_WHEEL_WITHOUT_PAGE",
        Setter.BUILD,
        "with the value 1, a wheel is built without the web UI",
    ),
    Variable(
        "HOLDFAST_REPOSITORY_URL",
        Setter.BUILD,
        "address of the repository, to which the package's description and its URLs then link",
    ),
    Variable(
        "HOLDFAST_SERVER",
        Setter.BUILD,
        "address of the server that Vite's development server of the web UI uses",
        "`http://127.0.0.1:8470`",
    ),
    Variable(
        "HOLDFAST_TEST_DEVICE",
        Setter.BUILD,
        "with the value `cpu`, `make test-gpu` runs the GPU tests whose logic needs no GPU",
    ),
)


def render() -> str:
    """A table for each kind of setter."""
    parts = []
    for setter in Setter:
        rows = [
            (
                code(one.name),
                sentence(one.default) if one.default else "none",
                sentence(one.meaning),
            )
            for one in VARIABLES
            if one.setter is setter
        ]
        parts.append(section(2, setter.value, table(("variable", "default", "meaning"), rows)))
    return "\n".join(parts)
