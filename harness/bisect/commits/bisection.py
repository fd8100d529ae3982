"""Finding the commit that broke a kernel, and probing one checkout: one library call each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.bisect.commits import probe, probe_calls
from assay.harness.bisect.commits.bisect_session import Asked, Session, Show, new_state
from assay.harness.bisect.commits.measure import CALLS, COPY, CommitProbing, Forks, run_build
from assay.harness.bisect.commits.outcome import outcome_of
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.state import (
    ACCURACY_DEFAULTS,
    BisectFolder,
    BisectSpec,
    BisectState,
    Measurement,
    ProbeOutcome,
)
from assay.harness.bisect.commits.worktrees import worktrees
from assay.harness.config import RUNS
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import read_pack
from assay.harness.files import is_unused
from assay.harness.offline.replay import choose
from assay.harness.sweep.executor import Executor, Needs, Task
from assay.harness.sweep.this_machine import ThisMachine

_ANYWHERE = Needs()
"""What a probe needs of a worker by default."""


def bisection_spec(repo: Path, settings: Mapping[str, Any]) -> BisectSpec:
    """Validate the settings of a bisection.

    Args:
        repo: a folder of the repository.
        settings: fields of `BisectSpec`, with any revisions as `good` and `bad`; those that are None or empty get their default.

    Raises:
        UsageError: a setting is missing, contradicts another or names nothing that exists.
    """
    given = {name: value for name, value in settings.items() if value not in (None, "", [])}
    for name in ("good", "bad", "kernel"):
        if name not in given:
            raise UsageError(f"--{name} is missing.", "--good, --bad and --kernel", "see assay bisect commits --help")
    accuracy = given.get("measure_with") == "accuracy"
    if accuracy and (
        given.get("against") == "good" or any(given.get(name) for name in ("pack", "conditions", "calls"))
    ):
        raise UsageError(
            "--with accuracy was given with --pack, --condition, --calls or --against.",
            "an accuracy run per commit, or a replay of calls",
            "remove one of them",
        )
    repository = Repository(repo)
    ends = {end: repository.resolve(given[end]) for end in ("good", "bad")}
    defaults = ACCURACY_DEFAULTS if accuracy else {}
    return _spec(repository, {**defaults, **given, **ends})


def probe_spec(repo: Path, settings: Mapping[str, Any]) -> BisectSpec:
    """Validate the settings of a probe of a checkout, which has no good or bad revision; see `bisection_spec`."""
    given = {name: value for name, value in settings.items() if value not in (None, "", [])}
    return _spec(Repository(repo), {**given, "good": "", "bad": ""})


def _spec(repository: Repository, given: dict[str, Any]) -> BisectSpec:
    kernel = given.get("kernel", "")
    if not Backend.parse(kernel).path:
        raise UsageError(
            f"--kernel {kernel} is not of the form module:function.",
            "a function of the repository",
            "name it as module:function",
        )
    if "pack" in given:
        given["pack"] = str(Path(given["pack"]).resolve())
    return BisectSpec(repo=str(repository.path), **given)


def default_folder(spec: BisectSpec) -> BisectFolder:
    """Return the folder of a bisection without ``--out``, named after its settings."""
    return BisectFolder(RUNS / f"bisect-{spec.digest}")


def latest_folder() -> BisectFolder:
    """Return the folder in ``runs/`` whose bisection wrote its state last.

    Raises:
        UsageError: there is none.
    """
    states = sorted(RUNS.glob("bisect-*/state.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        raise UsageError("There is no bisection in runs/.", "at least one", "give its folder with --out")
    return BisectFolder(states[-1].parent)


def bisect_commits(
    spec: BisectSpec, folder: BisectFolder, show: Show, executor: Executor | None = None, needs: Needs = _ANYWHERE
) -> BisectState:
    """Find the commit that made a kernel worse, or resume the bisection in `folder`.

    Args:
        spec: the question.
        folder: where the state, the measurements and the logs are kept.
        show: receives the state and the next action, before and after each probe.
        executor: makes the probes, as many at once as it has slots; by default this machine, one at a time.
        needs: what each of them needs of a worker.

    Returns:
        The state with its result.

    Raises:
        UsageError: the folder holds another bisection, another process works in it, or an end is not what the user stated.
        AssayError: commits cannot be probed through no fault of their own. The bisection can be resumed later.
    """
    repository = Repository(Path(spec.repo))
    with folder.locked():
        if folder.state_file.exists():
            state = folder.read()
            if state.spec != spec:
                raise UsageError(f"{folder.path} holds another bisection.", "the same one", "use another --out")
        else:
            if not is_unused(folder.path, folder.PARTS):
                raise UsageError(
                    f"{folder.path} is not empty and holds no bisection.",
                    "a new folder, or that of the bisection to be resumed",
                    "name another one with --out",
                )
            state = new_state(spec, repository)
            folder.write(state)
        if state.result is not None:
            return state
        interpret_without_gpu()  # before the process that probes are forked from imports Triton
        calls = None if spec.measure_with == "accuracy" else _calls(folder.path, spec)
        with worktrees(repository) as trees, executor or ThisMachine(needs) as running:
            prober = _Prober(folder, spec, running, needs, trees, calls)
            return Session(folder, state, prober, repository, show).run()


@dataclass
class _Prober:
    """Has an executor make the probes, each a task; see `bisect_session._CommitProber`."""

    folder: BisectFolder
    spec: BisectSpec
    executor: Executor
    needs: Needs
    trees: Path
    calls: Path | None

    @property
    def slots(self) -> int:
        """Probes that are made at once."""
        return self.executor.slots

    def __call__(self, asked: Sequence[Asked]) -> Iterator[tuple[Asked, Measurement]]:
        """Yield the measurement of each commit as it ends."""
        by_key = {f"{request.number:04d}": request for request in asked}
        for key, request in by_key.items():
            place = self.folder.place(request.number)
            shutil.rmtree(place, ignore_errors=True)  # of a probe that was stopped
            work = CommitProbing(self.spec, request.commit, self.trees, request.name_bug)
            self.executor.submit(Task(key, work, place, self.needs, self._inputs))
        for ended in self.executor.ended():
            if ended.error is not None:
                raise ended.error
            assert ended.value is not None
            yield by_key[ended.task.key], ended.value

    @cached_property
    def _inputs(self) -> dict[str, Path]:
        inputs = {} if self.calls is None else {CALLS: self.calls}
        if not isinstance(self.executor, ThisMachine):
            inputs[COPY] = self.trees / "range"
            Repository(Path(self.spec.repo)).write_copy(self.spec.good, self.spec.bad, inputs[COPY])
        return inputs


def probe_checkout(spec: BisectSpec) -> tuple[ProbeOutcome, Measurement]:
    """Build and measure the kernel of a checkout as it is.

    Raises:
        AssayError: the environment is broken.
    """
    interpret_without_gpu()
    top = Path(spec.repo)
    with tempfile.TemporaryDirectory(prefix="assay-probe-") as made:
        scratch = Path(made)
        why, _ = run_build(spec.build, top, spec.build_timeout, scratch / "log")
        if why:
            measured = Measurement(status="build", reason=why)
        else:
            calls, result = _calls(scratch, spec), scratch / "result.json"
            task = probe.ProbeTask(top, spec.sources, spec.kernel, calls, result, scratch / "log")
            measured = Forks().run(task, spec.timeout)
    return outcome_of(measured, spec, []), measured


def _calls(folder: Path, spec: BisectSpec) -> Path:
    """Write the file of the calls once, so that every commit computes the same ones."""
    file = (folder / probe_calls.FILE).resolve()
    if not file.exists():
        if spec.pack:
            candidates = probe_calls.recorded_calls([recorded.call for recorded in choose(read_pack(Path(spec.pack)))])
        else:
            candidates = probe_calls.matrix_calls(spec.seed)
        probe_calls.write_calls(file, probe_calls.choose_calls(candidates, spec.conditions, spec.calls))
    return file
