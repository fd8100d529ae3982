"""The files of a bisection: one state file, replaced atomically, and one measurement file per probe.

A state is resumed only by a version with the same schema, so this schema has no readers for older ones: an older bisection is
repeated in another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from assay.harness.errors import EvidenceError, ExitCode, UsageError
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json
from assay.harness.verdict import Finding

SCHEMA: Literal["assay.bisect-commits/3"] = "assay.bisect-commits/3"
_STATE = "state.json"
LOG = "log.txt"
"""In a probe's folder: what its build and its kernel printed."""
Outcome = Literal["good", "bad", "skip"]
Purpose = Literal["good-end", "bad-end", "search", "confirm", "verify", "environment", "scan", "name"]
ACCURACY_DEFAULTS: dict[str, Any] = {"scan": 0, "timeout": 7200.0}
"""Defaults of `BisectSpec` for accuracy runs, which take minutes."""
_DAMAGED = "start again with another --out"


class BisectSpec(Record):
    """The question a bisection answers, and how it classifies a commit.

    Attributes:
        repo: top folder of the repository.
        good: hash of the good revision.
        bad: hash of the bad revision.
        kernel: ``module:function``.
        build: shell command that builds a commit, run at the top of its worktree; empty if there is nothing to build.
        sources: folders of the worktree that modules are imported from.
        first_parent: follow first parents only; the culprit is then a commit or a complete merge.
        measure_with: "replay" for layer error on calls, "accuracy" for an ``assay run`` per commit.
        against: what a layer error is compared with: the bound of its call, or the good revision's own error.
        times: with "good", the largest acceptable multiple of the good revision's error.
        pack: folder of a replay pack; empty for the op-level matrix.
        conditions: ``axis=value``; only calls that meet them are used.
        calls: maximum number of calls; 0 for all.
        seed: seed of the matrix.
        raises: how to classify a commit whose kernel raises, dies or hangs.
        repeats: fewest probes of each end before the search begins.
        confidence: probability at which a commit is named.
        scan: further commits, spread over the history, that are probed after the culprit is named.
        keep_build: keep the files that git ignores from commit to commit.
        timeout: time limit of a probe, in seconds.
        build_timeout: time limit of a build, in seconds.
        run_args: further arguments of ``assay run``.
    """

    repo: str
    good: str
    bad: str
    kernel: str
    build: str = ""
    sources: tuple[str, ...] = (".", "src")
    first_parent: bool = False
    measure_with: Literal["replay", "accuracy"] = "replay"
    against: Literal["bound", "good"] = "bound"
    times: float = Field(2.0, ge=1)
    pack: str = ""
    conditions: tuple[str, ...] = ()
    calls: int = Field(0, ge=0)
    seed: int = 0
    raises: Literal["skip", "bad"] = "skip"
    repeats: int = Field(1, ge=1)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    scan: int = Field(8, ge=0)
    keep_build: bool = False
    timeout: float = Field(300.0, gt=0)
    build_timeout: float = Field(1800.0, gt=0)
    run_args: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Ten hex digits that identify this bisection."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:10]


class CallErrors(Record):
    """Own errors of one call.

    Attributes:
        number: number of the call; the same at every commit.
        call: description, such as "layer 2 extend, new+prefix 20+77, 4 heads on 2, head_dim 64, bfloat16".
        condition: axis -> value.
        own: largest own error (relative L1) of each q head, over the call's sequences and query positions.
        bound: largest own error that noise explains, including that of the quantisation the commit declares.
        rounding: the same bound without quantisation.
    """

    number: int
    layer: int
    call: str
    condition: dict[str, str]
    own: tuple[float, ...]
    bound: float
    rounding: float


class Measurement(Record):
    """The measurement of one probe.

    Attributes:
        status: "measured", or why there is nothing to classify: the commit does not build or import, its kernel raised or its
            process died (killed, crashed, timed out), or an accuracy run reached no verdict ("undecided").
        reason: why it was not measured.
        origin: file of the kernel's module, relative to the top of the worktree.
        rows: own errors by call; empty for an accuracy run.
        delegated: calls of phases that the kernel does not declare.
        refused: calls that the kernel refused.
        findings: the diagnosis, if one was requested.
        operator: what was read off the kernel, a sentence for each clause of its operator, if a diagnosis was requested.
        regression: verdict of an accuracy run; None for a replay.
        seconds: time to check out, build and measure.
        build_seconds: time to build.
    """

    status: Literal["measured", "build", "import", "raised", "died", "undecided"]
    reason: str = ""
    origin: str = ""
    rows: tuple[CallErrors, ...] = ()
    delegated: int = 0
    refused: int = 0
    findings: tuple[Finding, ...] = ()
    operator: tuple[str, ...] = ()
    regression: bool | None = None
    seconds: float = 0.0
    build_seconds: float = 0.0


