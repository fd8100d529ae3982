"""``manifest.json``: the run, its software and its machine. ``questions.json``: the plan of its questions.
``common-settings.json``: flags given to both servers because one backend forces them. ``rounding.json``: the cost of a rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field

from assay.harness.errors import AssayError, EngineError
from assay.harness.evidence.records import Item
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.schema import Part, Record
from assay.harness.sides import ENGINES, Engine, Role, profile_of


def engine_label(engine: Engine, version: str, device: str) -> str:
    """Name an engine for evidence and reports: "SGLang 0.5.23 on cpu"."""
    return f"{profile_of(engine).title} {version} on {device}"


def engine_of(label: str) -> Engine:
    """Return the engine of a label that `engine_label` made, or of another text the default."""
    return next((each for each in ENGINES if label.startswith(f"{profile_of(each).title} ")), ENGINES[0])


class ServerManifest(Record):
    """A role's server, according to its own report."""

    role: Role
    backend: str
    engine: str
    kind: Engine = "sglang"
    claimed_phases: tuple[str, ...]
    launch_command: str = ""
    startup_s: float | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def started(self) -> bool:
        """True if assay started it. A server at a URL cannot be instrumented, so it does not claim a phase."""
        return bool(self.claimed_phases)


class Origin(Record):
    """The origin of evidence.

    Attributes:
        nonce: random name of this run or bench, which all its evidence carries.
        created: ISO 8601, UTC.
        spec: the `RunSpec`.
        command: the command that repeats it.
        packages: versions of the packages of the Python that runs assay.
        engines: version of the engine of each role whose side names a Python or packages.
    """

    nonce: str = Field(min_length=1)
    created: str
    spec: dict[str, Any]
    command: str
    packages: dict[str, str]
    engines: dict[Role, str] = Field(default_factory=dict)
    hardware: str
    python: str
    git: str
    model_hashes: dict[Role, str]

    @property
    def model_hash(self) -> str:
        """The hash of the reference's model."""
        return self.model_hashes["reference"]


class Manifest(Origin):
    """The identity of a run: it decides whether the run can be resumed, and lets a reader check and repeat it.

    Attributes:
        code: for each role whose backend is a kernel, the kernel's sources with hashes (`assay.harness.attention.source`).
        noise: the noise family that each role's backend declares, or empty for rounding only.
    """

    run_id: str
    model: str
    items_hash: str
    code: dict[Role, dict[str, str]] = Field(default_factory=dict)
    noise: dict[Role, str] = Field(default_factory=dict)


class FailureResult(Part):
    """The reason why a run ended early."""

    kind: str = Field(description='"engine", "disk", "interrupted", "changed" or "bug"')
    cause: str = Field(description='id of a known cause of a server\'s failure, such as "memory-share", or empty')
    found: str = Field(description="one line: whose failure it was, and the log line that names the cause")
    do: str = Field(description="the remedy")
    details: str = Field(description="lines that show it, such as the end of a server's log, if any")

    @classmethod
    def of(cls, kind: str, error: AssayError) -> Self:
        """Make a failure from an error."""
        cause = error.cause if isinstance(error, EngineError) else ""
        return cls(kind=kind, cause=cause, found=error.found, do=error.do, details=error.details)


class Progress(RunRecord):
    """``progress.json``: the current state of a run.

    Attributes:
        seconds: time that it has taken so far.
        servers: its servers' own reports.
        failure: why it ended early, or None if it did not.
        sealed: hash of each file of its evidence at its end, and of `stated`, or empty while it is running. See
            `assay.harness.evidence.folder`.
    """

    seconds: float = 0.0
    servers: tuple[ServerManifest, ...] = ()
    failure: FailureResult | None = None
    sealed: dict[str, str] = Field(default_factory=dict)

    @property
    def stated(self) -> dict[str, str]:
        """Hashes of the servers' reports, including the phases that each claims. They are part of the seal."""
        servers = "".join(server.model_dump_json() for server in self.servers)
        return {"progress.json": hashlib.sha256(servers.encode()).hexdigest()}


def hash_items(items: Iterable[Item]) -> str:
    """Hash ids, prompts and expected answers in order, with SHA-256. Two runs that asked the same have the same hash."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.suite, item.id, item.prompt, item.expected]).encode() + b"\n")
    return total.hexdigest()


class CommonSettings(RunRecord):
    """The settings that make two servers' arguments agree.

    Attributes:
        flags: flags of both servers in addition to assay's own, or empty if none are needed.
        because: the reasons, one sentence each.
        impossible: arguments that no flag can make equal, and why, one sentence each.
    """

    flags: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()


COMMON_SETTINGS = RunFile("common-settings.json", CommonSettings)


class ResolvedArguments(RunRecord):
    """The arguments that the engine resolves from a side's command line, without a server."""

    arguments: dict[str, Any] = Field(default_factory=dict)


RESOLVED = RunFile("resolved-arguments.json", ResolvedArguments)


Stop = Literal["decided", "hopeless", "all asked"]
"""Why asking stopped: the answers decided; or they show that more questions would not; or no questions were left."""


class QuestionPlan(RunRecord):
    """The stopping rule of a run's questions. The reason for the stop is for readers; verdicts are computed from the answers.

    Attributes:
        seed: seed of the random order.
        order_hash: `order_hash` of the questions in their order.
        most: number of planned questions, the most that can be asked.
        population: units in the set from which the order was drawn.
        margin: largest loss that still passes, as a share of 1.
        alpha: level of the test that the loss is below the margin.
        regression_alpha: level of the test that it is above.
        stopped: why asking stopped, or None before.
        pairs: questions that both roles had answered by then.
    """

    seed: int
    order_hash: str
    most: int
    population: int
    margin: float
    alpha: float
    regression_alpha: float
    stopped: Stop | None = None
    pairs: int | None = None


QUESTION_PLAN = RunFile("questions.json", QuestionPlan, RUN_AGAIN)


def order_hash(items: Iterable[Item]) -> str:
    """Hash ids, prompts, units and conditions of the questions in order, with SHA-256."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.id, item.prompt_hash, item.unit, item.cold]).encode() + b"\n")
    return total.hexdigest()


class RoundingCost(RunRecord):
    """The cost of a declared rounding, measured on the reference's own weights.

    Attributes:
        declared: what is rounded, such as "activations in bfloat16".
        mean: mean KL divergence from float64, in nats, or None if it was not measured.
        worst: the largest divergence of a position, in nats.
        positions: number of positions.
        not_measured: why it was not measured, or an empty string.
    """

    declared: str = ""
    mean: float | None = None
    worst: float | None = None
    positions: int = 0
    not_measured: str = ""


ROUNDING = RunFile("rounding.json", RoundingCost)
