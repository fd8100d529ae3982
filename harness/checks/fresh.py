"""Runs failing calls of a kernel in fresh processes, to detect kept state.

A kernel may keep state: a counter, a reused buffer, a table that its first call fills. It is then wrong on a call after hundreds
of others, but correct if a user makes that call alone. So a printed test has always failed in a fresh process first. If a call is
correct there, a search finds the shortest sequence after which it is wrong: the call itself again, one earlier call, or else a
few, by delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from assay import worker
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.checks.check_findings import only_of_chance, state_kept
from assay.harness.checks.kernel_matrix import declared_with, named
from assay.harness.errors import AssayError, UsageError
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.cells import same_values
from assay.harness.localize.diagnose import NONDETERMINISM, STATE_KEPT
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import KernelRun, measure
from assay.harness.localize.shrink import MAX_CALLS, Smallest, head_dims_of, shrunk, source_of, written
from assay.harness.localize.threads import few_threads
from assay.harness.schema import Part
from assay.harness.text import one_line
from assay.harness.verdict import Finding, serious, with_evidence

# Fresh processes for a call, each with other random numbers: if only some are correct, chance decides; and processes to repeat a
# sequence of calls.
_RUNS, _AGAIN = 6, 3
# CPU seconds of a search, and most new processes on a GPU, where each takes seconds to start.
_SECONDS, _SPAWNS = 10.0, 20
# Time limits of a process for its calls, and of the process of a search.
_ATTEMPT_S, _TOTAL_S = 30.0, 300.0
# Most bytes of earlier calls to try: the largest are left out.
_MOST_BYTES = 2**26
# Repetitions of a call beyond the number of earlier calls, and repetitions to try first; failing calls to try alone, and those to
# follow up.
_REPETITIONS, _FEW, _SUSPECTS, _SEARCHED = 64, 16, 6, 2
# Most checks of a kernel in one process, such as of its single cases, that try fresh processes.
_MOST_CHECKS = 6
_checks: Counter[str] = Counter()


class _Shown(Part):
    """The outcome of a failing call in fresh processes."""

    kind: Literal["alone", "sequence", "chance", "unshown", "untried"]
    why: str = ""
    sources: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    times: int = 1


def in_fresh_process(
    smallest: Smallest,
    guard: Guard,
    run: KernelRun,
    findings: Sequence[Finding],
    path: str,
    late: AttentionCall | None = None,
) -> tuple[Smallest, list[Finding]]:
    """Make the smallest failing call in a fresh process; if it is correct there, search for the calls that must precede it.

    Args:
        smallest: the call, and its test.
        guard: the kernel.
        run: its results.
        findings: its findings.
        path: the path by which the process imports it, or an empty string if it cannot be imported.
        late: a call on which it became wrong after many runs.

    Returns:
        The calls with a test that fails in a fresh process, if there is one; and the findings, with kept state if shown.
    """
    varies = [finding for finding in serious(findings) if finding.id in (STATE_KEPT, NONDETERMINISM)]
    if not (smallest.words or varies):
        return smallest, list(findings)
    shown = _shown(smallest, guard, run, path, late, varies[0] if varies else findings[0])
    words, source = smallest.words or next(iter(shown.words), ""), None
    if shown.kind == "alone":
        source = source_of(shown.sources, guard, path) if shown.sources else smallest.source
        words = f"{shown.words[-1] if shown.words else words}; it fails alone, in a fresh process"
    elif shown.kind == "sequence":
        source = source_of(shown.sources, guard, path, shown.times) if shown.sources else None
        again = next(finding.reproduce for finding in findings)
        findings = state_kept(findings, shown.words, shown.times, again)
        words = f"{shown.words[-1]}; right alone, in a fresh process, and wrong "
        words += f"in its run {shown.times}" if shown.times > 1 else f"after: {'; '.join(shown.words[:-1])}"
    else:
        why = shown.why if shown.kind != "untried" else f"not tried in a fresh process: {shown.why}"
        if shown.kind == "chance" or shown.kind == "unshown":
            findings = with_evidence(only_of_chance(findings, shown.kind == "chance"), f"{words}; {why}")
        words += f"; {why}" if words else ""
    alone = shown.kind in ("alone", "untried")
    return Smallest(words, source, alone=alone), list(findings)


def _shown(
    smallest: Smallest, guard: Guard, run: KernelRun, path: str, late: AttentionCall | None, about: Finding
) -> _Shown:
    """Try the smallest call; if it is correct, search for the calls that must precede it."""
    if not path:
        return _Shown(kind="untried", why="no other process can import the kernel")
    _checks[path] += 1
    if _checks[path] > _MOST_CHECKS:
        return _Shown(kind="untried", why=f"{_MOST_CHECKS} checks of this kernel were")
    if smallest.source and (first := _trial(smallest.source(about))).kind != "unshown":
        return first
    shown = _searched(guard, run, path, late)
    if not shown.sources:
        return shown
    again = _trial(source_of(shown.sources, guard, path, shown.times)(about))  # the test itself, in another new process
    if again.kind == "unshown":
        again = _Shown(
            kind="unshown", why="wrong in one fresh process and right in another: the contents of memory may decide"
        )
    return shown if again.kind == "alone" else again.model_copy(update={"words": shown.words[-1:]})


def _ask(job: str, **given: Any) -> _Shown:
    """Do a job of this module in a separate process."""
    try:
        outcome = worker.run(
            worker.Job(f"{__name__}:{job}", given), limits=worker.Limits(total_s=_TOTAL_S), output=subprocess.DEVNULL
        )
    except Exception as error:  # from the kernel, for example if its module needs this process
        return _Shown(kind="untried", why=one_line(str(error)))
    if isinstance(outcome, worker.Done):
        return _Shown.model_validate(outcome.result)
    return _Shown(kind="untried", why=f"that process {outcome.how}")


def _trial(source: str) -> _Shown:
    return _ask("alone", source=source)


def alone(journal: worker.Journal, source: str) -> _Shown:
    """Run a test in several forks of this process: the job of `_trial`. On a GPU it runs here, since forks cannot use the GPU."""
    from assay.harness.checks.check import why_wrong

    module: dict[str, Any] = {}
    with few_threads(()):
        exec(compile(source, "test", "exec"), module)
    named(module["KERNEL"])  # imported, and not called

    def assert_unread(kernel: str, call: AttentionCall, noise: str | None = None) -> None:
        if why := why_wrong(kernel, call, noise, reads=False):
            raise AssertionError(why)

    def is_red(seed: int) -> bool:
        _seed(seed)
        try:
            module["test_the_kernel_is_correct"]()
        except AssertionError:
            return True
        except AssayError as error:  # it breaks its contract, unless it could not be run
            return not isinstance(error, UsageError)
        return False

    module["assert_correct"] = assert_unread
    if any(isinstance(value, AttentionCall) and value.q.is_cuda for value in module.values()):
        return _of_runs([is_red(0)])
    return _of_runs([_forked(partial(is_red, seed)) for seed in range(_RUNS)])


def _of_runs(red: Sequence[object]) -> _Shown:
    """Summarize the same call in several fresh processes: each was wrong (True), correct (False) or gave no answer (None)."""
    if None in red:
        return _Shown(kind="untried", why="the kernel ended the process, or did not return")
    if all(red):
        return _Shown(kind="alone")
    why = f"chance decides: it failed in {red.count(True)} of {len(red)} fresh processes"
    return _Shown(kind="chance", why=why) if any(red) else _Shown(kind="unshown")


def _searched(guard: Guard, run: KernelRun, path: str, late: AttentionCall | None) -> _Shown:
    """Search for the calls after which a call is wrong, in a separate process that forks others."""
    made = list(run.made or (result.call for result in run.results))
    place = {id(call): at for at, call in enumerate(made)}
    failing = [result.call for result in run.results if result.fails]
    varying = [result.call for result in run.results if result.late_differs or result.repeats_differ]
    known = [call for call in failing or ([late] if late is not None else varying) if id(call) in place]
    known = sorted(known, key=lambda call: (call.k.numel(), call.q.numel()))[:_SUSPECTS]
    if not known:
        return _Shown(kind="untried", why="none of the calls that fail was made first")
    kept, left = {place[id(call)] for call in known}, _MOST_BYTES
    for at, size in sorted(enumerate(map(_bytes, made)), key=lambda pair: pair[1]):
        left -= size
        kept |= {at} if left > 0 else set()
    order = sorted(kept)
    with tempfile.TemporaryDirectory(prefix="assay-calls-") as folder:
        file = Path(folder) / "calls.pt"
        torch.save([made[at].to("cpu") for at in order], file)
        return _ask(
            "search", kernel=path, noise=guard.assay.noise, file=str(file), device=str(made[0].q.device),
            suspects=[order.index(place[id(call)]) for call in known], dims=sorted(head_dims_of(guard, run)),
            fails=bool(failing), runs=guard.runs,
        )  # fmt: skip


def _bytes(call: AttentionCall) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in call.tensors.values())


def search(
    journal: worker.Journal,
    kernel: str,
    noise: str,
    file: str,
    device: str,
    suspects: Sequence[int],
    dims: Collection[int],
    fails: bool,
    runs: int,
) -> _Shown:
    """Search for the shortest sequence of calls after which a call is wrong: the job of `_searched`.

    Args:
        journal: unused.
        kernel: the kernel's name.
        noise: the quantisation whose noise is allowed.
        file: the calls in the order in which they were made.
        device: the device for the calls.
        suspects: the indices of the wrong calls.
        dims: the head dims to try.
        fails: whether they were wrong when first made; otherwise they were wrong after all others.
        runs: the number of earlier runs of the kernel.
    """
    _, loaded = named(kernel)
    with few_threads(()):
        made = [call.to(device) for call in torch.load(file, weights_only=False)]
        fresh = _Fresh(kernel, loaded, declared_with(declaration(loaded), noise), device)
        try:
            for at in suspects:
                answers = [fresh.first_wrong([made[at]], seed) for seed in range(fresh.runs)]
                shown = _of_runs([None if answer is None else answer == 0 for answer in answers])
                if shown.kind == "alone":
                    return _smallest(fresh, [made[at]], dims)
                if shown.kind != "unshown":
                    return shown.model_copy(update={"words": (describe(made[at]),)})
            for at in suspects[:_SEARCHED]:
                before = made[:at] if fails else made
                if calls := _sequence(fresh, made[at], before, (len(before) if fails else runs) + _REPETITIONS):
                    return _smallest(fresh, calls, dims)
        except _ChanceError as error:
            return _Shown(kind="chance", why=str(error), words=(describe(made[at]),))
    if fresh.unanswered:
        why = f"right alone, in a fresh process; the calls that must precede it were not found in {fresh.attempts} attempts"
    else:
        why = f"right in a fresh process, alone and after {len(before)} earlier calls: chance or the number of calls decides"
    return _Shown(kind="unshown", why=why, words=(describe(made[at]),))


class _ChanceError(Exception):
    """The same calls give different answers in different fresh processes."""


@dataclass
class _Fresh:
    """Fresh processes of a kernel: forks of this one, which has imported it but made no call; on a GPU, new processes."""

    name: str
    kernel: Kernel
    declared: Declaration
    device: str
    attempts: int = 0
    unanswered: int = 0
    _begun: tuple[float, float] = field(default_factory=lambda: (_cpu(), time.monotonic()))

    @property
    def forks(self) -> bool:
        return self.device == "cpu"

    @property
    def runs(self) -> int:
        return _RUNS if self.forks else 1

    def first_wrong(self, calls: Sequence[AttentionCall], seed: int = 0) -> int | None:
        """Make calls in a fresh process.

        Returns:
            The index of the first wrong occurrence of the last call, or -1; or None without an answer, or if the budget is spent.
        """
        cpu, wall = self._begun
        spent = _cpu() - cpu > _SECONDS or time.monotonic() - wall > _TOTAL_S / 2
        if spent if self.forks else self.attempts >= _SPAWNS:
            self.unanswered += 1
            return None
        self.attempts += 1
        if self.forks:
            answer = _forked(partial(_first_wrong, self.kernel, self.declared, calls, seed))
        else:
            answer = self._spawned(calls, seed)
        self.unanswered += answer is None
        return answer if isinstance(answer, int) else None

    def surely(self, calls: Sequence[AttentionCall]) -> int:
        """Return the common answer of several fresh processes.

        Raises:
            _ChanceError: their answers differ.
        """
        first = self.first_wrong(calls)
        if first is None or first < 0 or not self.forks:
            return -1 if first is None else first
        answers = [first, *(self.first_wrong(calls, seed) for seed in range(1, _AGAIN))]
        if None in answers:
            return -1
        if len(set(answers)) > 1:
            raise _ChanceError(
                "chance decides: the same calls, made in fresh processes, were wrong at different places"
            )
        return first

    def _spawned(self, calls: Sequence[AttentionCall], seed: int) -> object:
        on_cpu = {id(call): call.to("cpu") for call in calls}
        with tempfile.TemporaryDirectory(prefix="assay-calls-") as folder:
            file = Path(folder) / "calls.pt"
            torch.save([on_cpu[id(call)] for call in calls], file)
            given = {
                "kernel": self.name,
                "noise": self.declared.noise,
                "file": str(file),
                "device": self.device,
                "seed": seed,
            }
            outcome = worker.run(
                worker.Job(f"{__name__}:attempt", given),
                limits=worker.Limits(total_s=_TOTAL_S),
                output=subprocess.DEVNULL,
            )
        return outcome.result if isinstance(outcome, worker.Done) else None


def attempt(journal: worker.Journal, kernel: str, noise: str, file: str, device: str, seed: int) -> int:
    """Make calls in this process: the job of an attempt on a GPU."""
    _, loaded = named(kernel)
    moved: dict[int, AttentionCall] = {}
    calls = [moved.setdefault(id(call), call.to(device)) for call in torch.load(file, weights_only=False)]
    return _first_wrong(loaded, declared_with(declaration(loaded), noise), calls, seed)


def _first_wrong(kernel: Kernel, declared: Declaration, calls: Sequence[AttentionCall], seed: int) -> int:
    """Make calls here; see `_Fresh.first_wrong`."""
    _seed(seed)
    last, right = calls[-1], None
    for place, call in enumerate(calls):
        try:
            out = Guard(kernel, declared)(call.clone()).out
        except KernelRefused:
            continue
        if call is not last or (right is not None and same_values(out, right)):
            continue
        if measure(call, out, declared.noise).fails:
            return place
        right = out.clone()
    return -1


def _seed(seed: int) -> None:
    """Seed differently from other processes: if forks drew alike, a random kernel would seem to keep state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _forked(work: Callable[[], object]) -> object:
    """Do work in a fork of this process; return None if it raised, or did not return in time."""
    read, write = os.pipe()
    if not (process := os.fork()):
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    if not select.select([read], [], [], _ATTEMPT_S)[0]:
        os.kill(process, signal.SIGKILL)
    text = os.read(read, 2**10)
    os.close(read)
    os.waitpid(process, 0)
    return json.loads(text) if text else None


