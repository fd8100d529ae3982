"""Turns a kernel's results into findings."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Sequence

from assay.harness.attention.bugs.bug import LEAK, Bug
from assay.harness.evidence.kernel_result import Tried
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED, Cause, causes, nearest
from assay.harness.localize.features import words
from assay.harness.localize.kernel_runs import CallResult, KernelRun
from assay.harness.localize.lse import LSE_WRONG, named_bugs
from assay.harness.localize.pooled import QUANTISATION_NOT_RUN, Group, not_run, scaled
from assay.harness.localize.threads import few_threads
from assay.harness.text import counted, percent, some
from assay.harness.verdict import UNEXPLAINED, Finding, Severity

NONDETERMINISM = "nondeterminism"
STATE_KEPT = "state-kept"
INPUT_WRITTEN = "input-written"
CALL_REFUSED = "call-refused"
TITLES = {
    UNEXPLAINED: "unexplained error",
    NONDETERMINISM: "nondeterministic output",
    STATE_KEPT: "state kept between calls",
    INPUT_WRITTEN: "input overwritten",
    CALL_REFUSED: "call refused",
    OUTPUT_SCALED: "output scaled",
    OUTPUT_NOT_WRITTEN: "output not written",
    QUANTISATION_NOT_RUN: "declared quantisation not run",
    LSE_WRONG: "log-sum-exp wrong",
}
"""Findings in addition to the hypotheses of `assay.harness.attention.bugs.family.FAMILY`: id -> title."""
# A head of calls with the same heads is right if it is so in this many wrong calls.
_HEAD_RIGHT = 8
_CACHED = {True: "with a cached prefix", False: "without a cached prefix"}


def diagnose(run: KernelRun, reproduce: str = "", tried: Tried | None = None) -> list[Finding]:
    """Diagnose a kernel: named bugs first (a leak across requests before all others), then its behaviour.

    Each cause is one finding: if a kernel errs by chance, or keeps state between calls, its wrong outputs are evidence of that.

    Args:
        run: its results.
        reproduce: a command that reproduces the findings.
        tried: the condition under which the kernel is wrong, as experiments confirmed it. Without one that describes every wrong
            call, findings name the phases that are wrong, and whether a prefix is cached, if all such calls agree.

    Returns:
        The findings, or an empty list if every cell is within its bound, every output was reproducible, no input was overwritten
        and no call was refused.
    """
    layers = sorted({result.call.layer for result in (*run.results, *run.drawn)})
    tried = None if tried is not None and tried.outside else tried  # such a condition is not that of every wrong call
    with few_threads([result.call for result in run.results]):
        behaviour = _behaviour(run, layers, reproduce)
        changing = next((f for f in behaviour if f.id in (NONDETERMINISM, STATE_KEPT) and f.severity != "info"), None)
        bugs = []
        for cause in causes(run):
            bug = _bug(cause, run, layers, reproduce, tried)
            if (
                changing is None
                or (tried and tried.always)
                or (cause.hypotheses and not _is_scattered(cause, run, tried))
            ):
                bugs.append(bug)
            else:
                behaviour[behaviour.index(changing)] = changing = also(changing, bug)
        findings = _joined(bugs, _over_all_calls(run, reproduce))
        return _joined(findings, _lse(run, reproduce)) + behaviour


def _joined(bugs: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """Join both: a finding with the name of a bug becomes further evidence of it."""
    joined = list(bugs)
    for finding in others:
        place = next((at for at, bug in enumerate(joined) if bug.id == finding.id), None)
        if place is None:
            joined.append(finding)
        else:
            joined[place] = also(joined[place], finding)
    return joined


def also(finding: Finding, other: Finding) -> Finding:
    """Make another finding of the same cause evidence of this one."""
    more = f"also {other.where}: {other.diagnosis}"
    return finding.model_copy(update={"evidence": (*finding.evidence, more, *other.evidence)})


def _bug(cause: Cause, run: KernelRun, layers: Sequence[int], reproduce: str, tried: Tried | None) -> Finding:
    best = cause.hypotheses[0] if cause.hypotheses else None
    evidence = [f"{best.title}: {best.about}"] if best is not None else []
    evidence += [_extent(cause, run), f"smallest failing call: {describe(cause.failing[0].call)}"]
    if not (run.drawn or tried) and any(0 < wrong < every for wrong, every in cause.groups.values()):
        groups = sorted(cause.groups.items(), reverse=True)
        counts = [f"{wrong} of {every} in {phase} {_CACHED[cached]}" for (phase, cached), (wrong, every) in groups]
        evidence.append(f"wrong sequences: {', '.join(counts)}")
    if _is_scattered(cause, run, tried):
        among = ", those of experiments included," * bool(run.drawn)
        evidence.append(f"right on {counted(cause.spared, 'call')}{among} on which that would show")
    if best is None and (near := nearest(cause)):
        bug, distance = near
        evidence.append(
            f'nearest in the catalogue: "{bug.title}", whose output differs by {percent(distance)} on the smallest failing calls'
        )
    if queries := _queries(cause):
        evidence.append(queries)
    if nonfinite := max(result.nonfinite_share for result in cause.failing):
        evidence.append(f"not finite: up to {percent(nonfinite)} of a call's output")
    when, elsewhere = _when(cause, run, tried)
    names_phase = tried is not None and "phase" in {*tried.context, *(prop.feature for prop in tried.rule)}
    there = [f"in {' and '.join(cause.phases)}"] * (not names_phase) + [when] * bool(when)
    spans = [*_of_layers(cause.layers, layers), *filter(None, [_heads(cause)])]
    place = " ".join([*there, *[f"({', '.join(spans)})"] * bool(spans)])
    return Finding(
        id=UNEXPLAINED if best is None else best.id,
        title=TITLES[UNEXPLAINED] if best is None else best.title,
        severity="serious" if best is None else best.severity,
        where=", ".join([*there, *spans]).removeprefix("in "),
        diagnosis=_diagnosis(cause, place, elsewhere),
        does=f"{does(best)} {_once(cause, run, when, tried)}".rstrip(),
        evidence=tuple(evidence),
        reproduce=reproduce,
        equivalent=tuple(h.id for h in cause.hypotheses[1:]),
    )


def _when(cause: Cause, run: KernelRun, tried: Tried | None) -> tuple[str, str]:
    """Describe the wrong calls (beyond their phases) and the correct ones; both may be empty."""
    if tried is not None and (tried.rule or tried.context):
        said = words(tried.rule, tried.context)
        if (prefix := {"a prefix is cached": True, "no prefix is cached": False}.get(said)) is not None:
            return _CACHED[prefix], _CACHED[not prefix]
        return f"{'only ' * (not tried.always)}where {said}", "" if tried.context else "in all other calls"
    wrong, mixed = cause.wrong_groups, any(0 < bad < every for bad, every in cause.groups.values())
    right = cause.groups.keys() - wrong
    cached = {cached for _, cached in wrong}
    if mixed or not right:
        return "", ""
    if any(phase in cause.phases for phase, _ in right):
        if len(cached) > 1:
            return "", ""  # not a product of phases and prefixes
        [prefix] = cached
        alone = all(phase in cause.phases for phase, _ in right)
        return _CACHED[prefix], _CACHED[not prefix] if alone else "in all other calls"
    return "", f"in {' and '.join(sorted({phase for phase, _ in right}, reverse=True))}"


def _is_scattered(cause: Cause, run: KernelRun, tried: Tried | None) -> bool:
    """Return True if some calls on which the best hypothesis would show are correct, and no known condition separates them."""
    return cause.spared > 0 and tried is None and not _when(cause, run, tried)[1]


def _once(cause: Cause, run: KernelRun, when: str, tried: Tried | None) -> str:
    """Describe when a kernel does something, phrased to follow the action."""
    once = {_CACHED[True]: "once a prefix is cached", _CACHED[False]: "where no prefix is cached"}
    if tried is not None:
        return once.get(when, when)
    if _is_scattered(cause, run, tried):
        return "in some calls"
    phase = f"in {' and '.join(cause.phases)}" if {phase for phase, _ in cause.groups} - set(cause.phases) else ""
    return ", ".join(filter(None, [phase, once.get(when, "")]))


def _diagnosis(cause: Cause, place: str, elsewhere: str) -> str:
    """Describe the formula that is computed and where, its distances from the output, and where the kernel is correct."""
    best = cause.hypotheses[0] if cause.hypotheses else None
    away = f"correct attention differs by {percent(cause.oracle_error)}"
    if best is None:
        off = away if math.isfinite(cause.oracle_error) else "it is not finite"
        text = f"No known bug explains the output {place}: {off}"
    else:
        leak = " (leak across requests)" if best.kind == LEAK else ""
        off = away if math.isfinite(cause.oracle_error) else "it is not finite where attention is"
        text = (
            f'Computes "{best.title}"{leak} {place}: matches that formula to {percent(cause.hypothesis_error)}; {off}'
        )
    if others := " or ".join(f'"{h.title}"' for h in cause.hypotheses[1:]):
        text += f"; on these calls it cannot be distinguished from {others}"
    return f"{text}.{f' Correct {elsewhere}.' * bool(elsewhere)}"


def does(bug: Bug | None, condition: str = "") -> str:
    """Describe what a kernel does, and when, as a predicate of its name: "applies a causal mask once a prefix is cached"."""
    act = "computes something other than attention" if bug is None else bug.does or f"computes {bug.title}"
    return f"{act} where {condition}" if condition else act


def _of_layers(chosen: Collection[int], layers: Collection[int]) -> list[str]:
    """Describe the layers of some calls, or nothing if all calls are in one layer, which need not matter."""
    return [some("layer", sorted(chosen), layers)] if len(layers) > 1 else []


def _heads(cause: Cause) -> str:
    """Describe the wrong heads, or only whether all heads are wrong if calls differ in heads; "" if too few calls show it."""
    by_heads: dict[tuple[int, int, int], list[list[bool]]] = {}
    for result in cause.failing:
        call = result.call
        key = call.spec.first_head, call.q.shape[1], call.k.shape[1]
        by_heads.setdefault(key, []).append(result.failing.any(0).tolist())
    if len(by_heads) > 1:
        # Where the numbers decide, a head is right in some calls. So a head counts as right only if many such calls agree.
        spared = [len(calls) for calls in by_heads.values() if not all(map(any, zip(*calls, strict=True)))]
        return "all heads" if not spared else "some heads" if max(spared) >= _HEAD_RIGHT else ""
    [(first, heads, _)] = by_heads
    return some("head", cause.heads, range(first + heads))


def _extent(cause: Cause, run: KernelRun) -> str:
    """Describe how many calls fail (not counting experiments), and by how much at worst."""
    there = [result for result in run.results if result.call.layer in cause.layers]
    failing = [result for result in there if result.fails]
    worst = max(failing or cause.failing, key=lambda result: result.worst)
    own, bound = worst.worst_cell
    return (
        f"{len(failing)} of {len(there)} calls of these layers are out of bounds; the worst has an "
        f"error of {percent(own)} (rounding explains {percent(bound)}): {describe(worst.call)}"
    )


def _queries(cause: Cause) -> str:
    """Describe the worst query that is out of bounds in a cell within bounds, or return an empty string if there is none."""
    wrong = [(result, result.wrong_queries) for result in cause.failing if result.wrong_queries]
    if not wrong:
        return ""
    result, queries = max(wrong, key=lambda pair: pair[1][0].excess)
    worst, rows = queries[0], {query.row for query in queries}
    sequence = bisect_right(list(itertools.accumulate(result.call.lens_q)), worst.row)
    at = worst.row - sum(result.call.lens_q[:sequence])
    heads = "all heads together" if worst.head is None else f"head {result.call.spec.first_head + worst.head}"
    of = f"{len(rows)} single {'query is' if len(rows) == 1 else 'queries are'} out of bounds there"
    return (
        f"{of}; the worst is query {at} of sequence {sequence}, {heads}: {percent(worst.own)} "
        f"(rounding explains {percent(worst.bound)}): {describe(result.call)}"
    )


def _finding(
    id: str, where: str, diagnosis: str, evidence: str, reproduce: str, severity: Severity = "serious"
) -> Finding:
    return Finding(
        id=id, title=TITLES[id], severity=severity, where=where, diagnosis=diagnosis, evidence=(evidence,), reproduce=reproduce,
    )  # fmt: skip


def _over_all_calls(run: KernelRun, reproduce: str) -> list[Finding]:
    """Find errors that no single call shows; see `assay.harness.localize.pooled`."""
    findings = []
    if wrong := scaled(run.results):
        text = (
            f"the output is {wrong.value:.5f} times the correct value; rounding explains a deviation of at most "
            f"{wrong.limit:.1g} from 1"
        )
        calls = f"over {counted(len(wrong.results), 'call')}, each within its bound"
        findings.append(_finding(OUTPUT_SCALED, _groups(wrong.groups), text, calls, reproduce))
    if idle := not_run(run.results):
        text = (
            f"the error is {percent(idle.value)} of the noise that {idle.results[0].noise} causes, and a kernel of that family "
            f"has at least {percent(idle.limit)}: the kernel that declares it probably did not run"
        )
        calls = (
            f"over {counted(len(idle.results), 'call')}; the output may be that of another kernel, in full precision"
        )
        findings.append(_finding(QUANTISATION_NOT_RUN, _groups(idle.groups), text, calls, reproduce))
    return findings


def _groups(groups: Sequence[Group]) -> str:
    """Describe groups of calls, widest first: "extend and decode, float16"; one by one if they are not a product of axes."""
    widest = [group for group in groups if not any(set(other) < set(group) for other in groups)]
    values: dict[str, list[str]] = {}
    for axis, value in (pair for pairs in widest for pair in pairs):
        values.setdefault(axis, []).append(value)
    by_axis = {axis: list(dict.fromkeys(some)) for axis, some in values.items()}
    if {frozenset(pairs) for pairs in widest} == {
        frozenset(zip(by_axis, chosen, strict=True)) for chosen in itertools.product(*by_axis.values())
    }:
        return ", ".join(_named(axis, some) for axis, some in by_axis.items())
    return "; ".join(", ".join(_named(axis, [value]) for axis, value in pairs) for pairs in widest)


def _named(axis: str, values: Sequence[str]) -> str:
    text = " and ".join(values)
    return text if axis in ("dtype", "phase") else f"{axis} {text}"


def _lse(run: KernelRun, reproduce: str) -> list[Finding]:
    """Find log-sum-exps that are out of bounds, and name the bug that explains them on all calls."""
    errors = [(result, result.lse_errors) for result in run.results if result.lse_errors is not None]
    wrong = [(result, error) for result, error in errors if error.wrong]
    if not wrong:
        return []
    bugs = named_bugs([error for _, error in wrong])
    (own, bound), at = max(((error.worst, result) for result, error in wrong), key=lambda pair: pair[0][0])
    off = (
        f"off by {own:.2g}" if math.isfinite(own) else "not finite where it should be, or finite where it should not be"
    )
    text = f"the log-sum-exp of a query is {off}; rounding explains {bound:.2g}"
    best = bugs[0] if bugs else None
    if best is not None:
        text = f'Computes "{best.title}": {text}'
    example = min((result.call for result, _ in wrong), key=lambda call: (call.k.numel(), call.q.numel()))
    about = () if best is None else (f"{best.title}: {best.about}",)
    heads = sorted(set[int]().union(*(error.wrong_heads for _, error in wrong)))
    most = max(result.call.spec.first_head + result.call.q.shape[1] for result, _ in wrong)
    return [
        Finding(
            id=LSE_WRONG if best is None else best.id,
            title=TITLES[LSE_WRONG] if best is None else best.title,
            severity="serious",
            where=f"{len(wrong)} of {len(errors)} calls, {some('head', heads, range(most))}",
            diagnosis=text,
            does="returns wrong log-sum-exps" if best is None else best.does,
            evidence=(*about, f"the worst: {describe(at.call)}", f"smallest failing call: {describe(example)}"),
            reproduce=reproduce,
            equivalent=tuple(bug.id for bug in bugs[1:]),
        )
    ]


def _behaviour(run: KernelRun, layers: Sequence[int], reproduce: str) -> list[Finding]:
    def finding(id: str, results: Sequence[CallResult], diagnosis: str, errors: Sequence[float] = ()) -> Finding:
        example = results[errors.index(max(errors))] if errors else results[0]
        where = ", ".join(
            [*_of_layers({result.call.layer for result in results}, layers), counted(len(results), "call")]
        )
        far = any(error > result.limits.largest_bound for error, result in zip(errors, results, strict=False))
        severity: Severity = "serious" if far or not errors else "info"
        return _finding(id, where, diagnosis, f"for example {describe(example.call)}", reproduce, severity)

    findings = []
    if written := [result for result in run.results if result.mutated]:
        names = ", ".join(sorted({name for result in written for name in result.mutated}))
        findings.append(finding(INPUT_WRITTEN, written, f"the kernel overwrites its input {names}"))
    if random := [result for result in run.results if result.repeats_differ]:
        errors = [result.repeat for result in random]
        text = f"the same call, run twice in a row, gives outputs that differ {_by_up_to(errors)}"
        findings.append(finding(NONDETERMINISM, random, text, errors))
    # A kernel that errs by chance also differs late. So does a kernel whose runs differ, unless only the late run exceeds noise.
    by_chance = any(result.repeat > result.limits.largest_bound for result in random)
    if not by_chance and (
        late := [r for r in run.results if r.late_differs and (not r.repeats_differ or _only_late(r))]
    ):
        errors = [result.late for result in late]
        text = f"the same call gives a different output after other calls, {_by_up_to(errors)}"
        findings.append(finding(STATE_KEPT, late, text, errors))
    if run.refused:
        call, why = run.refused[0]
        example, where = f"for example {describe(call)}", counted(len(run.refused), "call")
        findings.append(_finding(CALL_REFUSED, where, why, example, reproduce, "warning"))
    return findings


def _by_up_to(errors: Sequence[float]) -> str:
    return f"by up to {percent(worst)}" if math.isfinite(worst := max(errors)) else "by more than the whole output"


def _only_late(result: CallResult) -> bool:
    return result.repeat <= result.limits.largest_bound < result.late
