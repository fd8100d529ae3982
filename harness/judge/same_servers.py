"""The checks that the servers differed only in the treatment, and that each server's evidence is consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from assay.evals.questions import parse_answer
from assay.harness.backend import Backend
from assay.harness.conditions import has_cached_prefix
from assay.harness.engines.arguments import ABSENT, compared
from assay.harness.evidence.counters import Admission, CallCount
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import COMMON_SETTINGS, CommonSettings, ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.fingerprint.differences import FingerprintDiff, compare_fingerprints
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.sides import HIDDEN, ROLES, Role, Side, profile_of, treatment
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, CheckStatus, Requirement


def claim(run: RunEvidence) -> Judged:
    """Check that the servers differed only in the treatment, and that each one's counts, admissions and answers agree."""
    if not run.compares_servers:
        return Judged()
    same = check_same_servers(
        run.spec.sides, run.servers, run.argument_differences, run.fingerprints, derived=run.derived_arguments,
        stored=bool(run.spec.reference_baseline), common=run.folder.read(COMMON_SETTINGS),
    )  # fmt: skip
    return Judged(checks=[same, _check_reconciled(run), *_check_parsed(run)])


def check_same_servers(
    sides: Mapping[Role, Side],
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    fingerprints: Mapping[Role, Fingerprint],
    *,
    derived: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    stored: bool = False,
    common: CommonSettings | None = None,
) -> Check:
    """Check that the servers differed in the treatment and in nothing else.

    Args:
        differences: arguments that differ beyond the treatment.
        derived: those that differ because each server has what its own engine resolves its command line to.
        fingerprints: each server's fingerprint, which decides last; a role whose server did not report it is missing.
        stored: whether the reference's server is the one of an accepted baseline, whose model has the same hash.
        common: the flags added to both so that their arguments agree, or None if they were not looked for.
    """
    status, outcome = _compare_servers(sides, servers, differences, fingerprints, derived, stored)
    if common is not None:
        impossible = common.impossible if status == "failed" else ()
        outcome = state("with-common-settings", outcome=outcome, because=common.because, impossible=impossible)
    return Requirement("same-servers").check(status, outcome)


def _compare_servers(
    sides: Mapping[Role, Side],
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    fingerprints: Mapping[Role, Fingerprint],
    derived: Mapping[str, tuple[str, str]],
    stored: bool,
) -> tuple[CheckStatus, Statement]:
    if len(servers) < 2:
        return "missing", state("not-both-started")
    ours, theirs = (Backend.parse(sides[role].backend) for role in ROLES)
    if ours.is_url and ours.address == theirs.address:
        return "failed", state("one-server", url=theirs.name)
    if not all(server.started for server in servers.values()):  # nothing is known about other servers
        return "missing", state("not-started-by-assay")
    other = [
        (role, sides[role].backend, server.backend)
        for role, server in servers.items()
        if server.backend != sides[role].backend
    ]
    if other:
        return "failed", state("other-backend-ran", other=other)
    if not any(server.arguments for server in servers.values()):
        return "missing", state("arguments-not-reported")
    asked = list(treatment(sides["reference"], sides["candidate"]))
    if differences:
        unequal = [(name, ours, theirs) for name, (ours, theirs) in differences.items()]
        return "failed", state("arguments-differ", arguments=unequal, asked=asked)
    if unseen := [name for name in asked if name.startswith("--") and _same_argument(name, servers)]:
        return "failed", state("flags-ignored", flags=unseen)
    diff = _compare_served(fingerprints, not all(profile_of(side.engine).instrumented for side in sides.values()))
    if diff is not None and diff.undeclared:
        # Another model or environment may bring what nobody named. That is no pass, and does not excuse what is worse, unless it
        # is the reference that contradicts its own model.
        brought = not {"model", "interpreter", "packages"}.isdisjoint(asked)
        brought &= not any(each.name.endswith(".wrong") and each.says.startswith("A: ") for each in diff.undeclared)
        said = [difference.says for difference in diff.undeclared]
        return "missing" if brought else "failed", state("served-otherwise", said=said)
    if diff is not None and any("config" in served.not_observed for served in fingerprints.values()):
        return "missing", state("settings-not-compared", why=diff.unread)
    arguments, parts = compared(servers), len(diff.compared) if diff else None
    # Another version of the engine knows other arguments, and may not report every part of a fingerprint.
    absent = [
        (role, [name for name, values in derived.items() if values[of] == ABSENT]) for of, role in enumerate(ROLES)
    ]
    return "ok", state(
        "servers-agree", stored=stored, arguments=arguments, parts=parts, derived=list(derived),
        unknown=[(role, names) for role, names in absent if names], lost=list(diff.lost) if diff else [],
    )  # fmt: skip


