"""The checks that the servers differed in the treatment alone, and that what each of them left agrees with itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from assay.evals.questions import parse_answer
from assay.harness.conditions import has_cached_prefix
from assay.harness.evidence.counters import Admission, CallCount
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import COMMON_SETTINGS, CommonSettings, ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.sides import HIDDEN, ROLES, Role, Side, treatment
from assay.harness.text import counted, listed
from assay.harness.verdict import Check, Requirement


def claim(run: RunEvidence) -> Judged:
    """Check that the servers differed in the treatment alone, and that what each counted, admitted and answered agrees."""
    if not run.compares_servers:
        return Judged()
    check = check_same_servers(run.spec.sides, run.servers, run.argument_differences, "reference" not in run.measured)
    check = with_fingerprints(check, run.fingerprints)
    same = _with_common_settings(check, run.folder.read(COMMON_SETTINGS))
    return Judged(checks=[same, _check_reconciled(run), *_check_parsed(run)])


def check_same_servers(
    sides: Mapping[Role, Side],
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    stored: bool = False,
) -> Check:
    """Check that the servers differed in the treatment and in nothing else.

    Args:
        sides: what the run names, by role.
        servers: by role.
        stored: whether the reference's server is the one of an accepted baseline, whose model has the same hash.
    """
    required = Requirement("same-servers")
    if len(servers) < 2:
        return required.check("missing", "not both servers started", "start both; see the servers' logs")
    if not all(server.started for server in servers.values()):  # of other servers, nothing is known
        return required.check("missing", "at least one server was not started by assay", "let assay start both servers")
    other = [
        f"the {role} was to be {sides[role].backend}, and its server ran {server.backend}"
        for role, server in servers.items()
        if server.backend != sides[role].backend
    ]
    if other:
        return required.check("failed", "; ".join(other), RUN_AGAIN)
    if not any(server.arguments for server in servers.values()):
        return required.check("missing", "neither server reported its arguments", "use an engine that reports them")
    asked = treatment(sides["reference"], sides["candidate"])
    if differences:
        observed = "; ".join(f"{key}: {ours} against {theirs}" for key, (ours, theirs) in differences.items())
        return required.check("failed", observed, f"run again so that only {listed(list(asked)) or 'nothing'} differs")
    if unseen := [name for name in asked if name.startswith("--") and _same_argument(name, servers)]:
        observed = f"both servers report the same {listed(unseen)}, which was asked to differ"
        return required.check("failed", observed, "see why the engine ignores the flag")
    same = "the stored reference and the candidate have one model hash" if stored else "one model folder"
    return required.check("ok", f"{same}; {len(servers['reference'].arguments)} server arguments agree")


def with_fingerprints(check: Check, fingerprints: Mapping[Role, Fingerprint]) -> Check:
    """Decide the check on what the servers really served, too, where both were observed; it never becomes milder.

    Where one was not, the check says so.

    Args:
        fingerprints: by role; their arguments are left out, of which that check decides.
    """
    if check.status != "ok":
        return check
    if len(fingerprints) < len(ROLES):
        return check.model_copy(update={"found": f"{check.found}; what they served was not observed"})
    sides = fingerprints["reference"], fingerprints["candidate"]
    # A run that names two models compares them, however much they have in common.
    allowed = ["arguments", *(["weights"] if sides[0].model != sides[1].model else [])]
    diff = compare_fingerprints(*sides, allowed)
    if not diff.undeclared:
        agree = f"what they served agrees in {counted(len(diff.compared), 'part')}"
        return check.model_copy(update={"found": f"{check.found}; {agree}"})
    says = "; ".join(difference.says for difference in diff.undeclared)
    observed = f"of what they served (A the reference, B the candidate), {says}"
    return Requirement("same-servers").check(
        "failed", observed, "run again so that only the treatment differs; see assay compare of both"
    )


def _same_argument(flag: str, servers: Mapping[Role, ServerManifest]) -> bool:
    """Return True if both servers report the argument of a flag, and the same value of it, which is not hidden."""
    name = flag.removeprefix("--").replace("-", "_")
    reported = [server.arguments[name] for server in servers.values() if name in server.arguments]
    return len(reported) == len(servers) and all(value == reported[0] != HIDDEN for value in reported)


def _with_common_settings(check: Check, common: CommonSettings | None) -> Check:
    """Add to the check that both servers had the same flags what they were given so that it could be met."""
    if common is None:
        return check
    words = list(common.because)
    if check.status == "failed":
        words += [f"not made equal: {setting}" for setting in common.impossible]
    return check.model_copy(update={"found": "; ".join([check.found, *words])})


_MOST_WORDS = 3


def _check_reconciled(run: RunEvidence) -> Check:
    """Check that the counted attention calls are those of the requests that were admitted and answered."""
    required = Requirement("calls-reconciled")
    admitted = {role: run.folder.admissions(role) for role in run.measured}
    if absent := [role for role in run.measured if role not in run.servers or not admitted[role]]:
        observed = f"no admitted request was noted in the server of the {' or the '.join(absent)}"
        return required.check("missing", observed, "let assay start both servers; see their logs")
    answered = {role: [answer for answer in run.answers if answer.role == role] for role in run.measured}
    wrong = [
        f"{role}: {words}"
        for role in run.measured
        for words in _disagreements(
            run.folder.counters_by_process(role), admitted[role], answered[role], run.spec.workload.concurrency
        )
    ]
    if wrong:
        more = f"; and {len(wrong) - _MOST_WORDS} more" if len(wrong) > _MOST_WORDS else ""
        return required.check("failed", "; ".join(wrong[:_MOST_WORDS]) + more, RUN_AGAIN)
    passes, requests = (" and ".join(f"{len(each):,}" for each in of.values()) for of in (admitted, answered))
    return required.check("ok", f"{passes} prefill passes in every layer, {requests} answered requests")


def _disagreements(
    counts: Mapping[int, Sequence[CallCount]],
    admissions: Sequence[Admission],
    answers: Sequence[Answer],
    concurrency: int,
) -> Iterator[str]:
    earlier = _earlier_processes(admissions)
    for process in sorted({admission.process for admission in admissions} | set(counts)):
        admitted = [admission for admission in admissions if admission.process == process]
        yield from _prefill_disagreements(counts.get(process, ()), admitted, int(process in earlier))
    yield from _request_disagreements(answers, admissions)
    yield from _decode_disagreements([count for each in counts.values() for count in each], answers, concurrency)


def _earlier_processes(admissions: Sequence[Admission]) -> set[int]:
    """Return the processes of servers that were stopped before the last one started, perhaps in the middle of a pass."""
    last = {admission.process: number for number, admission in enumerate(admissions)}
    first_of_last = next(n for n, admission in enumerate(admissions) if admission.process == admissions[-1].process)
    return {process for process, number in last.items() if number < first_of_last}


def _prefill_disagreements(counts: Sequence[CallCount], admitted: Sequence[Admission], tolerance: int) -> Iterator[str]:
    """Return where the calls of a process differ from the batches that it admitted, by more than `tolerance` passes."""
    extend = [count for count in counts if count.phase == "extend"]
    if any(count.captured for count in extend):
        yield "prefill ran in CUDA graphs, whose batches cannot be noted"
        return
    behind = sum(has_cached_prefix(admission.prefix) for admission in admitted)
    for words, passes, chosen in (
        ("", len(admitted), extend),
        (" with a cached prefix", behind, [count for count in extend if count.cached_prefix]),
    ):
        calls: Counter[int] = Counter()
        for count in chosen:
            calls.update(count.calls_by_layer)
        layers = {layer for count in counts for layer in count.calls_by_layer} or {0}
        for layer in sorted(layers):
            if abs(calls[layer] - passes) > tolerance:
                yield f"layer {layer}{words}: {calls[layer]:,} calls in {passes:,} passes"


def _request_disagreements(answers: Sequence[Answer], admissions: Sequence[Admission]) -> Iterator[str]:
    prefix: dict[str, int] = {}
    for admission in admissions:
        for rid, cached in zip(admission.rids, admission.prefix, strict=True):
            prefix.setdefault(rid, cached)
    unknown = [answer for answer in answers if answer.request_id not in prefix]
    if unknown:
        yield f"{len(unknown):,} of {len(answers):,} answered requests were not admitted, the first {unknown[0].item}"
    other = sum(
        has_cached_prefix([answer.cached_tokens]) != has_cached_prefix([prefix[answer.request_id]])
        for answer in answers
        if answer.request_id in prefix and answer.cached_tokens is not None
    )
    if other:
        yield f"{other:,} of {len(answers):,} answers report another cached prefix than their request had"


def _decode_disagreements(counts: Sequence[CallCount], answers: Sequence[Answer], concurrency: int) -> Iterator[str]:
    tokens = sum(max(answer.completion_tokens - 1, 0) for answer in answers)
    calls: Counter[int] = Counter()
    for count in counts:
        calls.update(dict.fromkeys(count.calls_by_layer, 0))
        if count.phase == "decode":
            calls.update(count.calls_by_layer)
    needed = -(-tokens // concurrency)
    for layer, number in sorted(calls.items()):
        if number < needed:
            yield f"layer {layer}: {number:,} decode calls, but the answers' {tokens:,} further tokens took at least {needed:,}"


def _check_parsed(run: RunEvidence) -> list[Check]:
    """Check that the recorded letters are those that the texts give; no check where no question was answered."""
    expected = {item.id: item.expected for item in run.items}
    answers = [answer for answer in run.answers if answer.suite == "accuracy"]
    if not answers:
        return []
    required, n = Requirement("answers-parsed"), f"{len(answers):,}"
    other = sum(answer.parsed != parse_answer(answer.text, expected.get(answer.item)) for answer in answers)
    if not other:
        return [required.check("ok", f"{n} of {n} letters are those of the texts")]
    observed = f"{other:,} of {n} answers were recorded with another letter than their text gives"
    return [
        required.check(
            "failed", observed, f"{RUN_AGAIN}: records.jsonl was changed, or another version of assay wrote it"
        )
    ]
