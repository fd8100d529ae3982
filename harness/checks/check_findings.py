"""The findings of a check: bugs of a kernel's outputs, breaches of its contract, and untested conditions of a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.interpreter import BFLOAT16_BROKEN
from assay.harness.attention.matrix import Case
from assay.harness.attention.shapes import Shape, shape_of
from assay.harness.checks.coverage import DECLARABLE, Conditions, advice_on, separating
from assay.harness.conditions import has_cached_prefix
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.diagnose import (
    CALL_REFUSED,
    INPUT_WRITTEN,
    NONDETERMINISM,
    STATE_KEPT,
    TITLES,
    also,
    diagnose,
)
from assay.harness.localize.experiment import NOTHING_TRIED, Experiments
from assay.harness.localize.faults import OUTPUT, OUTSIDE, Came, Fault, faults_of, kind_of, shows
from assay.harness.localize.features import words
from assay.harness.localize.guard import Guard
from assay.harness.localize.guarded_memory import over_reads
from assay.harness.localize.kernel_runs import CallResult, KernelRun
from assay.harness.localize.lse import LSE_FINDINGS, LSE_WRONG
from assay.harness.localize.raised import RAISED
from assay.harness.text import counted, percent
from assay.harness.verdict import CONTRACT_BROKEN, UNEXPLAINED, Finding, serious, with_evidence

# Share of the calls of each phase that a kernel must compute, rather than refuse, to pass. Its declaration should state what it
# does not support, instead of leaving that to refusals.
_LEAST_COVERED = 0.9
_LEAST_LEFT = 0.1
"""A declaration must leave this share of the requested calls for a pass."""
_NO_EXPERIMENTS: Mapping[str, Experiments] = {}
# From this share of calls in one layer on, layers are not distinguished, unless only some layers fail.
_ONE_LAYER = 0.8


@dataclass(frozen=True)
class MatrixRun:
    """A kernel's run on a matrix.

    Attributes:
        run: its results and refusals.
        guard: the kernel, with its breaches of the contract.
        asked: all cases, with their calls.
        again: a command that repeats the check.
    """

    run: KernelRun
    guard: Guard
    asked: Sequence[tuple[Case, AttentionCall]]
    again: str

    @cached_property
    def made(self) -> list[tuple[Case, AttentionCall]]:
        """The cases that were run, with their calls."""
        run = self.run
        calls = (*(result.call for result in run.results), *run.delegated, *(call for call, _ in run.refused))
        ran = set(map(id, calls))
        return [(case, call) for case, call in self.asked if id(call) in ran]

    @cached_property
    def left_out(self) -> list[Case]:
        """The cases that were not run because the kernel was already clearly wrong."""
        ran = {id(call) for _, call in self.made}
        return [case for case, call in self.asked if id(call) not in ran]

    @cached_property
    def results(self) -> list[tuple[Case, CallResult]]:
        """The computed cases with their results."""
        case_of = {id(call): case for case, call in self.asked}
        return [(case_of[id(result.call)], result) for result in self.run.results]

    @cached_property
    def computed(self) -> list[Case]:
        """The cases that the kernel computed."""
        return [case for case, _ in self.results]

    @cached_property
    def refused(self) -> list[tuple[Case, str]]:
        """The cases that the kernel did not compute, and why."""
        case_of = {id(call): case for case, call in self.asked}
        return [(case_of[id(call)], why) for call, why in self.run.refused]

    @cached_property
    def broken(self) -> tuple[tuple[Case, str], ...]:
        """The refused cases that break the contract.

        If a kernel raised on every call with a value that it does not claim (`Case.beyond`), that only counts as a refusal.
        """
        seen = {(case.condition["phase"], axis, case.condition[axis]) for case in self.computed for axis in case.beyond}

        def claimed(case: Case) -> bool:
            return all((case.condition["phase"], axis, case.condition[axis]) in seen for axis in case.beyond)

        breaches = self.guard.breaches
        return tuple(
            (case, why)
            for case, why in self.refused
            if why in breaches and (claimed(case) or not why.startswith(RAISED))
        )

    @cached_property
    def came(self) -> list[tuple[Shape, AttentionCall, Came]]:
        """All calls with their outcomes, smallest first."""
        came: list[tuple[Case, AttentionCall, Came]] = [(case, result.call, result) for case, result in self.results]
        case_of = {id(call): case for case, call in self.asked}
        came += [(case_of[id(call)], call, why) for call, why in self.run.refused]
        came.sort(key=lambda row: (row[1].k.numel(), row[1].q.numel()))
        return [(_shape_in(case, call), call, what) for case, call, what in came]

    @cached_property
    def faults(self) -> dict[str, Fault]:
        """The faults that any call shows, by name, outputs first."""
        every = faults_of(why for _, why in self.broken)
        return {name: fault for name, fault in every.items() if any(shows(fault, came) for _, _, came in self.came)}

    @property
    def other(self) -> tuple[AttentionCall, Fault] | None:
        """The smallest call with a fault other than wrong outputs, and the fault, or None if outputs are wrong or nothing is."""
        fault = next(iter(self.faults.values()), None)
        if fault is None or OUTPUT in self.faults:
            return None
        return next((call, fault) for _, call, came in self.came if shows(fault, came))

    def findings(self, experiments: Mapping[str, Experiments] = _NO_EXPERIMENTS) -> list[Finding]:
        """List the findings: bugs first, then breaches of the contract.

        Args:
            experiments: their results by fault. Findings about outputs hold on their calls too.
        """
        again, outside = self.again, list[Finding]()
        findings = [*self._bugs(experiments.get(OUTPUT, NOTHING_TRIED)), *self._breaches(experiments)]
        name_of = {INPUT_WRITTEN: INPUT_WRITTEN} | dict.fromkeys(LSE_FINDINGS, LSE_WRONG)
        findings = [_tried(finding, experiments.get(name_of.get(finding.id, ""))) for finding in findings]
        if failed := self.run.failed_repeats:
            call, why = failed[0]
            where = f"{counted(len(failed), 'call')}, when repeated"
            findings.append(breach(why, where, (example(call),), again))
        if shared := self.guard.shared:
            how = "returns the memory of an earlier output, which its caller may still hold"
            outside.append(breach(how, counted(len(shared), "call"), (example(shared[0]),), again))
        if written := self.guard.written:
            call, how = min(written, key=lambda pair: (pair[0].k.numel(), pair[0].q.numel()))
            number = len({id(call) for call, _ in written})
            outside.append(_tried(_outside(how, counted(number, "call"), call, again), experiments.get(OUTSIDE)))
        if read := self._over_read:
            outside.append(_outside(read[1], "calls that are out of bounds", read[0], again))
        # Foreign memory changes between calls, so changing answers are evidence of reading it, not of kept state.
        changing = [finding for finding in findings if outside and finding.id in (STATE_KEPT, NONDETERMINISM)]
        for finding in changing:
            outside[0] = also(outside[0], finding)
        every = [*(finding for finding in findings if finding not in changing), *outside]
        return with_evidence(every, *(line for tried in experiments.values() for line in tried.failed))

    @cached_property
    def _over_read(self) -> tuple[AttentionCall, str] | None:
        """The call in which it reads outside of its inputs, and how: experiments on other calls do not change that."""
        return over_reads(self.guard.ask, self.run.results)

    def _bugs(self, experiments: Experiments) -> list[Finding]:
        """Diagnose the computed cases; findings hold on the calls of experiments too."""
        rule = experiments.tried.rule if experiments.tried else ()
        results, drawn = list(self.run.results), [result for _, result in experiments.kept]
        if not any(prop.feature == "layer" for prop in rule):
            moved = _in_one_layer([*results, *drawn])
            results, drawn = moved[: len(results)], moved[len(results) :]
        run = replace(self.run, results=tuple(results), drawn=tuple(drawn), points=experiments.points)
        return [f for f in diagnose(run, self.again, experiments.tried) if f.id != CALL_REFUSED]

    def _breaches(self, experiments: Mapping[str, Experiments]) -> list[Finding]:
        """Make one finding for each place that raises, and one for outputs that break the contract."""
        kinds: dict[str, list[tuple[Case, str]]] = {}
        for case, why in self.broken:
            kinds.setdefault(kind_of(why), []).append((case, why))
        call_of = {case.name: call for case, call in self.made}
        findings = []
        for kind, some in kinds.items():
            calls = (call_of[case.name] for case, _ in some)
            smallest = min(calls, key=lambda call: (call.k.numel(), call.q.numel()))
            where, shown = f"{len(some)} of {len(self.made)} calls", f"smallest failing call: {describe(smallest)}"
            findings.append(_tried(breach(some[0][1], where, (shown,), self.again), experiments.get(kind)))
        return findings

    def missing(self, asked: Sequence[str], excluded: int, skips_bfloat16: bool) -> tuple[str, ...]:
        """List the conditions of a pass that were not tested.

        Args:
            asked: the requested phases.
            excluded: the number of cases that the declaration excludes.
            skips_bfloat16: whether bfloat16 may be left out where Triton's interpreter cannot compute it.
        """
        left = len(self.asked)
        hardly = left < _LEAST_LEFT * (excluded + left)
        skipped = {case.name for case, why in self.refused if skips_bfloat16 and why == BFLOAT16_BROKEN}
        claimed = [case for case, _ in self.made if not (case.beyond or case.name in skipped)]
        return (
            *_untested(asked, self.guard.assay, [result.call for result in self.run.results]),
            *[f"its declaration excludes {excluded} of {excluded + left} requested calls"] * hardly,
            *_refused_too_much(claimed, self.computed),
        )


def _tried(finding: Finding, experiments: Experiments | None) -> Finding:
    """Add the condition from experiments to a finding, if there is one."""
    tried = experiments.tried if experiments else None
    if tried is None or tried.outside or not (tried.rule or tried.context):
        return finding
    counts = f"right on {tried.right} of {tried.right} calls, wrong on {tried.wrong} of {tried.wrong}"
    where = words(tried.rule, tried.context)
    return finding.model_copy(
        update={
            "where": f"{finding.where}, only where {where}",
            "does": finding.does and f"{finding.does} where {where}",
            "evidence": (*finding.evidence, f"the condition was tested on calls drawn to refute it: {counts}"),
        }
    )


def outside_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Order the findings: an access outside comes before an error that neither a hypothesis nor the read-out explains."""
    first = [finding for finding in findings if finding.id == CONTRACT_BROKEN and finding.does]
    unread = bool(findings) and findings[0].id == UNEXPLAINED and not findings[0].operator
    return (*first, *(finding for finding in findings if finding not in first)) if unread else tuple(findings)


