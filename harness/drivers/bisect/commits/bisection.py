"""A bisection from its first probe to its result: check the ends, search, diagnose the bug. Resumable.

A commit is probed until one outcome leads clearly: a racy kernel comes out both ways. Both ends are checked first, so that a
wrong ``--good``, a broken environment and calls that do not show the error are reported instead of bisected.
"""

from __future__ import annotations

import hashlib
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.config import RUNS
from assay.harness.drivers.bisect import Outcome
from assay.harness.drivers.bisect.commits.probe import chosen_calls
from assay.harness.drivers.bisect.commits.repo import Repository
from assay.harness.drivers.bisect.commits.state import (
    BisectFolder,
    BisectResult,
    BisectSpec,
    BisectState,
    CommitProbe,
    Measurement,
    Purpose,
)
from assay.harness.errors import GIT_ABORT, AssayError, UsageError
from assay.harness.files import is_unused, lock_folder
from assay.harness.sides import hide
from assay.worker import Done, Job, Limits, TimedOut, run, run_command

# Seconds that a kernel may take for all calls together.
_LIMIT_S = 300.0

_Measure = Callable[[str, int, bool], Measurement]
"""Measures a commit, given its hash, the number of the probe, and whether to look for a hypothesis that fits."""


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3, or 128 under ``git bisect run``."""


def bisection_spec(repo: Path, settings: Mapping[str, Any], *, ends: bool = True) -> BisectSpec:
    """Validate the settings of a bisection.

    Args:
        settings: fields of `BisectSpec`, with any revisions as `good` and `bad`; None or an empty value selects the default.
        ends: whether to resolve a good and a bad revision; probing a checkout needs neither.

    Raises:
        UsageError: a setting is missing, contradicts another one, or names something that does not exist.
    """
    given = {name: value for name, value in settings.items() if value not in (None, "", [])}
    for name in ("good", "bad", "kernel") if ends else ():
        if name not in given:
            raise UsageError(f"--{name} is missing.", "--good, --bad and --kernel", "see assay bisect commits --help")
    repository, kernel = Repository(repo), given.get("kernel", "")
    given |= {end: repository.resolve(given[end]) if ends else "" for end in ("good", "bad")}
    if not Backend.parse(kernel).path:
        problem = f"--kernel {kernel} is not of the form module:function."
        raise UsageError(problem, "a function of the repository", "name it as module:function")
    if "pack" in given:
        given["pack"] = str(Path(given["pack"]).resolve())
    return BisectSpec(repo=str(repository.path), **given)


def bisect_commits(spec: BisectSpec, out: Path | None, say: Callable[[str], None]) -> tuple[BisectState, BisectFolder]:
    """Find the commit that made a kernel worse, or resume the bisection in its folder.

    Args:
        out: folder for the state and the logs; by default one named after the question.

    Raises:
        UsageError: the folder holds another bisection, another process works in it, or an end is not what the user stated.
        AssayError: the environment, not the commits, prevents probing. The bisection can be resumed later.
    """
    recorded = spec.recorded()
    digest = hashlib.sha256(recorded.model_dump_json().encode()).hexdigest()[:10]
    folder, repository = BisectFolder(out or RUNS / f"bisect-{digest}"), Repository(Path(spec.repo))
    history = repository.between(spec.good, spec.bad)
    lock = lock_folder(folder.path)
    state = folder.read()
    if state is None and not is_unused(folder.path, ("logs",)):
        raise UsageError(
            f"{folder.path} is not empty and holds no bisection.",
            "a new folder, or the folder of the bisection to resume",
            "name another one with --out",
        )
    state = state or BisectState(spec=recorded, command=reproduce(spec, spec.bad), history=history)
    if state.spec != recorded:
        raise UsageError(f"{folder.path} holds another bisection.", "the same one", "use another --out")
    say(f"{len(history)} commits in {folder.path}; {len(state.probes)} probes are already done")
    if state.result is None:
        interpret_without_gpu()  # the processes of the probes inherit it
        chosen_calls(spec.pack, spec.calls)  # refuses a pack that cannot be read
        with repository.worktree() as tree:
            state = _Bisection(folder, state, _measure_in(tree, repository, spec, folder), repository, say).run()
    del lock
    return state, folder


def probe_checkout(spec: BisectSpec) -> Measurement:
    """Build and measure the kernel of a checkout as it is.

    Raises:
        AssayError: the environment is broken.
    """
    interpret_without_gpu()
    with tempfile.TemporaryDirectory(prefix="assay-probe-") as made:
        return _measure(spec, Path(spec.repo), Path(made) / "log")


def _measure_in(tree: Path, repository: Repository, spec: BisectSpec, folder: BisectFolder) -> _Measure:
    """Make the function that checks out a commit in a worktree, builds it unless it is already built, and measures it."""
    built = ""

    def of(commit: str, number: int, name_bug: bool) -> Measurement:
        nonlocal built
        log = (folder.path / "logs" / f"{number:04d}" / "log.txt").resolve()
        log.parent.mkdir(parents=True, exist_ok=True)
        if built != commit:
            repository.checkout(tree, commit)
        once = spec if built != commit else spec.model_copy(update={"build": ""})
        measured = _measure(once, tree, log, name_bug=name_bug, reproduce=reproduce(spec, commit))
        built = "" if measured.status == "build" else commit
        return measured

    return of


def _measure(spec: BisectSpec, tree: Path, log: Path, *, name_bug: bool = False, reproduce: str = "") -> Measurement:
    """Build the kernel of a worktree, and measure it in a fresh process.

    Args:
        name_bug: look for a hypothesis that fits, and probe what the kernel computes; takes seconds.

    Raises:
        BrokenEnvironment: the build exited with 128 or more (git's convention for a broken environment), or the measuring
            process raised an error that is not the kernel's.
    """
    if spec.build and (why := _build(spec.build, tree, log)):
        return Measurement(status="build", reason=why)
    given = {"tree": str(tree.resolve()), "spec": spec, "name_bug": name_bug, "reproduce": reproduce}
    try:
        with log.open("ab") as output:
            job = Job("assay.harness.drivers.bisect.commits.probe:measure", given)
            outcome = run(job, limits=Limits(total_s=_LIMIT_S), output=output)
    except UsageError:
        raise
    except Exception as error:
        raise BrokenEnvironment(
            f"a probe failed before it had measured anything: {str(error).splitlines()[0]}",
            "a machine on which the kernel can be measured",
            f"see {log}; the same command then resumes",
        ) from error
    if isinstance(outcome, Done):
        return Measurement(**outcome.result)
    if outcome.events:  # a wrong kernel is measured before it is probed further
        return Measurement(**outcome.events[-1]["measurement"])
    if isinstance(outcome, TimedOut):
        return Measurement(status="died", reason=f"it did not finish within {_LIMIT_S:.0f} s")
    return Measurement(status="died", reason=f"the process {outcome.how}: {_tail(log)}")


def _build(command: str, folder: Path, log: Path, timeout: float = 7200.0) -> str:
    """Run a build command in a folder; return the reason if it failed, or an empty string."""
    code = run_command(["/bin/sh", "-c", command], folder, log=log, seconds=timeout)
    if code is None:
        return f"the build did not finish within {timeout:.0f} s"
    if code < 0 or code >= GIT_ABORT:
        raise BrokenEnvironment(
            f"the build command exited with {code}: {_tail(log)}",
            "exit code 0 if it built, 1 to 127 if the commit does not build",
            "fix the environment; the same command then resumes",
        )
    return f"the build exited with {code}: {_tail(log)}" if code else ""


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log on one line, without secrets: a build may print its own command."""
    with suppress(OSError):
        said = " ".join(log.read_text(errors="replace")[-4 * most :].split())
        return hide("log", said)[-most:] or "it printed nothing"
    return "it printed nothing"


@dataclass
class _Bisection:
    """One bisection, which reports each probe with a call of `say`."""

    folder: BisectFolder
    state: BisectState
    measure: _Measure
    repository: Repository
    say: Callable[[str], None]

    def run(self) -> BisectState:
        """Bisect from the current state, and return the state with its result.

        Raises:
            UsageError: an end is not what the user stated, or cannot be probed.
            BrokenEnvironment: the environment, not the commits, prevents probing. The bisection can be resumed later.
        """
        if self.state.result is not None:
            return self.state
        self._prove("good", self.state.spec.good, "check --good, --build and --kernel")
        hint = "check --bad, or choose calls that show the error more clearly, with --pack"
        self._prove("bad", self.state.spec.bad, hint)
        suspects = self._search()
        ambiguous = BisectResult(outcome="ambiguous", suspects=suspects)
        result = self._named(suspects[0]) if len(suspects) == 1 else ambiguous
        unclassified = list(self._classes().values()).count("skip")
        self._set(result=result.model_copy(update={"unclassified": unclassified}))
        return self.state

    def _prove(self, end: Literal["good", "bad"], commit: str, hint: str) -> None:
        """Check that an end is what the user stated; if it is not, forget its probes, so that the next bisection starts again."""
        if self._classify(commit, "good-end" if end == "good" else "bad-end") == end:
            return
        seen, last = self.state.outcomes(commit), [probe for probe in self.state.probes if probe.commit == commit][-1]
        self._set(probes=())
        counts = ", ".join(f"{seen.count(outcome)} {outcome}" for outcome in dict.fromkeys(seen))
        problem = f"the {end} revision {commit[:12]} is not {end}: {len(seen)} probes: {counts}; last: {last.said}."
        raise UsageError(problem, f"a revision that builds, imports and comes out {end}", hint)

    def _search(self) -> tuple[str, ...]:
        """Halve the suspects until one is left or the rest cannot be probed; return them, oldest first."""
        spec, place = self.state.spec, {commit: i for i, commit in enumerate(self.state.history)}
        while True:
            bad, goods, classes = spec.bad, [spec.good], self._classes()
            # In search order, each bad commit is an ancestor of the one before it, so the last one is the earliest.
            for commit, outcome in classes.items():
                bad = commit if outcome == "bad" else bad
                goods += [commit] if outcome == "good" else []
            # A good descendant of a bad commit is a regression that was fixed. The search continues with the older regression.
            goods = [good for good in goods if not self.repository.is_ancestor(bad, good)]
            suspects = self.repository.halving(bad, goods)
            left = [commit for commit in suspects if commit not in classes]
            if left:  # skip away from commits that do not build, doubling the distance each time
                self._classify(left[min(2 ** (len(suspects) - 1 - len(left)) - 1, len(left) - 1)], "search")
                continue
            parents = self.repository.describe(bad).parents
            inferred = [parent for parent in parents if parent in place and parent not in classes]
            if len(suspects) > 1 or not inferred:
                return tuple(sorted(suspects, key=place.__getitem__))
            self._classify(inferred[0], "verify")

    def _classes(self) -> dict[str, Outcome]:
        """Return the class of each probed commit, in the order of the search."""
        commits = dict.fromkeys(probe.commit for probe in self.state.probes)
        return {commit: outcome for commit in commits if (outcome := self.state.settled(commit))}

    def _classify(self, commit: str, purpose: Purpose) -> Outcome:
        """Probe a commit until it is classified."""
        while (outcome := self.state.settled(commit)) is None:
            self._probe(commit, purpose)
        return outcome

    def _probe(self, commit: str, purpose: Purpose) -> Measurement:
        """Probe a commit and record the outcome."""
        number, begun = len(self.state.probes) + 1, time.monotonic()
        measured = self.measure(commit, number, purpose == "name")
        outcome, seconds = measured.outcome(self.state.spec.raises), time.monotonic() - begun
        told = measured.model_dump(exclude={"findings"})
        probe = CommitProbe(**told, number=number, commit=commit, purpose=purpose, came_out=outcome, seconds=seconds)
        self.say(f"{number}: {purpose} {commit[:12]} {outcome}, {measured.said}")
        self._set(probes=(*self.state.probes, probe))
        return measured

    def _named(self, commit: str) -> BisectResult:
        """Describe the culprit: git's description of it, and the bug."""
        seen = any(probe.commit == commit and probe.worst is not None for probe in self.state.probes)
        findings = self._probe(commit, "name").findings if seen else ()
        info = self.repository.describe(commit)
        return BisectResult(outcome="found", suspects=(commit,), commit=info, findings=findings)

    def _set(self, **changed: object) -> None:
        self.state = self.state.model_copy(update=changed)
        self.folder.write(self.state)


def reproduce(spec: BisectSpec, bad: str) -> str:
    """Return the command that asks the same question with another bad revision, without secrets."""
    words, spec = list[str](), spec.recorded()
    for name, field in BisectSpec.model_fields.items():
        value = {"good": spec.good[:12], "bad": bad[:12]}.get(name, getattr(spec, name))
        if value != field.default:
            words.append(f"--{name}={value}")
    return shlex.join(["assay", "bisect", "commits", *words])
