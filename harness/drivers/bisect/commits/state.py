"""What a bisection of commits asks, measures and finds, and its folder: one state file and one measurement for each probe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.drivers.bisect import SCHEMA
from assay.harness.errors import ExitCode
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json
from assay.harness.sides import hide, hide_flags
from assay.harness.verdict import Finding

Outcome = Literal["good", "bad", "skip"]
Purpose = Literal["good-end", "bad-end", "search", "verify", "name"]
_Status = Literal["measured", "build", "import", "raised", "died", "undecided"]
_DAMAGED = "start again with another --out"


class BisectSpec(Record):
    """The question a bisection answers, and how it classifies a commit.

    Attributes:
        repo: top folder of the repository.
        good: hash of the good revision.
        bad: hash of the bad revision.
        kernel: ``module:function``.
        build: shell command that builds a commit, run at the top of its worktree; empty if there is nothing to build.
        measure_with: "replay" for own error on calls, "accuracy" for an ``assay run`` per commit.
        pack: folder of a replay pack; empty for the op-level matrix.
        calls: maximum number of calls; 0 for all.
        raises: how to classify a commit whose kernel raises, dies or hangs.
        run_args: further arguments of ``assay run``.
    """

    repo: str
    good: str
    bad: str
    kernel: str
    build: str = ""
    measure_with: Literal["replay", "accuracy"] = "replay"
    pack: str = ""
    calls: int = Field(0, ge=0)
    raises: Literal["skip", "bad"] = "skip"
    run_args: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """Seconds that a probe may take: accuracy runs take minutes."""
        return 7200.0 if self.measure_with == "accuracy" else 300.0

    def recorded(self) -> BisectSpec:
        """Return the question as it is recorded and shown: without secrets."""
        return self.model_copy(update={"build": hide("build", self.build), "run_args": hide_flags(self.run_args)})

    def roots(self, tree: Path) -> list[Path]:
        """Return the folders of a worktree that modules are imported from."""
        return [root for root in (tree, tree / "src") if root.is_dir()]


class CallErrors(Record):
    """Own errors of one call."""

    call: str = Field(description='such as "layer 2 extend, new+prefix 20+77, 4 heads on 2, head_dim 64, bfloat16"')
    condition: dict[str, str] = Field(description="axis -> value, the layer among them")
    own: tuple[float, ...] = Field(description="largest own error (relative L1) of each q head")
    bound: float = Field(description="largest own error that noise explains")


class Measurement(Record):
    """The measurement of one probe."""

    status: _Status = Field(
        description="what happened: a process that died was killed, crashed or timed out; an undecided run has no verdict"
    )
    reason: str = Field("", description="why it was not measured")
    origin: str = Field("", description="file of the kernel's module, relative to the top of the worktree")
    rows: tuple[CallErrors, ...] = Field((), description="own errors by call; an accuracy run has no rows")
    findings: tuple[Finding, ...] = Field((), description="the diagnosis, if one was requested")
    regression: bool | None = Field(None, description="verdict of an accuracy run")


class ProbeOutcome(Record):
    """The outcome of one probe."""

    outcome: Outcome
    status: _Status | Literal["no call"] = Field(
        "measured", description="that of the measurement, or no call was computed"
    )
    reason: str = Field("", description="why it was not measured")
    worst: float | None = Field(None, description="largest own error, as a multiple of its bound")
    own: float | None = Field(None, description="that own error")
    where: str = Field("", description="its call and head")


class CommitProbe(ProbeOutcome):
    """One probe, as listed in the state; ``probes/<number>.json`` holds its measurement."""

    number: int
    commit: str
    purpose: Purpose
    seconds: float


class Change(Record):
    """The change at the named commit along one axis: "layer", "head", or an axis of the conditions."""

    axis: str
    failing: tuple[str, ...] = Field(description="values with a failing call")
    values: tuple[str, ...] = Field(description="all values that were measured")
    new: tuple[str, ...] = Field(description="those of `failing` that do not fail before the commit")


class CommitInfo(Record):
    """A commit as git describes it."""

    commit: str
    subject: str
    body: str
    author: str
    date: str
    diffstat: str
    parents: tuple[str, ...]


class BisectResult(Record):
    """The result of a bisection: "ambiguous" if skipped commits make the suspects indistinguishable."""

    outcome: Literal["found", "ambiguous"]
    suspects: tuple[str, ...] = Field(description="the culprit, or the commits it is one of, oldest first")
    commit: CommitInfo | None = Field(None, description="the culprit")
    changes: tuple[Change, ...] = Field((), description="which layers, heads and conditions fail at the commit")
    findings: tuple[Finding, ...] = Field((), description="the diagnosed bug")
    later: tuple[Change, ...] = Field(
        (), description="what fails at the bad revision and not at the commit: another regression"
    )
    unclassified: int = Field(0, description="commits that could not be classified")

    @property
    def exit_code(self) -> ExitCode:
        """0 if a commit was named, else 3."""
        return ExitCode.PASS if self.outcome == "found" else ExitCode.NO_VERDICT


class BisectState(Record):
    """``state.json``; `history` has the subject of each commit of the range by its hash, oldest commit first."""

    schema_id: Literal["assay.bisect/6"] = Field(SCHEMA, alias="schema")
    spec: BisectSpec
    command: str
    history: dict[str, str]
    probes: tuple[CommitProbe, ...] = ()
    result: BisectResult | None = None

    def outcomes(self, commit: str) -> list[Outcome]:
        """List what the probes of a commit came out as, without that for its diagnosis."""
        return [probe.outcome for probe in self.probes if probe.commit == commit and probe.purpose != "name"]


@dataclass(frozen=True)
class BisectFolder:
    """A bisection's folder. Its files are replaced atomically; reading one raises EvidenceError if it is damaged."""

    path: Path

    def read(self) -> BisectState | None:
        """Read the state, or return None if there is none."""
        file = self.path / "state.json"
        return read_json(file, BisectState, _DAMAGED) if file.exists() else None

    def write(self, state: BisectState) -> None:
        """Replace the state."""
        write_whole(self.path / "state.json", state.model_dump_json(indent=1))

    def measurement(self, number: int) -> Measurement:
        """Read the measurement of a probe."""
        return read_json(self.path / "probes" / f"{number:04d}.json", Measurement, _DAMAGED)

    def write_measurement(self, number: int, measurement: Measurement) -> None:
        """Write the measurement of a probe."""
        write_whole(self.path / "probes" / f"{number:04d}.json", measurement.model_dump_json(indent=1))