def _cpu() -> float:
    """Return the CPU time of this process and of its finished children, in seconds."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _sequence(
    fresh: _Fresh, call: AttentionCall, before: Sequence[AttentionCall], times: int
) -> list[AttentionCall] | None:
    """Find a short sequence of calls that ends with a call that is correct alone but wrong in it, or return None.

    First try the call itself again; then one earlier call (the very first may decide for all, or else the first that changes
    later ones); then as few of all as suffice.
    """
    if (at := fresh.surely([call] * min(times, _FEW))) > 0:
        return [call] * (at + 1)
    for earlier in (*before[:1], *before[-1:]):
        if fresh.surely([earlier, call]) == 1:
            return [earlier, call]
    if (at := fresh.surely([call] * times)) > 0:
        return [call] * (at + 1)
    if not before:
        return None
    changed = fresh.first_wrong([each for earlier in before for each in (earlier, call)])
    if changed is not None and changed > 0 and fresh.surely([before[changed // 2], call]) == 1:
        return [before[changed // 2], call]
    if fresh.first_wrong([*before, call]) in (None, -1):
        return None
    few = _fewest(before, lambda some: fresh.first_wrong([*some, call]) not in (None, -1))
    return [*few, call] if len(few) < MAX_CALLS and fresh.surely([*few, call]) >= 0 else None


def _fewest(
    items: Sequence[AttentionCall], fails: Callable[[Sequence[AttentionCall]], bool]
) -> Sequence[AttentionCall]:
    """Remove unnecessary items in ever smaller parts: delta debugging."""
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[at : at + size] for at in range(0, len(items), size)]
        rests = [[*items[:at], *items[at + size :]] for at in range(0, len(items), size)] if parts > 2 else []
        if (fewer := next(filter(fails, [*chunks, *rests]), None)) is not None:
            parts = max(2, parts - 1) if len(fewer) > size else 2
            items = fewer
        elif parts >= len(items):
            break
        else:
            parts = min(len(items), 2 * parts)
    return items


def _smallest(fresh: _Fresh, calls: Sequence[AttentionCall], dims: Collection[int]) -> _Shown:
    """Shrink the calls of a sequence, and write them; if one of them fails alone, write only that one."""
    alike, calls = len({id(call) for call in calls}) == 1, list(calls)
    if not alike:
        for call in calls[:-1]:
            if fresh.surely([call]) == 0:
                return _smallest(fresh, [call], dims)
    times, last = len(calls) if alike else 1, len(calls) - 1

    def holds(place: int, call: AttentionCall) -> bool:
        tried = [call] * times if alike else [*calls[:place], call, *calls[place + 1 :]]
        if (not alike and fresh.first_wrong([call]) == 0) or fresh.first_wrong(tried) != last:
            return False
        calls[:] = tried
        return True

    texts: list[str | None] = []
    for place in [last] if alike else reversed(range(len(calls))):
        if fresh.forks:
            shrunk(calls[place], dims, partial(holds, place))
        texts.insert(0, written(calls[place], partial(holds, place)))
    return _Shown(
        kind="alone" if len(calls) == 1 else "sequence",
        sources=tuple(text for text in texts if text) if all(texts) else (),
        words=tuple(describe(call) for call in (calls[-1:] if alike else calls)),
        times=times,
    )