def not_endured(call: AttentionCall, how: str, again: str) -> Finding:
    """Make the finding that a kernel became wrong after many runs."""
    return Finding(
        id=STATE_KEPT, title=TITLES[STATE_KEPT], severity="serious", where=f"{call.phase}, after many runs",
        diagnosis=f"the kernel {how}", evidence=(f"the call: {describe(call)}",), reproduce=again,
    )  # fmt: skip


def state_kept(findings: Sequence[Finding], calls: Sequence[str], times: int, again: str) -> list[Finding]:
    """Put the finding of kept state, shown in fresh processes, first; it replaces findings about outputs that depend on it.

    Args:
        findings: the findings of the check.
        calls: descriptions of the calls: the last is correct alone, and wrong after the others.
        times: the run in which the last call is wrong if it is made alone.
        again: a command that repeats the check.
    """
    if times > 1:
        where = f"in run {times} of the same call"
        right = "first run" if times == 2 else f"first {times - 1} runs"
        text = f"in a fresh process the kernel is right in the {right} of a call, and wrong in run {times}"
        does = f"keeps state between calls: a call that is right at first is wrong in its run {times}"
    else:
        where = "after another call" if len(calls) == 2 else f"after {len(calls) - 1} other calls"
        text = f"in a fresh process the kernel is right on a call alone, and wrong on it {where}"
        does = f"keeps state between calls: a call that is right alone is wrong {where}"
    kinds = (UNEXPLAINED, STATE_KEPT, NONDETERMINISM, OUTPUT_SCALED, OUTPUT_NOT_WRITTEN)
    named = [
        f'its wrong outputs were also explained as "{finding.title}"' for finding in findings if finding.id in BY_ID
    ]
    return [
        Finding(
            id=STATE_KEPT, title=TITLES[STATE_KEPT], severity="serious", where=where, diagnosis=text, does=does,
            evidence=(*(f"first: {call}" for call in calls[:-1]), f"{'the call' if times > 1 else 'then'}: {calls[-1]}", *named),
            reproduce=again,
        ),
        *(finding for finding in findings if finding.id not in kinds and finding.id not in BY_ID),
    ]  # fmt: skip


