"""The layer diff in a run's folder -> its part of the report: the suite ``layers``, the error profile, the findings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from assay.harness.backend import Backend
from assay.harness.conditions import CACHED_PREFIX, CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE, PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.error_table import DIMENSIONS, elements, relative_l1
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, KernelResult, foreign_cause
from assay.harness.evidence.layer_diff_record import LAYER_DIFF, pack_of
from assay.harness.evidence.pack import replay_command
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import REPEAT_RUN, RESUME
from assay.harness.evidence.shadow_errors import Known, ShadowErrors, ShadowHeader
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.error_grids import bounds_of, layers_result, truth_rows
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import Metric
from assay.harness.judge.layer_verdict import LayerEvidence, findings, judge_layers, times_noise
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.traces import free_running_errors
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.sides import ROLES
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.text import one_line, percent, ranges, two_digits
from assay.harness.verdict import Check, Requirement, kernel_verdict, serious


def _recorded_phases(header: ShadowHeader, candidate: Backend) -> Collection[str]:
    """Return the phases whose recorded calls must have been examined."""
    own = "stored_kv" in header.features and not candidate.is_kernel
    return [phase for phase in header.phases if not (own and phase == "extend")]


def claim(run: RunEvidence) -> Judged:
    """Judge what the layer diff left, and check that it compared every layer, also with a cached prefix.

    Raises:
        EvidenceError: a file is damaged.
    """
    suites, errors = run.spec.workload.suites, run.errors
    called = {layer for role in ROLES for count in run.counts[role] for layer in count.calls_by_layer}
    checks = [
        _check_cached_prefix(
            [question.candidate for question in run.pairings["accuracy"].pairs],
            None if "accuracy" in suites else errors,
        ),
        _check_layers(suites, errors, run.claimed, called, has_url=bool(run.urls)),
    ]
    if errors is None:
        return Judged(checks=checks)
    folder, spec = run.folder, run.spec
    replay, pack = folder.read(CAUSE), pack_of(folder)
    phases = _recorded_phases(errors.headers[0], Backend.parse(spec.candidate.backend))
    foreign = foreign_cause(replay, spec.candidate.backend, phases, pack) if replay else ""
    evidence = LayerEvidence(errors, compare_with_noise(errors), replay, foreign)
    not_traced: tuple[str, ...] = ()
    try:
        free = _free_running(folder, errors)
    except EvidenceError as error:  # own errors and the cause do not depend on it
        free, not_traced = {}, (f"inherited error: {error.found}",)
    result = layers_result(
        errors,
        bounds_of(evidence.against),
        free,
        pack=str(pack) if pack else "",
        not_observed=(*not_traced, *_untested(errors), *_known_differences(errors)),
        against_truth=truth_rows(evidence.against),
    )
    named = replay.findings if replay and not foreign else ()
    again = replay_command(pack, spec.candidate.backend) if pack else run.manifest.command
    causes = [*named, *findings(evidence, again)]
    suite = judge_layers(spec.policy, evidence, synthetic=spec.workload.synthetic)
    return Judged(suite=suite, checks=checks, causes=causes, parts={"layers": result})


def _untested(errors: ShadowErrors) -> Iterator[str]:
    for header in errors.headers:
        for layer, why in sorted(header.untested.items()):
            yield f"truth, layer {layer}: a call could not be compared with it: {one_line(why)}"


def _known_differences(errors: ShadowErrors) -> Iterator[str]:
    differences: dict[Known, str] = {
        "window": "the reference's window is off by one key there",
        "given": "one of both reads new K and V before they are stored in fewer bits there, and the other one after that",
    }
    for (how, why), phase in product(differences.items(), PHASES):
        layers = sorted(layer for layer, *place in errors.known if place == [phase, how])
        if layers:
            yield (
                f"difference from the reference, {phase}, layers {', '.join(map(str, layers))}: {why}, so the difference is no "
                "error of the candidate's, which is compared with the truth alone"
            )


def _free_running(folder: RunFolder, errors: ShadowErrors) -> dict[int, tuple[float, float]]:
    """Compute by layer the error of its output in a free-running candidate, and its inherited part; empty if not traced."""
    records = {role: folder.read(LAYER_DIFF, role) for role in ROLES}
    if not any(records.values()):
        return {}
    # Prefer the candidate's own server: there it wrote the keys and values too.
    where = {role: role if records[role] else next(r for r in ROLES if records[r]) for role in ROLES}
    labels = next(record.traced for record in records.values() if record)
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
        return required.check("not checked", "the suite layers was not requested", "add layers to --suites")
    if errors is None and has_url:
        return required.check(
            "missing", "no server could be instrumented", "let assay start the reference, without a URL"
        )
    if errors is None:
        return required.check("missing", "no call was compared", RESUME)
    if failed := errors.failed_calls:
        observed = f"the candidate did not compute {sum(call.calls for call in failed)} calls: {failed[0].text}"
        return required.check("failed", observed, "fix the candidate so that it computes every call")
    if untested := {layer: why for header in errors.headers for layer, why in header.untested.items()}:
        layer, why = min(untested.items())
        observed = f"calls of layers {ranges(untested)} could not be compared; layer {layer}: {one_line(why)}"
        return required.check("missing", observed, "run so that the kernel contract can express every call")
    covered = [_coverage(errors, phase, expected) for phase in claimed]
    return required.met(
        bool(covered) and all(met for _, met in covered),
        "; ".join(words for words, _ in covered) or "no phase is claimed",
        "run so that each of these is shadowed; the report lists why calls were not observed",
    )


def _coverage(errors: ShadowErrors, phase: str, expected: Collection[int]) -> tuple[str, bool]:
    """Describe which layers and heads of a phase were compared with the truth, and return True with it if these are all."""
    at_layer, at_head = (DIMENSIONS.index(name) for name in ("layer", "head"))
    own = errors.cells.candidate
    index, members = errors.cells.index[elements(own.own) > 0], own.honest.shape[1]
    here = index[index[:, DIMENSIONS.index("phase")] == PHASES.index(phase)] if members > 1 else index[:0]
    seen = {(int(row[at_layer]), int(row[at_head])) for row in here}
    if not seen:
        return f"{phase}: not observed", False
    lacking = {(layer, head) for layer in expected for head in range(errors.heads.get(layer, 1))} - seen
    if not lacking:
        return f"{phase}: {len(expected)} layers", bool(expected)
    layers, heads = ({place[axis] for place in lacking} for axis in (0, 1))
    return f"{phase}: not layer {ranges(layers)}, head {ranges(heads)}", False


def _check_cached_prefix(answers: Sequence[Answer], errors: ShadowErrors | None = None) -> Check:
    """Check that enough of the candidate's questions hit a cached prefix, as the server reports."""
    required, settles = Requirement("cached-prefix"), "keep the prefix cache on (without --disable-radix-cache)"
    if errors is not None:
        longest = CACHED_PREFIX.labels[-1]
        some = bool(elements(errors.cells.distance((), {"prefix": longest})) > 0)
        return required.met(some, f"{'some' if some else 'no'} compared calls had {longest} cached tokens", settles)
    if not answers:
        return required.check("missing", "no question was answered", RESUME)
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if not known:
        observed = "the server did not report how many tokens were cached"
        return required.check("missing", observed, "use a server that reports cached tokens (--enable-cache-report)")
    met = sum(tokens >= CACHED_PREFIX_TOKENS for tokens in known)
    observed = (
        f"{met} of {len(answers)} questions had at least {CACHED_PREFIX_TOKENS} cached tokens; "
        f"{percent(MIN_CACHED_SHARE)} of them are needed"
    )
    return required.met(
        met >= MIN_CACHED_SHARE * len(answers), observed, f"{settles}, and questions that share a header"
    )


