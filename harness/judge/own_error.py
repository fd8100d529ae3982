"""The layer diff in a run's folder -> its part of the report: the suite ``layers``, the error profile, the findings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import get_args

from assay.harness.backend import Backend
from assay.harness.conditions import CACHED_PREFIX, CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE, PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.error_table import DIMENSIONS, elements, relative_l1
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, KernelResult, foreign_cause
from assay.harness.evidence.layer_diff_record import LAYER_DIFF, pack_of
from assay.harness.evidence.pack import replay_command
from assay.harness.evidence.records import Answer
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.shadow_errors import Known, ShadowErrors, ShadowHeader
from assay.harness.evidence.trace import read_trace
from assay.harness.fingerprint.facts import own_environment
from assay.harness.judge.error_grids import bounds_of, layers_result, truth_rows
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.layer_verdict import LayerEvidence, findings, judge_layers, times_bound
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.traces import free_running_errors
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.sides import ROLES
from assay.harness.statement import Statement, state
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.verdict import Check, Requirement, Verdict, serious


def _recorded_phases(header: ShadowHeader, candidate: Backend) -> Collection[str]:
    """Return the phases whose recorded calls must have been examined."""
    own = "stored_kv" in header.features and not candidate.is_kernel
    return [phase for phase in header.phases if not (own and phase == "extend")]


def claim(run: RunEvidence) -> Judged:
    """Judge the evidence of the layer diff, and check that it compared every layer, also with a cached prefix."""
    suites, errors = run.spec.workload.suites, run.errors
    called = {layer for role in ROLES for count in run.counts[role] for layer in count.calls_by_layer}
    checks = [_check_layers(suites, errors, run.claimed, called, has_url=bool(run.urls))]
    if suites != ("latency",):  # times alone say nothing about outputs after a prefix
        cached = _check_cached_prefix(
            [question.candidate for question in run.pairings["accuracy"].pairs],
            None if "accuracy" in suites else errors,
            cache=bool(run.envelope and run.envelope.limits and run.envelope.limits.prefix_cache),
        )
        checks.insert(0, cached)
    if errors is None:
        return Judged(checks=checks)
    folder, spec = run.folder, run.spec
    replay, pack = folder.read(CAUSE), pack_of(folder)
    phases = _recorded_phases(errors.headers[0], Backend.parse(spec.candidate.backend))
    foreign = foreign_cause(replay, spec.candidate.backend, phases, pack) if replay else ""
    evidence = LayerEvidence(errors, compare_with_noise(errors), replay, foreign)
    not_traced: tuple[Statement, ...] = ()
    try:
        free = _free_running(folder, errors)
    except EvidenceError as error:  # errors and the cause do not depend on it
        free, not_traced = {}, (state("inherited-not-traced", said=error.found),)
    result = layers_result(
        errors,
        bounds_of(evidence.against),
        free,
        pack=str(pack) if pack else "",
        not_observed=(*not_traced, *_environments(run, evidence), *_untested(errors), *_known_differences(errors)),
        against_truth=truth_rows(evidence.against),
    )
    named = replay.findings if replay and not foreign else ()
    again = replay_command(pack, spec.candidate.backend) if pack else run.manifest.command
    causes = [*named, *findings(evidence, again)]
    suite = judge_layers(spec.policy, evidence, synthetic=spec.workload.synthetic)
    return Judged(suite=suite, checks=checks, causes=causes, parts={"layers": result})


def _environments(run: RunEvidence, evidence: LayerEvidence) -> Iterator[Statement]:
    """Yield that the shadow ran in the reference's environment, where the candidate has another one."""
    if own_environment(run.spec.treatment) and (run.folder.server_folder("reference") / SHADOW_FOLDER).exists():
        yield state("shadow-in-reference", calls=evidence.examined.calls if evidence.examined else 0)


def _untested(errors: ShadowErrors) -> Iterator[Statement]:
    for header in errors.headers:
        for layer, why in sorted(header.untested.items()):
            yield state("call-untested", layer=layer, said=why)


def _known_differences(errors: ShadowErrors) -> Iterator[Statement]:
    for how, phase in product(get_args(Known), PHASES):
        if layers := sorted(layer for layer, *place in errors.known if place == [phase, how]):
            yield state("difference-known", how=how, phase=phase, layers=layers)


def _free_running(folder: RunFolder, errors: ShadowErrors) -> dict[int, tuple[float, float]]:
    """Compute by layer the error of its output in a free-running candidate, and the part from earlier layers, if traced."""
    records = {role: folder.read(LAYER_DIFF, role) for role in ROLES}
    traced = {role: record.traced for role, record in records.items() if record and record.traced}
    if not traced:
        return {}
    # Prefer the candidate's own server, which wrote the keys and values too.
    where = {role: role if role in traced else next(iter(traced)) for role in ROLES}
    labels = next(iter(traced.values()))
    reference, candidate = (
        [read_trace(folder.server_folder(where[role]), f"{role}-{label}", folder.nonce) for label in labels]
        for role in ROLES
    )
    return free_running_errors(
        list(zip(reference, candidate, strict=True)), relative_l1(errors.cells.distance(("layer",)))
    )


