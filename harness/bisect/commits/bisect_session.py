"""A bisection from its first probe to its result: check the ends, search, scan the history, diagnose the bug. Resumable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from assay.harness.bisect.commits.measure import BrokenEnvironment, reproduce
from assay.harness.bisect.commits.outcome import changes, is_wrong, operator_change, outcome_of
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.search import (
    End,
    History,
    NextProbe,
    OutcomeCounts,
    Refuted,
    SearchAnswer,
    believe,
    next_round,
)
from assay.harness.bisect.commits.state import (
    BisectFolder,
    BisectResult,
    BisectSpec,
    BisectState,
    CommitProbe,
    Measurement,
    Outcome,
    ProbeOutcome,
    Purpose,
)
from assay.harness.errors import UsageError

SKIPS_BEFORE_CANARY = 5
"""Skipped commits in a row after which the good revision is probed again: if that fails too, the machine is at fault."""
SEARCH_PURPOSES: tuple[Purpose, ...] = ("good-end", "bad-end", "search", "confirm", "verify", "environment")
"""Probes whose outcomes the search uses; the others only describe the history."""

_ENDS: dict[Purpose, Literal["good", "bad"]] = {"good-end": "good", "bad-end": "bad"}
"""Probes of the two revisions that the user gave, and what the user said each one is."""

Show = Callable[[BisectState, str], None]
"""Receives the state and a description of the next action."""


@dataclass(frozen=True)
class Asked:
    """A probe to be made.

    Attributes:
        number: its own in this bisection.
        commit: what is probed.
        purpose: what for.
        name_bug: look for a hypothesis that fits, and read a wrong kernel.
    """

    number: int
    commit: str
    purpose: Purpose
    name_bug: bool = False


class _CommitProber(Protocol):
    """Measures commits."""

    @property
    def slots(self) -> int:
        """Probes that it makes at once."""
        ...

    def __call__(self, asked: Sequence[Asked]) -> Iterator[tuple[Asked, Measurement]]:
        """Yield the measurement of each commit as it ends.

        Raises:
            BrokenEnvironment: a commit cannot be probed, through no fault of its own.
        """
        ...


def history_of(state: BisectState) -> History:
    """Return the range as a `History`."""
    return History([commit.commit for commit in state.history], [commit.parents for commit in state.history])


def count_outcomes(state: BisectState) -> tuple[dict[str, OutcomeCounts], OutcomeCounts, set[str]]:
    """Count outcomes by commit and of the good revision, and list commits that cannot be probed.

    A commit that failed to build or import no more often than it was classified is retried; its outcomes count either way.
    """
    counted: dict[str, OutcomeCounts] = {}
    failed: Counter[str] = Counter()
    for probe in state.probes:
        if probe.purpose not in SEARCH_PURPOSES:
            continue
        if probe.outcome == "skip":
            failed[probe.commit] += 1
            continue
        counted[probe.commit] = counted.get(probe.commit, OutcomeCounts()) + _counted(probe.outcome)

    skipped = {c for c, times in failed.items() if times > counted.get(c, OutcomeCounts()).total}
    return counted, counted.get(state.spec.good, OutcomeCounts()), skipped


def _counted(outcome: Outcome) -> OutcomeCounts:
    return OutcomeCounts(int(outcome == "good"), int(outcome == "bad"))


class Session:
    """One bisection."""

    def __init__(
        self, folder: BisectFolder, state: BisectState, prober: _CommitProber, repository: Repository, show: Show
    ) -> None:
        self._folder, self._prober, self._repository, self._show = folder, prober, repository, show
        self.state = state
        self._history = history_of(state)

    def run(self) -> BisectState:
        """Bisect from the current state, and return the state with its result.

        Raises:
            UsageError: an end is not what the user stated, or cannot be probed.
            BrokenEnvironment: commits cannot be probed through no fault of their own. The session can be resumed later.
        """
        if self.state.result is None:
            while not isinstance(step := self._next(), SearchAnswer):
                self._probe([(probe.commit, probe.purpose) for probe in step])
            if step.outcome == "found":
                self._scan()
            result = self._result(step)  # which probes, too
            self._set(self.state.model_copy(update={"result": result}))
        return self.state

    def _next(self) -> tuple[NextProbe, ...] | SearchAnswer:
        counted, good, skipped = count_outcomes(self.state)
        spec, ends = self.state.spec, (self._end("good-end"), self._end("bad-end"))
        most = self._prober.slots
        step = next_round(self._history, counted, skipped, good, ends, spec.repeats, spec.confidence, most)
        if isinstance(step, str):
            raise self._refuted(step, ends[0].seen, ends[1].seen)
        return step

    def _end(self, purpose: Purpose) -> End:
        seen = [_counted(probe.outcome) for probe in self.state.probes if probe.purpose == purpose]
        commit = self.state.spec.good if _ENDS[purpose] == "good" else self.state.spec.bad
        return End(commit, sum(seen, OutcomeCounts()))

    def _refuted(self, step: Refuted, good: OutcomeCounts, bad: OutcomeCounts) -> UsageError:
        """Make the error for ends that are not as the user stated.

        The next bisection starts again: the cause may be fixed by then.
        """
        spec = self.state.spec
        seen = {
            end: f"{count.good} probes good and {count.bad} bad; last: {self._last(commit)}"
            for end, commit, count in (("good", spec.good, good), ("bad", spec.bad, bad))
        }
        self._set(self.state.model_copy(update={"probes": ()}))
        if step == "flaky":
            return UsageError(
                f"the ends {spec.good[:12]} and {spec.bad[:12]} are too flaky to tell apart: {seen['good']}; {seen['bad']}.",
                "a bad revision that comes out bad more often than the good one",
                "choose calls that show the error more clearly, with --condition or --pack",
            )
        end = "good" if step == "good-refuted" else "bad"
        return UsageError(
            f"the {end} revision {(spec.good if end == 'good' else spec.bad)[:12]} is not {end}: {seen[end]}.",
            f"a revision that comes out {end}",
            "check --good and --bad; to compare errors with the good revision's own, give --against good"
            if end == "good"
            else "check --bad, or choose calls that show the error, with --condition or --pack",
        )

    def _last(self, commit: str) -> str:
        return _describe([probe for probe in self.state.probes if probe.commit == commit][-1])

    def _probe(self, probes: Sequence[tuple[str, Purpose]], name_bug: bool = False) -> None:
        """Probe these commits at once, each for a purpose, and record what came out: ends first, since others rest on them."""
        self._check_environment()
        asked = self._asked(probes, name_bug)
        ends, held = (
            {request.number for request in asked if request.purpose in _ENDS},
            list[tuple[Asked, Measurement]](),
        )
        for request, measured in self._measured(asked):
            if ends and request.number not in ends:
                held.append((request, measured))
                continue
            self._record(request, measured)
            ends.discard(request.number)
            while held and not ends:
                self._record(*held.pop(0))

    def _asked(self, probes: Sequence[tuple[str, Purpose]], name_bug: bool = False) -> list[Asked]:
        first = 1 + max((probe.number for probe in self.state.probes), default=0)
        return [Asked(first + place, commit, purpose, name_bug) for place, (commit, purpose) in enumerate(probes)]

    def _measured(self, asked: Sequence[Asked], doing: str = "") -> Iterator[tuple[Asked, Measurement]]:
        words = [f"{request.purpose.replace('-', ' ')}: {request.commit[:12]}" for request in asked]
        self._show(self.state, doing or ", ".join(words))
        return self._prober(asked)

    def _check_environment(self) -> None:
        run = 0
        for probe in reversed(self.state.probes):
            if probe.outcome != "skip":
                break
            run += 1
        if run < SKIPS_BEFORE_CANARY:
            return
        commit = self.state.spec.good
        asked = self._asked([(commit, "environment")])
        for request, measured in self._measured(
            asked, f"environment: {commit[:12]}, after {run} commits that cannot be probed"
        ):
            outcome = self._outcome(measured)
            if outcome.outcome == "skip":
                kept = self.state.probes[: len(self.state.probes) - run]
                self._set(self.state.model_copy(update={"probes": kept}))
                raise BrokenEnvironment(
                    f"the good revision {commit[:12]} could be probed before and cannot be now: {outcome.reason}",
                    "a machine that still builds and imports it",
                    f"see {self._folder.log(request.number)}; once it is fixed, the same command resumes and repeats the "
                    f"last {run} probes",
                )
            self._record(request, measured)

    def _outcome(self, measured: Measurement) -> ProbeOutcome:
        return outcome_of(measured, self.state.spec, self._good_measurements() or [measured])

    def _record(self, asked: Asked, measured: Measurement) -> None:
        """Classify a measurement, and keep both.

        Raises:
            UsageError: an end cannot be probed.
        """
        outcome = self._outcome(measured)
        if outcome.outcome == "skip" and asked.purpose in _ENDS:
            raise UsageError(
                f"the {_ENDS[asked.purpose]} revision {asked.commit[:12]} cannot be probed: {outcome.reason}",
                "both ends of the range build, import and can be classified",
                f"check --build, --kernel and --source, or --run-arg; see {self._folder.log(asked.number)}",
            )
        self._folder.write_measurement(asked.number, measured)
        probe = CommitProbe(
            **outcome.model_dump(), number=asked.number, commit=asked.commit, purpose=asked.purpose,
            seconds=measured.seconds, build_seconds=measured.build_seconds,
        )  # fmt: skip
        self._set(self.state.model_copy(update={"probes": (*self.state.probes, probe)}))

    def _good_measurements(self) -> list[Measurement]:
        return self._measurements(self.state.spec.good, purposes=("good-end",))

    def _measurements(self, commit: str, purposes: Sequence[Purpose] | None = None) -> list[Measurement]:
        numbers = [
            p.number for p in self.state.probes if p.commit == commit and (purposes is None or p.purpose in purposes)
        ]
        return [m for m in map(self._folder.measurement, numbers) if m is not None]

    def _scan(self) -> None:
        """Probe commits spread over the history, for the error profile and to find other transitions."""
        seen = {p.commit for p in self.state.probes if p.purpose != "scan"}
        free = [commit for commit in self._history.commits if commit not in seen]
        most = min(self.state.spec.scan, len(free))
        chosen = [free[(2 * i + 1) * len(free) // (2 * most)] for i in range(most)]
        done = {p.commit for p in self.state.probes if p.purpose == "scan"}
        left = [commit for commit in chosen if commit not in done]
        while left:
            most = self._prober.slots
            self._probe([(commit, "scan") for commit in left[:most]])
            left = left[most:]

    def _result(self, step: SearchAnswer) -> BisectResult:
        counted, good, skipped = count_outcomes(self.state)
        belief = believe(self._history, counted, good)
        repeated = [count for count in counted.values() if count.total > 1]
        result = BisectResult(
            outcome=step.outcome, suspects=step.commits, confidence=step.confidence, misclassification=belief.rates,
            repeated=sum(count.total for count in repeated), outvoted=sum(min(count.good, count.bad) for count in repeated),
            notes=self._notes(counted, skipped),
        )  # fmt: skip
        return self._named(result, counted) if step.outcome == "found" else result

    def _named(self, result: BisectResult, counted: dict[str, OutcomeCounts]) -> BisectResult:
        spec, commit = self.state.spec, result.suspects[0]
        info = self._repository.describe(commit)
        good = self._good_measurements()
        parent = next((m for p in info.parents for m in self._measurements(p) if m.status == "measured"), None)
        measured = next((m for m in self._measurements(commit) if m.status == "measured"), None)
        if measured is not None and measured.rows:
            measured = self._read(commit) or measured
        shown = [(commit, "the commit"), *((p, f"its parent {p[:12]}") for p in info.parents)]
        checked = "; ".join(f"{what} {_describe_counts(counted.get(c))}" for c, what in shown)
        update: dict[str, object] = {"commit": info, "checked": checked}
        if measured is not None:
            update["findings"] = measured.findings
            update["changes"] = changes(measured, parent, spec, good)
            update["notes"] = (
                *result.notes, *self._operator_change(info.parents, measured), *self._later_regression(measured, good),
            )  # fmt: skip
        return result.model_copy(update=update)

    def _read(self, commit: str) -> Measurement | None:
        """Probe a commit once more, and look for a hypothesis that fits."""
        self._probe([(commit, "name")], name_bug=True)
        return self._folder.measurement(self.state.probes[-1].number)

    def _operator_change(self, parents: Sequence[str], measured: Measurement) -> tuple[str, ...]:
        """Describe how the commit changed what a kernel that was wrong before computes; a parent is then read too."""
        for parent in parents:
            if measured.operator and any(is_wrong(measurement) for measurement in self._measurements(parent)):
                before = self._read(parent)
                change = operator_change(measured, before) if before else ""
                return (change,) if change else ()
        return ()

    def _later_regression(self, measured: Measurement, good: Sequence[Measurement]) -> tuple[str, ...]:
        """List what fails at the bad revision but not at the commit: another regression after it."""
        last = next((m for m in self._measurements(self.state.spec.bad) if m.rows), None)
        if last is None:
            return ()
        more = [f"{c.axis} {', '.join(c.new)}" for c in changes(last, measured, self.state.spec, good) if c.new]
        if not more:
            return ()
        return (
            f"the bad revision also fails where this commit does not ({'; '.join(more)}): there is another regression after it",
        )

    def _notes(self, counted: dict[str, OutcomeCounts], skipped: set[str]) -> tuple[str, ...]:
        classified = dict(counted)
        for probe in self.state.probes:
            if probe.purpose == "scan" and probe.outcome != "skip":
                classified[probe.commit] = OutcomeCounts(int(probe.outcome == "good"), int(probe.outcome == "bad"))
        index = self._history.index
        inside = {c: t for c, t in classified.items() if c in index and t.good != t.bad}
        notes = [self._fixed(inside) or f"the history is monotone as far as the {len(inside)} classified commits show"]
        if skipped:
            notes.append(f"{len(skipped)} commits could not be probed")
        return tuple(notes)

    def _fixed(self, classified: Mapping[str, OutcomeCounts]) -> str:
        """Name a bad commit and its oldest good descendant; empty if there is none."""
        index = self._history.index
        bad = sorted((c for c, t in classified.items() if t.is_bad), key=index.__getitem__)
        for commit in sorted((c for c, t in classified.items() if not t.is_bad), key=index.__getitem__):
            above = self._history.ancestors(index[commit])
            if first := next((c for c in bad if above[index[c]]), ""):
                return (
                    f"the history is not monotone: {first[:12]} is bad and its descendant {commit[:12]} is good, so a "
                    "regression was fixed between them, and the named commit is one of several culprits"
                )
        return ""

    def _set(self, state: BisectState) -> None:
        self.state = state
        self._folder.write(state)
        self._show(state, "")


def _describe_counts(count: OutcomeCounts | None) -> str:
    if count is None:
        return "was not probed"
    word, times = ("bad", count.bad) if count.is_bad else ("good", count.good)
    return f"was {word} in {times} of {count.total} probes"


def _describe(probe: CommitProbe) -> str:
    if probe.worst is None:
        return probe.reason or probe.outcome
    worst = "not finite" if not math.isfinite(probe.worst) else f"{probe.worst:.2g} times its limit"
    return f"{probe.where}, {worst}"


def new_state(spec: BisectSpec, repository: Repository) -> BisectState:
    """Return the state of a new bisection.

    Raises:
        UsageError: the revisions span no range.
    """
    history = repository.between(spec.good, spec.bad, spec.first_parent)
    return BisectState(spec=spec, command=reproduce(spec, spec.bad), history=history)