_WORST = "worst-of-matrix"


def matrix_claim(run: RunEvidence) -> Judged:
    """Judge the kernel by itself, and check that it was run."""
    record = run.matrix
    suite, causes = (_suite(record), record.findings) if record else (None, ())
    return Judged(suite=suite, checks=_check_ran(run), causes=causes)


def _suite(record: KernelResult) -> SuiteResult:
    """Judge the kernel by itself."""
    missing = (record.not_run,) if record.not_run else record.missing if record.computed else ("no call was computed",)
    # The numbers count, also without a finding.
    outside = bool(record.failing) or not record.worst <= 1
    verdict = "regression" if outside else kernel_verdict(record.findings, missing)
    worst = Metric(
        id=_WORST,
        title="worst own error, op-level calls",
        value=record.worst,
        text=f"{two_digits(record.worst)}x its bound",
        bound=1.0,
        explain=f"Relative L1 against fp64, over {record.computed} calls of {record.shapes}",
    )
    measured = record.worst_own is not None
    return SuiteResult(
        id="matrix",
        synthetic=True,
        verdict=verdict,
        why=_why(record, outside, missing),
        p_regression=FALSE_FLAGS if verdict == "regression" else None,
        metrics=(worst,) if measured else (),
        decided_by=_WORST if measured else "",
    )


def _check_ran(run: RunEvidence) -> list[Check]:
    """Check that the matrix ran with the candidate; no check where that is no kernel, or no layers were asked for."""
    candidate, record = run.spec.candidate.backend, run.matrix
    if "candidate" not in run.manifest.code or "layers" not in run.spec.workload.suites:
        return []
    ran, settles = record is not None and record.kernel == candidate, REPEAT_RUN
    observed = f"{record.computed} calls were computed" if record else "no result of it"
    if record and not ran:
        observed = f"a result of {record.kernel}, not of {candidate}"
    elif record and record.not_run:
        ran, observed = False, one_line(record.not_run, 300)
        settles = f"see what assay check {candidate} reports, and repeat the run with a new --out"
    return [Requirement("matrix-ran").met(ran, observed, settles)]


def _why(record: KernelResult, outside: bool, missing: Sequence[str]) -> str:
    worst = times_noise(record.worst)
    if wrong := serious(record.findings):
        named = one_line(f'"{wrong[0].title}"' if wrong[0].does else wrong[0].sentence, 300)
        at_worst = f", at worst {worst}" if record.worst_own is not None else ""
        return f"{len(record.failing)} of {record.computed} calls are out of bounds{at_worst}: {named.rstrip('.')}."
    if outside:
        return f"{len(record.failing)} calls are out of bounds, at worst {worst}; no finding explains it."
    if missing:
        return f"Not tested: {'; '.join(one_line(requirement, 300) for requirement in missing)}."
    refused = len(record.refused) + len(record.excluded)
    more = f"; {refused} more were refused" if refused else ""
    return f"The worst own error is {worst}, in {record.computed} calls of {record.shapes}{more}."