def keeps_state(findings: Sequence[Finding]) -> bool:
    """Return True if fresh processes showed that a kernel keeps state."""
    return any(finding.id == STATE_KEPT and finding.does for finding in findings)


def only_of_chance(findings: Sequence[Finding], shown: bool) -> list[Finding]:
    """Drop the finding of kept state if the kernel is not deterministic; if that is `shown`, rename it to nondeterminism."""
    if any(finding.id == NONDETERMINISM for finding in serious(findings)):
        return [finding for finding in findings if finding.id != STATE_KEPT]
    title = {"id": NONDETERMINISM, "title": TITLES[NONDETERMINISM]}
    return [finding.model_copy(update=title) if shown and finding.id == STATE_KEPT else finding for finding in findings]


def _shape_in(case: Case, call: AttentionCall) -> Shape:
    """Return the shape of a case, or the part that its call shows if the call was not drawn."""
    return case.shape or shape_of(call)


def breach(how: str, where: str, evidence: tuple[str, ...], again: str) -> Finding:
    """Make the finding that a kernel broke its contract; `how` follows "the kernel"."""
    return Finding(
        id=CONTRACT_BROKEN, title="kernel contract broken", severity="serious", where=where, diagnosis=f"the kernel {how}",
        evidence=evidence, reproduce=again,
    )  # fmt: skip