def _compare_served(fingerprints: Mapping[Role, Fingerprint], witnessed: bool) -> FingerprintDiff | None:
    """Compare the servers' fingerprints, except their arguments, or return None if one was not observed."""
    if len(fingerprints) < len(ROLES):
        return None
    sides = fingerprints["reference"], fingerprints["candidate"]
    # A run that names two models compares them, however much they have in common.
    allowed = ["arguments", *(["weights"] if sides[0].model != sides[1].model else [])]
    if witnessed:
        allowed += [
            "weights.dtype",
            "quantisation",
            "experts",
            "adapters",
        ]  # it has the checkpoint alone, in its own dtype
    return compare_fingerprints(*sides, allowed)


def _same_argument(flag: str, servers: Mapping[Role, ServerManifest]) -> bool:
    """Return True if both servers report the argument of a flag, and the same value of it, which is not hidden."""
    name = flag.removeprefix("--").replace("-", "_")
    reported = [server.arguments[name] for server in servers.values() if name in server.arguments]
    return len(reported) == len(servers) and all(value == reported[0] != HIDDEN for value in reported)


_MOST_SHOWN = 3


def _check_reconciled(run: RunEvidence) -> Check:
    """Check that the counted attention calls match the requests that were admitted and answered."""
    required = Requirement("calls-reconciled")
    admitted = {role: run.folder.admissions(role) for role in run.measured}
    if absent := [role for role in run.measured if role not in run.servers or not admitted[role]]:
        return required.check("missing", state("no-request-admitted", roles=absent, url=bool(run.urls)))
    answered = {role: [answer for answer in run.answers if answer.role == role] for role in run.measured}
    wrong = [
        (role, disagreement)
        for role in run.measured
        for disagreement in _disagreements(
            run.folder.counters_by_process(role), admitted[role], answered[role], run.spec.workload.concurrency
        )
    ]
    if wrong:
        outcome = state("calls-disagree", first=wrong[:_MOST_SHOWN], more=len(wrong[_MOST_SHOWN:]))
        return required.check("failed", outcome)
    passes, requests = ([len(each) for each in of.values()] for of in (admitted, answered))
    return required.check("ok", state("calls-agree", passes=passes, requests=requests))


def _disagreements(
    counts: Mapping[int, Sequence[CallCount]],
    admissions: Sequence[Admission],
    answers: Sequence[Answer],
    concurrency: int,
) -> Iterator[Statement]:
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


def _prefill_disagreements(
    counts: Sequence[CallCount], admitted: Sequence[Admission], tolerance: int
) -> Iterator[Statement]:
    """Yield where the calls of a process differ from the batches that it admitted, by more than `tolerance` passes."""
    extend = [count for count in counts if count.phase == "extend"]
    if any(count.captured for count in extend):
        yield state("prefill-in-graphs")
        return
    behind = sum(has_cached_prefix(admission.prefix) for admission in admitted)
    for cached, passes, chosen in (
        (False, len(admitted), extend),
        (True, behind, [count for count in extend if count.cached_prefix]),
    ):
        calls: Counter[int] = Counter()
        for count in chosen:
            calls.update(count.calls_by_layer)
        layers = {layer for count in counts for layer in count.calls_by_layer} or {0}
        for layer in sorted(layers):
            if abs(calls[layer] - passes) > tolerance:
                yield state("prefill-calls", layer=layer, cached_prefix=cached, calls=calls[layer], passes=passes)


def _request_disagreements(answers: Sequence[Answer], admissions: Sequence[Admission]) -> Iterator[Statement]:
    prefix: dict[str, int] = {}
    for admission in admissions:
        for rid, cached in zip(admission.rids, admission.prefix, strict=True):
            prefix.setdefault(rid, cached)
    unknown = [answer for answer in answers if answer.request_id not in prefix]
    if unknown:
        yield state("requests-not-admitted", count=len(unknown), answers=len(answers), first=unknown[0].item)
    other = sum(
        has_cached_prefix([answer.cached_tokens]) != has_cached_prefix([prefix[answer.request_id]])
        for answer in answers
        if answer.request_id in prefix and answer.cached_tokens is not None
    )
    if other:
        yield state("other-prefixes-reported", count=other, answers=len(answers))


def _decode_disagreements(
    counts: Sequence[CallCount], answers: Sequence[Answer], concurrency: int
) -> Iterator[Statement]:
    tokens = sum(max(answer.completion_tokens - 1, 0) for answer in answers)
    calls: Counter[int] = Counter()
    for count in counts:
        calls.update(dict.fromkeys(count.calls_by_layer, 0))
        if count.phase == "decode":
            calls.update(count.calls_by_layer)
    needed = -(-tokens // concurrency)
    for layer, number in sorted(calls.items()):
        if number < needed:
            yield state("too-few-decode-calls", layer=layer, calls=number, tokens=tokens, needed=needed)


def _check_parsed(run: RunEvidence) -> list[Check]:
    """Check that the recorded letters match the texts; make no check if no question was answered."""
    expected = {item.id: item.expected for item in run.items}
    answers = [answer for answer in run.answers if answer.suite == "accuracy"]
    if not answers:
        return []
    other = sum(answer.parsed != parse_answer(answer.text, expected.get(answer.item)) for answer in answers)
    outcome = state("answers-parsed", answers=len(answers), otherwise=other)
    return [Requirement("answers-parsed").check("failed" if other else "ok", outcome)]
