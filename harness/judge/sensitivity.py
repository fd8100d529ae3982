"""The check ``workload-sensitive``: whether the suites detected the seeded fault, judged by the servers' answers under it.

Each suite of the run has to detect the fault by its own measure: answers by the paired test against the policy's margin, logits by
a sign test against their limit, layers by cells out of bounds. A workload that misses it proves nothing when it finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from assay.evals.questions import parse_answer
from assay.harness.evidence.faults import SENSITIVITY, SeededCalls, SensitivityRecord
from assay.harness.evidence.layer_diff_record import with_roles_exchanged
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import Answer, Item
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.judge import side_probes
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.logits import compare_roles
from assay.harness.judge.logits_suite import limit_of
from assay.harness.judge.report import FaultSeen, SensitivityResult
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.policy import Policy
from assay.harness.sides import Role
from assay.harness.statement import state
from assay.harness.stats.betting import log_wealth, p_value
from assay.harness.stats.share import p_not_above
from assay.harness.verdict import Check, Requirement

# Suites that have to detect the fault.
_SUITES = ("accuracy", "logits", "layers")


def claim(run: RunEvidence) -> Judged:
    """Check that the suites detected the seeded fault."""
    result = _result(run)
    check = _check_sensitive(run.spec.workload.suites, result, run.seeded, bool(run.urls))
    return Judged(checks=[check], parts={"sensitivity": result} if result else {})


def _result(run: RunEvidence) -> SensitivityResult | None:
    """Determine whether each suite of a run detected the fault, or return None if none was seeded."""
    if not run.seeded:
        return None
    folder, policy, parts = run.folder, run.spec.policy, []
    for role, record in run.seeded.items():
        place = folder.server_folder(role) / SENSITIVITY
        if record.answers:
            parts.append(_answers_see(policy, run.items, run.answers, record.answers))
        if record.scored:
            parts.append(_logits_see(run, place))
        parts += side_probes.faults_seen(run, place)
        if record.shadowed is not None and any((place / SHADOW_FOLDER).glob("*.safetensors")):
            parts.append(_layers_see(place, run.claimed, role, folder.nonce))
    parts.sort(key=lambda part: _SUITES.index(part.suite))
    return SensitivityResult(fault=next(iter(run.seeded.values())).fault, parts=tuple(parts))


def _answers_see(
    policy: Policy, items: Sequence[Item], answers: Sequence[Answer], faulty: Sequence[Answer]
) -> FaultSeen:
    """Test if answers with a fault, in the order in which they were asked, lose more than the margin against the reference's."""
    texts = {a.item: a.text for a in answers if (a.suite, a.role, a.repeat) == ("accuracy", "reference", 0)}
    lost = losses({item.id: item for item in items if item.suite == "accuracy"}, texts, faulty)
    p = p_no_loss(lost, policy.margin)
    net = sum(loss > 0 for loss in lost), sum(loss < 0 for loss in lost)
    numbers = state("fault-in-answers", lost=net[0], gained=net[1], questions=len(lost), p=p)
    return FaultSeen(suite="accuracy", seen=p <= policy.alpha, numbers=numbers)


def _logits_see(run: RunEvidence, place: Path) -> FaultSeen:
    """Test if the mean KL of prompts scored with a fault is above the limit of the suite, after a cached prefix."""
    policy, folder, nonce = run.spec.policy, run.folder.path, run.folder.nonce
    faulty = read_logits(logits_path(place, "candidate", 0), nonce)
    reference = read_logits(logits_path(folder, "reference", 0), nonce)
    order = {sequence.item: number for number, sequence in enumerate(reference.header.sequences)}
    same = reference.only([order[sequence.item] for sequence in faulty.header.sequences])
    compared = compare_roles(same, faulty)
    lost = next((row.nonfinite - row.reference_nonfinite for row in compared.rows if row.condition == "cached"), 0)
    cached = next((prompt for prompt in compared.prompts if prompt.condition == "cached"), None)
    if cached is None or not len(cached.kl):
        return FaultSeen(suite="logits", seen=lost > 0, numbers=state("fault-without-divergences", not_finite=lost))
    limit, _ = limit_of(cached, policy.logits_limit, run.noise, run.honest_kl)
    # A divergence that is not a number counts as above, since the reference's was finite. An exact one-sided sign test.
    above = sum(not kl <= limit for kl in cached.kl.tolist())
    p = p_not_above(above, len(cached.kl), 0.5)
    numbers = state("fault-in-logits", above=above, prompts=len(cached.kl), limit=limit, mean=cached.kl.mean())
    return FaultSeen(suite="logits", seen=lost > 0 or p <= policy.alpha, numbers=numbers)