def _check_layers(
    suites: Sequence[str],
    errors: ShadowErrors | None,
    claimed: Sequence[str],
    expected: Collection[int],
    *,
    has_url: bool = False,
) -> Check:
    """Check that the candidate's output was compared with the truth, on the same inputs, in every claimed phase, layer and head."""
    required = Requirement("layers-compared")
    if "layers" not in suites:
        return required.check("not checked", state("layers-not-compared", why="not requested"))
    if errors is None:
        return required.check("missing", state("layers-not-compared", why="no server" if has_url else "no call"))
    if failed := errors.failed_calls:
        outcome = state("calls-not-computed", calls=sum(call.calls for call in failed), said=failed[0].text)
        return required.check("failed", outcome)
    if untested := {layer: why for header in errors.headers for layer, why in header.untested.items()}:
        layer, why = min(untested.items())
        return required.check("missing", state("calls-not-comparable", layers=[*untested], layer=layer, said=why))
    phases = [(phase, *_coverage(errors, phase, expected)) for phase in claimed]
    met = bool(phases) and all(layers and not lacking for _, layers, lacking, _ in phases)
    return required.met(met, state("phases-compared", phases=phases))


def _coverage(errors: ShadowErrors, phase: str, expected: Collection[int]) -> tuple[int | None, list[int], list[int]]:
    """Count the layers that were compared with the truth in a phase, or None; and list the layers and heads that were not."""
    at_layer, at_head = (DIMENSIONS.index(name) for name in ("layer", "head"))
    own = errors.cells.candidate
    index, members = errors.cells.index[elements(own.own) > 0], own.honest.shape[1]
    here = index[index[:, DIMENSIONS.index("phase")] == PHASES.index(phase)] if members > 1 else index[:0]
    seen = {(int(row[at_layer]), int(row[at_head])) for row in here}
    if not seen:
        return None, [], []
    lacking = {(layer, head) for layer in expected for head in range(errors.heads.get(layer, 1))} - seen
    layers, heads = (sorted({place[axis] for place in lacking}) for axis in (0, 1))
    return len(expected), layers, heads


def _check_cached_prefix(
    answers: Sequence[Answer], errors: ShadowErrors | None = None, *, cache: bool = False
) -> Check:
    """Check that enough of the candidate's questions hit a cached prefix, as the server reports; `cache`: it is known to be on."""
    required = Requirement("cached-prefix")
    if errors is not None:
        longest = CACHED_PREFIX.labels[-1]
        some = bool(elements(errors.cells.distance((), {"prefix": longest})) > 0)
        return required.met(some, state("prefix-compared", some=some, prefix=longest, cache=cache))
    if not answers:
        return required.check("missing", state("no-question-answered"))
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if not known:
        return required.check("missing", state("cached-tokens-not-reported"))
    met, n = sum(tokens >= CACHED_PREFIX_TOKENS for tokens in known), len(answers)
    tokens, share = CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE
    outcome = state("questions-cached", met=met, questions=n, tokens=tokens, share=share, cache=cache)
    return required.met(met >= MIN_CACHED_SHARE * n, outcome)


_WORST = "worst-of-matrix"


def matrix_claim(run: RunEvidence) -> Judged:
    """Judge the kernel by itself, and check that it was run."""
    record = run.matrix
    suite, causes = (_suite(record), record.findings) if record else (None, ())
    return Judged(suite=suite, checks=_check_ran(run), causes=causes)


def _suite(record: KernelResult) -> SuiteResult:
    """Judge the kernel by itself."""
    missing = [record.not_run] if record.not_run else [*record.missing] if record.computed else []
    lacking = state("op-calls-not-tested", missing=missing) if missing or not record.computed else None
    # The numbers count, even without a finding.
    outside = bool(record.failing) or not record.worst <= 1
    verdict: Verdict = "regression" if outside or serious(record.findings) else "inconclusive" if lacking else "pass"
    worst = times_bound(_WORST, record.worst, calls=record.computed, shapes=record.shapes)
    measured = record.worst_own is not None
    return SuiteResult(
        id="matrix",
        synthetic=True,
        verdict=verdict,
        why=(_why(record, outside, lacking),),
        p_regression=FALSE_FLAGS if verdict == "regression" else None,
        metrics=(worst,) if measured else (),
        decided_by=_WORST if measured else "",
    )


def _check_ran(run: RunEvidence) -> list[Check]:
    """Check that the matrix ran with the candidate, if the candidate is a kernel and layers were requested."""
    candidate, record = run.spec.candidate.backend, run.matrix
    if "candidate" not in run.manifest.code or "layers" not in run.spec.workload.suites:
        return []
    required = Requirement("matrix-ran")
    if record is None:
        return [required.check("missing", state("matrix-absent"))]
    if record.kernel != candidate:
        return [required.check("missing", state("matrix-of-another", kernel=record.kernel, candidate=candidate))]
    if record.not_run:
        return [required.check("missing", state("matrix-not-run", candidate=candidate, said=record.not_run))]
    return [required.check("ok", state("matrix-computed", calls=record.computed))]


def _why(record: KernelResult, outside: bool, lacking: Statement | None) -> Statement:
    failing, computed, worst = len(record.failing), record.computed, record.worst
    if wrong := serious(record.findings):
        title, measured = wrong[0].title if wrong[0].does else "", worst if record.worst_own is not None else None
        return state(
            "op-calls-wrong", failing=failing, calls=computed, worst=measured, title=title, said=wrong[0].sentence
        )
    if outside:
        return state("op-calls-unexplained", failing=failing, worst=worst)
    refused = len(record.refused) + len(record.excluded)
    return lacking or state("op-calls-within", worst=worst, calls=computed, shapes=record.shapes, refused=refused)
