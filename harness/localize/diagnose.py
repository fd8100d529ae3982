"""A kernel's results -> findings in words."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from assay.harness.attention.bugs.bug import LEAK, Bug
from assay.harness.conditions import POSITION
from assay.harness.localize.call_conditions import SequenceCondition, describe
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED, Cause, causes
from assay.harness.localize.kernel_runs import CallResult, KernelRun
from assay.harness.localize.lse import LSE_WRONG, named_bugs
from assay.harness.localize.pooled import QUANTISATION_NOT_RUN, Group, not_run, scaled
from assay.harness.localize.threads import few_threads
from assay.harness.text import percent, some
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
"""Findings besides the hypotheses of `assay.harness.attention.bugs.family.FAMILY`: id -> title."""
# Most cached prefixes that a finding lists.
_MAX_PREFIXES = 12
_ONCE = {
    "cached prefix > 0": "once a prefix is cached",
    "no cached prefix": "where no prefix is cached",
    "extend only": "in extend",
    "decode only": "in decode",
    "not the first of its batch": "where it is not the first of its batch",
    "not the last of its batch": "where it is not the last of its batch",
}
_PLACES = {"cached prefix > 0": "with a cached prefix", "no cached prefix": "without a cached prefix"}
_RIGHT = {"prefix 0": "without a cached prefix", "a cached prefix": "with a cached prefix"}


def diagnose(run: KernelRun, reproduce: str = "", where: str = "") -> list[Finding]:
    """Diagnose what is wrong with a kernel: named bugs first (a leak across requests before all others), then its behaviour.

    Args:
        run: its results.
        reproduce: a command that reproduces the findings.
        where: the condition under which the kernel is wrong, where it was tried; else one is taken from the results.

    Returns:
        Findings; empty if every cell is within its bound, every output was reproducible, no input was overwritten and no call
        was refused.
    """
    layers = sorted({result.call.layer for result in run.results})
    with few_threads([result.call for result in run.results]):
        bugs = [_bug(cause, layers, reproduce, where) for cause in causes(run)]
        findings = _joined(bugs, _over_all_calls(run, reproduce)) + _lse(run, reproduce)
        return findings + _behaviour(run, layers, reproduce)


def _joined(bugs: Sequence[Finding], pooled: Sequence[Finding]) -> list[Finding]:
    """Join both; what shows over all calls is further evidence of a bug of the same name."""
    joined = list(bugs)
    for finding in pooled:
        place = next((at for at, bug in enumerate(joined) if bug.id == finding.id), None)
        if place is None:
            joined.append(finding)
        else:
            more = f"also {finding.where}, {', '.join(finding.evidence)}: {finding.diagnosis}"
            joined[place] = joined[place].model_copy(update={"evidence": (*joined[place].evidence, more)})
    return joined


def _bug(cause: Cause, layers: Sequence[int], reproduce: str, where: str) -> Finding:
    if where:
        cause = replace(cause, conditions=(SequenceCondition(where, lambda _: True),), only_there=False)
    heads = max(result.call.spec.first_head + result.call.q.shape[1] for result in cause.failing)
    evidence = [_extent(cause), f"smallest failing call: {describe(cause.failing[0].call)}"]
    if telling := [
        condition for condition in cause.conditions[1:] if "% " not in condition.words or "!=" not in condition.words
    ]:
        first, second, *further = cause.conditions[0], *telling  # nearly every number is no multiple of 64
        more = f" ({len(further)} more fit as well)" if further else ""
        evidence.append(f"on these calls, {first.words} is equivalent to {second.words}{more}")
    nonfinite = max(result.nonfinite_share for result in cause.failing)
    if queries := _queries(cause):
        evidence.append(queries)
    if nonfinite:
        evidence.append(f"not finite: up to {percent(nonfinite)} of a call's output")
    best = cause.hypotheses[0] if cause.hypotheses else None
    if best is not None:
        evidence.insert(0, f"{best.title}: {best.about}")
    return Finding(
        id=UNEXPLAINED if best is None else best.id,
        title=TITLES[UNEXPLAINED] if best is None else best.title,
        severity="serious" if best is None else best.severity,
        where=_where(cause, layers, heads),
        diagnosis=_diagnosis(cause, best, layers, heads),
        does=does(best, cause.conditions[0].words if cause.conditions else ""),
        evidence=tuple(evidence),
        reproduce=reproduce,
        equivalent=tuple(h.id for h in cause.hypotheses[1:]),
    )


def _diagnosis(cause: Cause, best: Bug | None, layers: Sequence[int], heads: int) -> str:
    """Describe what is computed, where, how far from the named formula and from attention, and where the kernel is correct."""
    condition = cause.conditions[0].words if cause.conditions else ""
    place = _place(cause.phases, condition, cause.only_there, _spans(cause, layers, heads))
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
    right = f" Correct {_correct(cause.conditions[0].otherwise)}." if cause.conditions else ""
    return f"{text}.{right}"


def does(bug: Bug | None, condition: str) -> str:
    """Describe what the kernel does and when, in words that follow its name: "applies a causal mask once a prefix is cached"."""
    act = "computes something other than attention" if bug is None else bug.does or f"computes {bug.title}"
    when = _ONCE.get(condition, f"where {condition}") if condition else ""
    return f"{act} {when}".rstrip()


def _place(phases: Sequence[str], condition: str, only_there: bool, spans: Sequence[str]) -> str:
    """Describe where a bug shows: "in extend with a cached prefix (all 4 layers, all 4 heads)"."""
    under = ""
    if condition and not condition.endswith(" only"):
        under = _PLACES.get(condition, f"where {condition}")
        under = f" {'only ' if only_there else ''}{under}"
    return f"in {' and '.join(phases)}{under} ({', '.join(spans)})"


def _correct(otherwise: str) -> str:
    """Describe where a kernel is correct, after "Correct": "without a cached prefix"."""
    return _RIGHT.get(otherwise, f"at {otherwise}" if otherwise else "in all other calls")


def _spans(cause: Cause, layers: Sequence[int], heads: int) -> list[str]:
    """Describe layers, heads, and query positions if they are part of what is known."""
    parts = [some("layer", cause.layers, layers), some("head", cause.heads, range(heads))]
    if cause.positions and not cause.hypotheses:
        parts.append(f"query positions {', '.join(POSITION.labels[p] for p in cause.positions)}")
    return parts


def _where(cause: Cause, layers: Sequence[int], heads: int) -> str:
    parts = [" and ".join(cause.phases)]
    if cause.conditions and not cause.conditions[0].words.endswith(" only"):
        parts.append(("only where " if cause.only_there else "") + cause.conditions[0].words)
    return ", ".join([*parts, *_spans(cause, layers, heads)])


def _extent(cause: Cause) -> str:
    """Describe how many calls fail, by how much at worst, and with which cached prefixes."""
    worst = max(cause.failing, key=lambda result: result.worst)
    own, bound = worst.worst_cell
    more = ", ..." if len(cause.prefixes) > _MAX_PREFIXES else ""
    count = f"{len(cause.failing)} of {len(cause.failing) + cause.passing}"
    return (
        f"{count} calls of these layers are out of bounds; the worst has an own error "
        f"of {percent(own)} (noise explains {percent(bound)}): {describe(worst.call)}; "
        f"failing cached prefixes: {', '.join(map(str, cause.prefixes[:_MAX_PREFIXES]))}{more}"
    )


def _queries(cause: Cause) -> str:
    """Describe the worst of the queries that are out of bounds in cells within theirs; empty if there is none."""
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
        f"(noise explains {percent(worst.bound)}): {describe(result.call)}"
    )


def _finding(
    id: str, where: str, diagnosis: str, evidence: str, reproduce: str, severity: Severity = "serious"
) -> Finding:
    return Finding(
        id=id, title=TITLES[id], severity=severity, where=where, diagnosis=diagnosis, evidence=(evidence,), reproduce=reproduce,
    )  # fmt: skip


def _over_all_calls(run: KernelRun, reproduce: str) -> list[Finding]:
    """Find what no single call shows; see `assay.harness.localize.pooled`."""
    findings = []
    if wrong := scaled(run.results):
        text = (
            f"the output is {wrong.value:.5f} times what it should be; noise explains a deviation of at most "
            f"{wrong.limit:.1g} from 1"
        )
        calls = f"over {len(wrong.results)} calls, each of which is within its bound"
        findings.append(_finding(OUTPUT_SCALED, _groups(wrong.groups), text, calls, reproduce))
    if idle := not_run(run.results):
        text = (
            f"the error is {percent(idle.value)} of what {idle.results[0].noise} must cost, and a kernel of that family "
            f"has at least {percent(idle.limit)}: the kernel that declares it probably did not run"
        )
        calls = f"over {len(idle.results)} calls; the output may be that of another kernel, in full precision"
        findings.append(_finding(QUANTISATION_NOT_RUN, _groups(idle.groups), text, calls, reproduce))
    return findings


def _groups(groups: Sequence[Group]) -> str:
    """Describe groups of calls, the widest first: "extend and decode, float16"; one by one if they are no product of axes."""
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
    """Find log-sum-exps that are out of bounds, and name the bug that gives them on all calls."""
    errors = [(result, result.lse_errors) for result in run.results if result.lse_errors is not None]
    wrong = [(result, error) for result, error in errors if error.wrong]
    if not wrong:
        return []
    bugs = named_bugs([error for _, error in wrong])
    (own, bound), at = max(((error.worst, result) for result, error in wrong), key=lambda pair: pair[0][0])
    off = (
        f"off by {own:.2g}" if math.isfinite(own) else "not finite where it should be, or finite where it should not be"
    )
    text = f"the log-sum-exp of a query is {off}; noise explains {bound:.2g}"
    best = bugs[0] if bugs else None
    if best is not None:
        text = f'Computes "{best.title}": {text}'
    example = min((result.call for result, _ in wrong), key=lambda call: (call.k.numel(), call.q.numel()))
    about = () if best is None else (f"{best.title}: {best.about}",)
    return [
        Finding(
            id=LSE_WRONG if best is None else best.id,
            title=TITLES[LSE_WRONG] if best is None else best.title,
            severity="serious",
            where=f"{len(wrong)} of {len(errors)} calls",
            diagnosis=text,
            does="returns wrong log-sum-exps" if best is None else best.does,
            evidence=(*about, f"the worst: {describe(at.call)}", f"smallest such call: {describe(example)}"),
            reproduce=reproduce,
            equivalent=tuple(bug.id for bug in bugs[1:]),
        )
    ]


def _behaviour(run: KernelRun, layers: Sequence[int], reproduce: str) -> list[Finding]:
    def finding(id: str, results: Sequence[CallResult], diagnosis: str, errors: Sequence[float] = ()) -> Finding:
        example = results[errors.index(max(errors))] if errors else results[0]
        where = f"{some('layer', sorted({result.call.layer for result in results}), layers)}, {len(results)} calls"
        far = any(error > result.limits.largest_bound for error, result in zip(errors, results, strict=False))
        severity: Severity = "serious" if far or not errors else "info"
        return _finding(id, where, diagnosis, f"for example {describe(example.call)}", reproduce, severity)

    findings = []
    if written := [result for result in run.results if result.mutated]:
        names = ", ".join(sorted({name for result in written for name in result.mutated}))
        findings.append(finding(INPUT_WRITTEN, written, f"the kernel overwrites its input {names}"))
    if random := [result for result in run.results if result.repeats_differ]:
        errors = [result.repeat for result in random]
        text = f"the same call, run twice in a row, gives outputs that differ by up to {percent(max(errors))}"
        findings.append(finding(NONDETERMINISM, random, text, errors))
    # Where runs in a row differ by more than noise, chance or the number of calls decides, and a late run shows nothing more. Where
    # they differ by less, a kernel counts as stateful only if the late run, and not the repeat, differs by more than noise.
    by_chance = any(known.id == NONDETERMINISM and known.severity == "serious" for known in findings)
    late = [r for r in run.results if r.late_differs and (not r.repeats_differ or _only_late(r))]
    if late and not by_chance:
        errors = [result.late for result in late]
        text = f"the same call gives a different output after other calls, by up to {percent(max(errors))}"
        findings.append(finding(STATE_KEPT, late, text, errors))
    if run.refused:
        call, why = run.refused[0]
        example, where = f"for example {describe(call)}", f"{len(run.refused)} calls"
        findings.append(_finding(CALL_REFUSED, where, why, example, reproduce, "warning"))
    return findings


def _only_late(result: CallResult) -> bool:
    return result.repeat <= result.limits.largest_bound < result.late