def _layers_see(place: Path, claimed: Sequence[str], role: Role = "reference", nonce: str = "") -> FaultSeen:
    """Test if a cell of a faulty candidate in the shadow is out of the bounds of noise."""
    errors = read_shadow_errors(place, nonce)
    against = compare_with_noise(errors if role == "reference" else with_roles_exchanged(errors, claimed))
    tests = (against.cells, against.gains, against.apart, against.reference)
    flagged, compared = sum(int(test.flagged.sum()) for test in tests), len(against.cells.index)
    worst = max((float(test.excess.max(initial=0.0)) for test in tests), default=0.0)
    numbers = state("fault-in-layers", flagged=flagged, cells=compared, worst=worst)
    return FaultSeen(suite="layers", seen=flagged > 0, numbers=numbers)


def _check_sensitive(
    suites: Sequence[str], result: SensitivityResult | None, records: Mapping[Role, SensitivityRecord], url: bool
) -> Check:
    """Check that every suite of the run detected the fault."""
    required = Requirement("workload-sensitive")
    seen_by = {part.suite for part in result.parts} if result else set()
    wanted = [suite for suite in _SUITES if suite in suites or suite in seen_by]
    if not wanted:
        return required.check("not checked", state("no-suite-for-faults"))
    if result is None or not result.parts:
        return required.check("missing", state("fault-not-seedable" if url else "no-fault-seeded"))
    if (idle := next(_idle(records), None)) is not None:
        numbers = {"changed": idle.changed, "calls": idle.calls}
        return required.check("missing", state("fault-changed-nothing", fault=result.fault, why=idle.why, **numbers))
    seen: dict[str, bool] = {suite: all(part.seen for part in result.parts if part.suite == suite) for suite in seen_by}
    unmeasured = [suite for suite in wanted if suite not in seen]
    parts = [(part.suite, part.seen, part.numbers) for part in result.parts]
    outcome = state("faults-seen", fault=result.fault, parts=parts, unmeasured=unmeasured, url=url)
    return required.met(all(seen.get(suite, False) for suite in wanted), outcome)


def _idle(records: Mapping[Role, SensitivityRecord]) -> Iterator[SeededCalls]:
    """List the measurements whose fault changed no call, or more calls than there were."""
    for record in records.values():
        for calls in (record.served, record.shadowed):
            if calls is not None and not 0 < calls.changed <= calls.calls:
                yield calls


def losses(items: Mapping[str, Item], reference: Mapping[str, str], faulty: Sequence[Answer]) -> list[float]:
    """Score each question: 1 if only the reference got it right, -1 if only the faulty candidate did, or else 0.

    Args:
        reference: the reference's texts by id of the question. Questions that it did not answer are left out.
        faulty: the faulty candidate's answers, in the order in which they were asked. Answers to another prompt are left out.
    """
    lost = []
    for answer in faulty:
        item = items.get(answer.item)
        if item is None or answer.item not in reference or answer.prompt_hash != item.prompt_hash:
            continue
        right = [item.is_right(parse_answer(text, item.expected)) for text in (reference[answer.item], answer.text)]
        lost.append(float(right[0]) - float(right[1]))
    return lost


def p_no_loss(lost: Sequence[float], margin: float) -> float:
    """Compute the anytime-valid p value of "the loss is within the margin"; 1 if nothing was answered."""
    return p_value(log_wealth(lost, margin, -1, 1)) if lost else 1.0