class ProbeOutcome(Record):
    """The outcome of one probe.

    Attributes:
        outcome: good, bad or skip.
        reason: why it was skipped, or why it is bad without a layer error; else empty.
        worst: largest own error, as a multiple of its limit; None if none was measured.
        where: call and head of the largest own error.
    """

    outcome: Outcome
    reason: str = ""
    worst: float | None = None
    where: str = ""


class CommitProbe(ProbeOutcome):
    """One probe, as listed in the state; ``probes/<number>.json`` holds its measurement."""

    number: int
    commit: str
    purpose: Purpose
    seconds: float
    build_seconds: float = 0.0


class Change(Record):
    """The change at the named commit along one axis: what fails there.

    Attributes:
        axis: "layer", "head", or an axis of the conditions.
        failing: values with a failing call.
        values: all values that were measured.
        new: those of `failing` that do not fail before the commit.
    """

    axis: str
    failing: tuple[str, ...]
    values: tuple[str, ...]
    new: tuple[str, ...]


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
    """The result of a bisection.

    Attributes:
        outcome: "found"; "ambiguous" if skipped commits make the suspects indistinguishable; "flaky" if the outcomes of the
            probes contradict each other too often.
        suspects: the culprit, or the commits it is one of.
        confidence: probability that the culprit is among the suspects (for "flaky": that it is the first), given that the good
            revision is good and the bad one bad, which is checked first.
        misclassification: estimated probabilities that a good and that a bad commit is misclassified.
        repeated: outcomes of commits that were probed more than once.
        outvoted: how many of those were outvoted.
        commit: the culprit as git describes it.
        checked: how the commit and its parents were classified.
        changes: which layers, heads and conditions fail at the commit.
        findings: the diagnosed bug.
        notes: other observations, such as a history that is not monotone.
    """

    outcome: Literal["found", "ambiguous", "flaky"]
    suspects: tuple[str, ...]
    confidence: float
    misclassification: tuple[float, float]
    repeated: int
    outvoted: int
    commit: CommitInfo | None = None
    checked: str = ""
    changes: tuple[Change, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """0 if a commit was named with the required confidence, else 3."""
        return ExitCode.PASS if self.outcome == "found" else ExitCode.NO_VERDICT


class RangeCommit(Record):
    """A commit of the range, oldest first. Parents are indices into the range."""

    commit: str
    subject: str
    parents: tuple[int, ...]


class BisectState(Record):
    """``state.json``."""

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    schema_id: Literal["assay.bisect-commits/3"] = Field(SCHEMA, alias="schema")
    spec: BisectSpec
    command: str
    history: tuple[RangeCommit, ...]
    probes: tuple[CommitProbe, ...] = ()
    result: BisectResult | None = None


class BisectFolder:
    """A bisection's folder.

    Attributes:
        FOLDERS: folders in it.
        PARTS: what is in it before its state is.
    """

    FOLDERS: ClassVar = ("probes", "logs")
    PARTS: ClassVar = (*FOLDERS, "lock")

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def state_file(self) -> Path:
        """``state.json``."""
        return self.path / _STATE

    def read(self) -> BisectState:
        """Read the state.

        Raises:
            UsageError: there is none, or it has another schema.
            EvidenceError: it is damaged.
        """
        try:
            text = self.state_file.read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{self.path} holds no bisection.", f"a folder with a {_STATE}", "check the path given by --out"
            ) from None
        if f'"{SCHEMA}"' not in text:
            raise UsageError(
                f"{self.state_file} does not have the schema {SCHEMA}.",
                "a bisection of this version",
                "use another --out",
            )
        return read_json(self.state_file, BisectState, _DAMAGED)

    def write(self, state: BisectState) -> None:
        """Replace the state."""
        write_whole(self.state_file, state.model_dump_json(indent=1))

    def measurement(self, number: int) -> Measurement | None:
        """Read the measurement of a probe; None if its file is gone."""
        path = self._probe_file(number)
        return read_json(path, Measurement, _DAMAGED) if path.exists() else None

    def write_measurement(self, number: int, measurement: Measurement) -> None:
        """Replace the measurement of a probe."""
        write_whole(self._probe_file(number), measurement.model_dump_json(indent=1))

    def _probe_file(self, number: int) -> Path:
        """Return the file of a probe's measurement."""
        return self.path / "probes" / f"{number:04d}.json"

    def log(self, number: int) -> Path:
        """Return the log of a probe's build and kernel."""
        return self.place(number) / LOG

    def place(self, number: int) -> Path:
        """Return the folder that a probe keeps what it wrote in: its log and, with ``--with accuracy``, its run."""
        return self.path / "logs" / f"{number:04d}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second bisection out of the folder. The operating system releases the lock when the process ends.

        Raises:
            UsageError: another process is bisecting here.
            EvidenceError: the folder cannot be created.
        """
        try:
            for part in self.FOLDERS:
                (self.path / part).mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("w")
        except OSError as error:
            raise EvidenceError(
                f"{self.path} cannot be created: {error.strerror}.", "a writable folder", "use another --out"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path} is being bisected by another process.",
                    "one process at a time",
                    "wait for it (--status shows its progress), or use another --out",
                ) from None
            yield
