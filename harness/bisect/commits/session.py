"""A bisection from its first probe to its result: prove the ends, search, look around, name the bug. Goes on where it stopped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from assay.harness.bisect.commits.executor import BrokenEnvironment, Prober
from assay.harness.bisect.commits.outcome import ProbeOutcome, changes, judge
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.search import (
    Belief,
    Found,
    Hidden,
    History,
    Lost,
    NextProbe,
    Tally,
    believe,
    next_step,
    proof,
)
from assay.harness.bisect.commits.state import Folder, Measurement, Probe, Purpose, Result, Spec, State
from assay.harness.errors import ExitCode, UsageError

CANARY = 5
"""After so many commits in a row that cannot be tested the good revision is: if it cannot be either, the machine is at fault."""
EVIDENCE: tuple[Purpose, ...] = ("good end", "bad end", "search", "confirm", "verify", "environment")
"""Probes that the search counts with; the others only look around."""

Show = Callable[[State, str], None]
"""Takes the state and what is done next, in words."""


def exit_code(result: Result) -> ExitCode:
    """0 for a commit that was named with the confidence asked for, 3 for none."""
    return ExitCode.PASS if result.verdict == "found" else ExitCode.NO_VERDICT


def history_of(state: State) -> History:
    """The range, as the search wants it."""
    return History([one.commit for one in state.history], [one.parents for one in state.history])


def tallies(state: State) -> tuple[dict[str, Tally], Tally, set[str]]:
    """Verdicts by commit, verdicts on the good revision, and commits that cannot be tested.

    A commit that failed to build or import no more often than it was judged is tried again; its verdicts stand in any case.
    """
    counted: dict[str, Tally] = {}
    failed: Counter[str] = Counter()
    for probe in state.probes:
        if probe.purpose not in EVIDENCE:
            continue
        if probe.outcome == "skip":
            failed[probe.commit] += 1
            continue
        before = counted.get(probe.commit, Tally())
        counted[probe.commit] = Tally(before.good + (probe.outcome == "good"), before.bad + (probe.outcome == "bad"))

    def judged(commit: str) -> int:
        tally = counted.get(commit, Tally())
        return tally.good + tally.bad

    return counted, counted.get(state.spec.good, Tally()), {c for c, times in failed.items() if times > judged(c)}


class Session:
    """One bisection."""

    def __init__(self, folder: Folder, state: State, prober: Prober, repository: Repository, show: Show) -> None:
        self._folder, self._prober, self._repository, self._show = folder, prober, repository, show
        self.state = state
        self._history = history_of(state)

    def run(self) -> State:
        """Bisect, from wherever it stands, and return the state with its result.

        Raises:
            UsageError: an end is not what it was said to be, or cannot be tested.
            BrokenEnvironment: commits cannot be tested, for no fault of theirs. The same session may go on later.
        """
        if self.state.result is None:
            self._prove("good")
            self._prove("bad")
            while isinstance(step := self._next(), NextProbe):
                self._probe(step.commit, step.purpose)
            if isinstance(step, Found):
                self._look_around()
            result = self._result(step)
            self._set(self.state.model_copy(update={"result": result}))
        return self.state

    def _next(self) -> NextProbe | Found | Hidden | Lost:
        counted, good, skipped = tallies(self.state)
        return next_step(self._history, counted, skipped, good, self.state.spec.confidence)

    def _prove(self, end: Literal["good", "bad"]) -> None:
        spec = self.state.spec
        commit = spec.good if end == "good" else spec.bad
        purpose: Purpose = "good end" if end == "good" else "bad end"
        while True:
            # Not what was judged later: an end that was proven stays so when a bisection is gone on with.
            outcomes = [probe.outcome for probe in self.state.probes if probe.purpose == purpose]
            counted = Tally(outcomes.count("good"), outcomes.count("bad"))
            said = proof(counted, end, spec.repeats)
            if said == "proven":
                return
            if said == "more":
                self._probe(commit, purpose)
                continue
            last = [probe for probe in self.state.probes if probe.commit == commit][-1]
            seen = f"judged good {counted.good} and bad {counted.bad} times; last: {_seen(last)}"
            # Begin anew at the next start: what is wrong may be mended until then.
            self._set(self.state.model_copy(update={"probes": ()}))
            if said == "flaky":
                raise UsageError(
                    f"the {end} revision {commit[:12]} is too flaky to tell: {seen}.",
                    f"one that is judged {end} more often than not",
                    "choose calls that tell it more clearly, with --condition or --pack",
                )
            raise UsageError(
                f"the {end} revision {commit[:12]} is not {end}: {seen}.",
                f"a revision that is judged {end}",
                "check --good and --bad; to hold errors against the good revision's own, give --against good"
                if end == "good"
                else "check --bad, or ask for calls that show the error, with --condition or --pack",
            )

    def _probe(self, commit: str, purpose: Purpose, name_bug: bool = False) -> Probe:
        self._check_environment(purpose)
        number = len(self.state.probes) + 1
        self._show(self.state, f"{purpose}: {commit[:12]}")
        self._folder.log(number).unlink(missing_ok=True)
        measured = self._prober.probe(commit, self._folder.log(number), name_bug)
        judged = judge(measured, self.state.spec, self._good_measurements() or [measured])
        if judged.outcome == "skip" and purpose in ("good end", "bad end"):
            raise UsageError(
                f"the {purpose.removesuffix(' end')} revision {commit[:12]} cannot be tested: {judged.reason}",
                "ends of the range that build, import and can be judged",
                f"check --build, --kernel and --source, or --run-arg; see {self._folder.log(number)}",
            )
        return self._record(number, commit, purpose, measured, judged)

    def _check_environment(self, purpose: Purpose) -> None:
        run = 0
        for probe in reversed(self.state.probes):
            if probe.outcome != "skip":
                break
            run += 1
        if run < CANARY or purpose == "environment":
            return
        commit = self.state.spec.good
        number = len(self.state.probes) + 1
        self._show(self.state, f"environment: {commit[:12]}, after {run} commits that cannot be tested")
        measured = self._prober.probe(commit, self._folder.log(number))
        judged = judge(measured, self.state.spec, self._good_measurements())
        if judged.outcome == "skip":
            kept = self.state.probes[: len(self.state.probes) - run]
            self._set(self.state.model_copy(update={"probes": kept}))
            raise BrokenEnvironment(
                f"the good revision {commit[:12]} could be tested and now cannot be: {judged.reason}",
                "a machine that still builds and imports it",
                f"see {self._folder.log(number)} and mend it; the same command then goes on, and tests the last {run} again",
            )
        self._record(number, commit, "environment", measured, judged)

    def _record(self, number: int, commit: str, purpose: Purpose, measured: Measurement, judged: ProbeOutcome) -> Probe:
        self._folder.write_measurement(number, measured)
        probe = Probe(
            number=number, commit=commit, purpose=purpose, outcome=judged.outcome, reason=judged.reason, worst=judged.worst,
            where=judged.where, seconds=measured.seconds, build_seconds=measured.build_seconds,
        )  # fmt: skip
        self._set(self.state.model_copy(update={"probes": (*self.state.probes, probe)}))
        return probe

    def _good_measurements(self) -> list[Measurement]:
        return self._measurements(self.state.spec.good, purposes=("good end",))

    def _measurements(self, commit: str, purposes: Sequence[Purpose] | None = None) -> list[Measurement]:
        numbers = [
            p.number for p in self.state.probes if p.commit == commit and (purposes is None or p.purpose in purposes)
        ]
        return [m for m in map(self._folder.measurement, numbers) if m is not None]

    def _look_around(self) -> None:
        """Probe commits spread over the history, for its error profile and for other transitions."""
        seen = {p.commit for p in self.state.probes if p.purpose != "scan"}
        free = [commit for commit in self._history.commits if commit not in seen]
        most = min(self.state.spec.scan, len(free))
        chosen = [free[(2 * i + 1) * len(free) // (2 * most)] for i in range(most)]
        done = {p.commit for p in self.state.probes if p.purpose == "scan"}
        for commit in chosen:
            if commit not in done:
                self._probe(commit, "scan")

    def _result(self, step: Found | Hidden | Lost) -> Result:
        counted, good, skipped = tallies(self.state)
        belief: Belief = believe(self._history, counted, good)
        repeated = [t for t in counted.values() if t.good + t.bad > 1]
        candidates = (step.commit,) if isinstance(step, Found) else step.commits
        result = Result(
            verdict="found" if isinstance(step, Found) else "hidden" if isinstance(step, Hidden) else "lost",
            candidates=candidates, confidence=step.confidence, flips=(belief.good_flips, belief.bad_flips),
            repeated=sum(t.good + t.bad for t in repeated), flipped=sum(min(t.good, t.bad) for t in repeated),
            notes=self._notes(candidates, counted, skipped),
        )  # fmt: skip
        return result if not isinstance(step, Found) else self._named(result, counted)

    def _named(self, result: Result, counted: dict[str, Tally]) -> Result:
        spec, commit = self.state.spec, result.candidates[0]
        note = self._repository.describe(commit)
        good = self._good_measurements()
        parent = next((m for p in note.parents for m in self._measurements(p) if m.status == "measured"), None)
        measured = next((m for m in self._measurements(commit) if m.status == "measured"), None)
        if measured is not None and measured.rows:
            number = self._probe(commit, "name", name_bug=True).number
            measured = self._folder.measurement(number) or measured
        shown = [(commit, "it"), *((p, f"its parent {p[:12]}") for p in note.parents)]
        checked = "; ".join(f"{what} {_judged(counted.get(c))}" for c, what in shown)
        update: dict[str, object] = {"commit": note, "checked": checked}
        if measured is not None:
            update["findings"] = measured.findings
            update["changes"] = changes(measured, parent, spec, good)
            update["notes"] = (*result.notes, *self._later(measured, good))
        return result.model_copy(update=update)

    def _later(self, measured: Measurement, good: Sequence[Measurement]) -> tuple[str, ...]:
        """What fails at the bad revision and not at the commit: another regression after it."""
        last = next((m for m in self._measurements(self.state.spec.bad) if m.rows), None)
        if last is None:
            return ()
        more = [f"{c.axis} {', '.join(c.new)}" for c in changes(last, measured, self.state.spec, good) if c.new]
        if not more:
            return ()
        return (
            f"the bad revision also fails where this commit does not ({'; '.join(more)}): another regression lies after it",
        )

    def _notes(self, candidates: Sequence[str], counted: dict[str, Tally], skipped: set[str]) -> tuple[str, ...]:
        judged = dict(counted)
        for probe in self.state.probes:
            if probe.purpose == "scan" and probe.outcome != "skip":
                judged[probe.commit] = Tally(int(probe.outcome == "good"), int(probe.outcome == "bad"))
        inside = {c: t for c, t in judged.items() if c in self._history.index and t.good != t.bad}
        notes = []
        bad = [c for c, t in inside.items() if t.is_bad]
        for commit in sorted((c for c, t in inside.items() if not t.is_bad), key=lambda c: self._history.index[c]):
            above = self._history.ancestors(self._history.index[commit])
            worse = [c for c in bad if above[self._history.index[c]]]
            if worse:
                first = min(worse, key=lambda c: self._history.index[c])
                notes.append(
                    f"the history is not monotone: {first[:12]} is bad and its descendant {commit[:12]} is good, so a "
                    "regression was mended between them, and what was named is one of several"
                )
                break
        else:
            notes.append(f"the history is monotone as far as the {len(inside)} commits show that were judged")
        if skipped:
            notes.append(f"{len(skipped)} commits could not be tested")
        return tuple(notes)

    def _set(self, state: State) -> None:
        self.state = state
        self._folder.write(state)
        self._show(state, "")


def _judged(tally: Tally | None) -> str:
    if tally is None:
        return "was not tested"
    many = tally.good + tally.bad
    word, count = ("bad", tally.bad) if tally.is_bad else ("good", tally.good)
    return f"was judged {word} {count} of {many} times"


def _seen(probe: Probe) -> str:
    if probe.worst is None:
        return probe.reason or probe.outcome
    worst = "not finite" if not math.isfinite(probe.worst) else f"{probe.worst:.2g} times its limit"
    return f"{probe.where}, {worst}"


def new_state(spec: Spec, repository: Repository, command: str) -> State:
    """A bisection that has not begun.

    Raises:
        UsageError: there is no range between the revisions.
    """
    return State(spec=spec, command=command, history=repository.between(spec.good, spec.bad, spec.first_parent))
