"""A bisection of commits: its question, measurements and result, and its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.drivers.bisect import SCHEMA, Outcome, majority
from assay.harness.errors import ExitCode
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json
from assay.harness.sides import hide
from assay.harness.text import percent
from assay.harness.verdict import Finding

Purpose = Literal["good-end", "bad-end", "search", "verify", "name"]
_DAMAGED = "start again with another --out"


class BisectSpec(Record):
    """The question a bisection answers, and how it classifies a commit.

    Attributes:
        build: shell command that builds a commit, run at the top of its worktree, or empty if nothing has to be built.
        pack: folder of a replay pack, or empty to use the op-level matrix.
        calls: maximum number of calls; 0 for all.
        raises: how to classify a commit whose kernel raises, dies or hangs.
    """

    repo: str
    good: str
    bad: str
    kernel: str
    build: str = ""
    pack: str = ""
    calls: int = Field(0, ge=0)
    raises: Literal["skip", "bad"] = "skip"

    def recorded(self) -> BisectSpec:
        """Return the question without secrets, to be recorded and shown."""
        return self.model_copy(update={"build": hide("build", self.build)})

    def roots(self, tree: Path) -> list[Path]:
        """Return the folders of a worktree to import modules from."""
        return [root for root in (tree, tree / "src") if root.is_dir()]


class Measurement(Record):
    """The measurement of a commit: the largest own error of its kernel, or the reason why it is missing."""

    status: Literal["measured", "no call", "build", "import", "raised", "died"] = Field(
        "measured", description="what happened; died: the process was killed, crashed or timed out"
    )
    reason: str = Field("", description="why it was not measured")
    origin: str = Field("", description="file of the kernel's module, relative to the top of the worktree")
    worst: float | None = Field(None, description="largest error, as a multiple of its bound")
    own: float | None = Field(None, description="that error, relative L1")
    where: str = Field("", description="its call and head")
    findings: tuple[Finding, ...] = Field((), description="the diagnosis, if one was requested")

    def outcome(self, raises: Literal["skip", "bad"]) -> Outcome:
        """Classify the commit; `raises` is the class of a kernel that raises, dies or hangs."""
        if self.worst is not None:
            return "good" if self.worst <= 1 else "bad"
        return raises if self.status in ("raised", "died") else "skip"

    @property
    def said(self) -> str:
        """The worst error, or the reason why it is missing, in a few words."""
        if self.worst is None:
            return f"{self.status}: {self.reason}" if self.reason else self.status
        times = f"{self.worst:.3g} times its bound" if math.isfinite(self.worst) else "not finite"
        return f"{self.where}: error {percent(self.own or 0.0)}, {times}"


class CommitProbe(Measurement):
    """One probe of a commit."""

    number: int
    commit: str
    purpose: Purpose
    came_out: Outcome
    seconds: float


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
    """The result of a bisection: "ambiguous" if skipped commits leave several suspects."""

    outcome: Literal["found", "ambiguous"]
    suspects: tuple[str, ...] = Field(description="the culprit, or all commits that may be it, oldest first")
    commit: CommitInfo | None = Field(None, description="the culprit")
    findings: tuple[Finding, ...] = Field((), description="the diagnosed bug")
    unclassified: int = Field(0, description="commits that could not be classified")

    @property
    def exit_code(self) -> ExitCode:
        """0 if a commit was named, or else 3."""
        return ExitCode.PASS if self.outcome == "found" else ExitCode.NO_VERDICT


class BisectState(Record):
    """``state.json``; `history` maps the hash of each commit of the range to its subject, oldest first."""

    schema_id: Literal["assay.bisect/7"] = Field(SCHEMA, alias="schema")
    spec: BisectSpec
    command: str
    history: dict[str, str]
    probes: tuple[CommitProbe, ...] = ()
    result: BisectResult | None = None

    def outcomes(self, commit: str) -> list[Outcome]:
        """List the outcomes of a commit's probes, except the one for its diagnosis."""
        return [probe.came_out for probe in self.probes if probe.commit == commit and probe.purpose != "name"]

    def settled(self, commit: str) -> Outcome | None:
        """Classify a commit by its probes, or return None if it must be probed again.

        One outcome must lead by two: a racy kernel comes out both ways. A commit is skipped if probing fails, or if no outcome
        leads clearly after five probes.
        """
        return majority(self.outcomes(commit))


@dataclass(frozen=True)
class BisectFolder:
    """A bisection's folder. Its state is replaced atomically; reading raises EvidenceError if it is damaged."""

    path: Path

    def read(self) -> BisectState | None:
        """Read the state, or return None if it does not exist yet."""
        file = self.path / "state.json"
        return read_json(file, BisectState, _DAMAGED) if file.exists() else None

    def write(self, state: BisectState) -> None:
        """Replace the state."""
        write_whole(self.path / "state.json", state.model_dump_json(indent=1))