def _outside(how: str, where: str, call: AttentionCall, again: str) -> Finding:
    """Make the finding that a kernel accesses memory outside of its tensors."""
    made = breach(how, where, (example(call),), again)
    return made.model_copy(update={"title": "memory outside of its tensors", "does": how})


def example(call: AttentionCall) -> str:
    """Name a call as the example of a finding."""
    return f"for example {describe(call)}"


def _in_one_layer(results: Sequence[CallResult]) -> list[CallResult]:
    """Move all calls to the layer of most of them, unless the calls are spread over layers.

    A diagnosis looks at each layer separately, so a few calls of another layer would seem to have a separate bug. If the common
    layer is correct, calls are moved to a wrong one, so that a finding does not accuse it.
    """
    [(layer, most)] = Counter(result.call.layer for result in results).most_common(1) or [(0, 0)]
    if most < _ONE_LAYER * len(results):
        return list(results)
    failing = Counter(result.call.layer for result in results if result.fails)
    if failing and layer not in failing:
        [(layer, _)] = failing.most_common(1)
    return [
        result if result.call.layer == layer else result.updated(call=result.call.with_spec(layer=layer))
        for result in results
    ]


def _untested(asked: Sequence[str], declared: Declaration, calls: Sequence[AttentionCall]) -> list[str]:
    """List conditions without a computed call: every phase, with a cached prefix and (extend only) without."""
    missing = []
    for phase in asked:
        cached = [all(call.prefixes) for call in calls if call.phase == phase]
        seen = {has_cached_prefix(call.prefixes) for call in calls if call.phase == phase}
        if not cached:
            phases = declared.phases
            why = "" if phase in phases else f" (the kernel declares {' and '.join(phases)} only)"
            missing.append(f"no {phase} call was computed{why}")
            continue
        if True not in seen and declared.prefix:
            missing.append(f"no {phase} call with a cached prefix was computed")
        if phase == "extend" and all(cached):
            missing.append("no extend call without a cached prefix was computed")
    return missing


def _refused_too_much(made: Sequence[Case], computed_cases: Sequence[Case]) -> list[str]:
    """List excessive refusals: values of an axis without a computed call, and phases with too few."""
    computed = [case.condition for case in computed_cases if not case.beyond]
    missing = []
    for phase in dict.fromkeys(case.condition["phase"] for case in made):
        asked = [case.condition for case in made if case.condition["phase"] == phase]
        there = [condition for condition in computed if condition["phase"] == phase]
        if not there:
            continue  # `_untested` says so
        if len(there) < _LEAST_COVERED * len(asked):
            share = percent(_LEAST_COVERED)
            missing.append(f"only {len(there)} of {len(asked)} {phase} calls were computed; a pass needs {share}")
        missing += _never_computed(phase, asked, there)
    return missing


def _never_computed(phase: str, asked: Sequence[Conditions], computed: Sequence[Conditions]) -> list[str]:
    """List the values that a kernel computed in no call of a phase: by the axis that explains these calls, if there is one."""
    lost = [condition for condition in asked if condition not in computed]
    only = separating(lost, computed) if lost else None
    if only is not None and only.name in DECLARABLE:
        return [_every(phase, *only)]
    missing = []
    for axis in asked[0]:
        values = dict.fromkeys(condition[axis] for condition in asked)
        none = [value for value in values if value not in {condition[axis] for condition in computed}]
        if none:
            missing.append(_every(phase, axis, none, [value for value in values if value not in none]))
    return missing


def _every(phase: str, axis: str, refused: Sequence[str], computed: Sequence[str]) -> str:
    what = "a cached prefix" if axis == "cached prefix" else f"{axis} {' or '.join(refused)}"
    return f"no {phase} call with {what} was computed{advice_on(axis, computed)}"
