"""What a bisection leaves on disk: one state file, whole at any moment, and what each probe measured beside it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.records import Record
from assay.harness.verdict import Finding

SCHEMA: Literal["assay.bisect-commits/1"] = "assay.bisect-commits/1"
STATE = "state.json"
Outcome = Literal["good", "bad", "skip"]
Purpose = Literal["good end", "bad end", "search", "confirm", "verify", "environment", "scan", "name"]
Document = TypeVar("Document", bound=Record)


class Spec(Record):
    """What is sought, and how a commit is judged.

    Attributes:
        repo: top folder of the repository.
        good: hash of the good revision.
        bad: hash of the bad revision.
        kernel: ``module:function``.
        build: shell command that builds a commit, run at the top of its worktree; empty for none.
        sources: folders of the worktree that its modules are imported from.
        first_parent: whether only first parents are followed: the culprit is then a commit or a whole merge.
        judge: "replay" for layer error on calls, "accuracy" for a whole ``assay run``.
        against: what a layer error is held against: the bound of its call, or the good revision's own error.
        times: with "good", how many times the good revision's error is still good.
        pack: folder of a replay pack; empty for the op-level matrix.
        conditions: ``axis=value``, which calls must meet.
        calls: most calls; 0 for all.
        seed: of the matrix.
        raises: what a commit is whose kernel raises, dies or hangs.
        repeats: verdicts on each end before the search begins, if they agree.
        confidence: probability at which a commit is named.
        scan: further commits, spread over the history, that are probed once the culprit is named.
        keep_build: whether files that git ignores stay from commit to commit.
        timeout: most seconds of a probe.
        build_timeout: most seconds of a build.
        run_args: further arguments of ``assay run``.
    """

    repo: str
    good: str
    bad: str
    kernel: str
    build: str = ""
    sources: tuple[str, ...] = (".", "src")
    first_parent: bool = False
    judge: Literal["replay", "accuracy"] = "replay"
    against: Literal["bound", "good"] = "bound"
    times: float = Field(2.0, ge=1)
    pack: str = ""
    conditions: tuple[str, ...] = ()
    calls: int = Field(0, ge=0)
    seed: int = 0
    raises: Literal["skip", "bad"] = "skip"
    repeats: int = Field(3, ge=1)
    confidence: float = Field(0.99, gt=0.5, lt=1)
    scan: int = Field(8, ge=0)
    keep_build: bool = False
    timeout: float = Field(300.0, gt=0)
    build_timeout: float = Field(1800.0, gt=0)
    run_args: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Ten hex digits that tell this bisection from others."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:10]


class Row(Record):
    """Own error of one call.

    Attributes:
        number: of the call, which is the same at every commit.
        call: such as "layer 2 extend, new+prefix 20+77, 4 heads on 2, head_dim 64, bfloat16".
        condition: axis -> value, in words.
        own: largest own error (relative L1) of each q head, over the call's sequences and query positions.
        bound: largest own error that noise explains, that of the quantisation which the commit declares included.
        rounding: the same without a quantisation.
    """

    number: int
    layer: int
    call: str
    condition: dict[str, str]
    own: tuple[float, ...]
    bound: float
    rounding: float


class Measurement(Record):
    """What a probe of a commit came to.

    Attributes:
        status: "measured"; or why there is nothing to judge: it does not build or import, it raised, it died (killed, crashed,
            timed out), or nothing was decided (an accuracy run without a verdict).
        reason: why, in words, where it was not measured.
        origin: file of the kernel's module, from the top of the worktree.
        rows: own errors by call, none for an accuracy run.
        delegated: calls of phases that the kernel does not declare.
        refused: calls that the kernel refused.
        findings: what is wrong, where it was asked for.
        regression: an accuracy run's verdict.
        seconds: time of checking out, building and measuring.
        build_seconds: time of building.
    """

    status: Literal["measured", "build", "import", "raised", "died", "undecided"]
    reason: str = ""
    origin: str = ""
    rows: tuple[Row, ...] = ()
    delegated: int = 0
    refused: int = 0
    findings: tuple[Finding, ...] = ()
    regression: bool | None = None
    seconds: float = 0.0
    build_seconds: float = 0.0


class Probe(Record):
    """One probe, as the state lists it; ``probes/<number>.json`` has its measurement.

    Attributes:
        worst: largest own error, as a multiple of what it is held against; None where nothing was measured.
        where: call and head of it.
    """

    number: int
    commit: str
    purpose: Purpose
    outcome: Outcome
    reason: str = ""
    worst: float | None = None
    where: str = ""
    seconds: float
    build_seconds: float = 0.0


class Change(Record):
    """What fails at the named commit, by one of layers, heads and the axes of the conditions.

    Attributes:
        axis: "layer", "head", or an axis of the conditions.
        failing: its values with a failing call.
        values: all of its values that were seen.
        new: those of `failing` that do not fail before the commit.
    """

    axis: str
    failing: tuple[str, ...]
    values: tuple[str, ...]
    new: tuple[str, ...]


class CommitNote(Record):
    """What git says of a commit."""

    commit: str
    subject: str
    body: str
    author: str
    date: str
    diffstat: str
    parents: tuple[str, ...]


class Result(Record):
    """What a bisection came to.

    Attributes:
        verdict: "found"; "hidden" where skipped commits keep the candidates from being told apart; "lost" where verdicts are too
            flaky.
        candidates: the culprit, or those it is one of.
        confidence: probability that the culprit is among the candidates (for "lost": that it is the first), given that the good
            revision is good and the bad one bad, which was proven first.
        flips: estimated probability that a good, and a bad, commit is judged wrongly.
        repeated: verdicts on commits that were judged more than once.
        flipped: those of them that were outvoted.
        commit: what git says of the culprit.
        checked: how the parents and the commit itself were judged, in words.
        changes: which layers, heads and conditions fail at the commit.
        findings: the named bug.
        notes: what else the probes showed, such as that the history is not monotone.
    """

    verdict: Literal["found", "hidden", "lost"]
    candidates: tuple[str, ...]
    confidence: float
    flips: tuple[float, float]
    repeated: int
    flipped: int
    commit: CommitNote | None = None
    checked: str = ""
    changes: tuple[Change, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


class Listed(Record):
    """A commit of the range, oldest first. Parents are indices into the range."""

    commit: str
    subject: str
    parents: tuple[int, ...]


class State(Record):
    """``state.json``."""

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    schema_id: Literal["assay.bisect-commits/1"] = Field(SCHEMA, alias="schema")
    spec: Spec
    command: str
    history: tuple[Listed, ...]
    probes: tuple[Probe, ...] = ()
    result: Result | None = None


class Folder:
    """A bisection's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def state_file(self) -> Path:
        """``state.json``."""
        return self.path / STATE

    def read(self) -> State:
        """The state.

        Raises:
            UsageError: there is none, or one of another version of assay.
            EvidenceError: it is damaged.
        """
        try:
            text = self.state_file.read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{self.path} holds no bisection.", f"a folder with a {STATE}", "check the path given by --out"
            ) from None
        if f'"{SCHEMA}"' not in text:
            raise UsageError(
                f"{self.state_file} is not of schema {SCHEMA}.", "a bisection of this version", "name another --out"
            )
        return _parse(self.state_file, text, State)

    def write(self, state: State) -> None:
        """Replace the state."""
        _replace(self.state_file, state)

    def measurement(self, number: int) -> Measurement | None:
        """What a probe measured; None if its file is gone."""
        path = self.probe_file(number)
        return _parse(path, path.read_text(), Measurement) if path.exists() else None

    def write_measurement(self, number: int, measurement: Measurement) -> None:
        """Replace what a probe measured."""
        _replace(self.probe_file(number), measurement)

    def probe_file(self, number: int) -> Path:
        """File of a probe's measurement."""
        return self.path / "probes" / f"{number:04d}.json"

    def log(self, number: int) -> Path:
        """What a probe's build and kernel printed."""
        return self.path / "logs" / f"{number:04d}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second bisection out of the folder. The lock is the system's and goes with its process, however that ends.

        Raises:
            UsageError: another process bisects here.
            EvidenceError: the folder cannot be made.
        """
        try:
            for part in ("probes", "logs"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("w")
        except OSError as error:
            raise EvidenceError(
                f"{self.path} cannot be made: {error.strerror}.", "a writable folder", "name another --out"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path} is being bisected by another process.",
                    "one at a time",
                    "wait for it (--status shows where it is), or name another --out",
                ) from None
            yield


def _replace(path: Path, document: Record) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(document.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror}.",
            "room on the disk",
            "make room; the same command then goes on",
        ) from error


def _parse(path: Path, text: str, kind: type[Document]) -> Document:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise EvidenceError(
            f"{path} is damaged: {error.errors()[0]['msg']}.",
            f"a {kind.__name__} as JSON",
            "begin anew in another --out",
        ) from None
