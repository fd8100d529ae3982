"""Was the seeded fault seen? What the servers did under it -> the check ``workload-sensitive``.

Each suite of the run has to see the fault by its own measure: answers by the paired test against the policy's margin, logits by a
sign test against their limit, layers by cells out of bounds. A workload that does not see it proves nothing when it sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from assay.evals.questions import parse_answer
from assay.harness.evidence.faults import SENSITIVITY, SeededCalls, SensitivityRecord
from assay.harness.evidence.layer_diff_record import with_roles_exchanged
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import Answer, Item
from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.logits import compare_roles
from assay.harness.judge.logits_suite import limit_of
from assay.harness.judge.report import FaultSeen, SensitivityResult
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.policy import Policy
from assay.harness.sides import Role
from assay.harness.stats.betting import log_wealth, p_value
from assay.harness.stats.share import p_not_above
from assay.harness.verdict import Check, Requirement

# Suites that have to see the fault.
_SUITES = ("accuracy", "logits", "layers")
_ATTENTIVE = (
    "use a workload that depends on attention: real weights (without --load-format=dummy), questions that share a header, and the "
    "prefix cache on"
)
_START_BOTH = "let assay start both servers, by the names of their backends"


def claim(run: RunEvidence) -> Judged:
    """Check that the suites saw the seeded fault.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    result = _result(run)
    check = _check_sensitive(run.spec.workload.suites, result, run.seeded, bool(run.urls))
    return Judged(checks=[check], parts={"sensitivity": result} if result else {})


def _result(run: RunEvidence) -> SensitivityResult | None:
    """Determine what each suite of a run saw of the fault; None where none was seeded."""
    if not run.seeded:
        return None
    folder, policy, parts = run.folder, run.spec.policy, []
    for role, record in run.seeded.items():
        place = folder.server_folder(role) / SENSITIVITY
        if record.answers:
            parts.append(_answers_see(policy, run.items, run.answers, record.answers))
        if record.scored:
            parts.append(_logits_see(policy, folder.path, place, run.noise, folder.nonce))
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
    net = f"{sum(loss > 0 for loss in lost)} lost and {sum(loss < 0 for loss in lost)} gained of {len(lost)} questions"
    return FaultSeen(suite="accuracy", seen=p <= policy.alpha, numbers=f"{net}, p = {p:.2g}")


def _logits_see(policy: Policy, folder: Path, place: Path, noise: Sequence[str], nonce: str = "") -> FaultSeen:
    """Test if the mean KL of prompts scored with a fault is above the limit of the suite, behind a cached prefix."""
    faulty = read_logits(logits_path(place, "candidate", 0), nonce)
    reference = read_logits(logits_path(folder, "reference", 0), nonce)
    order = {sequence.item: number for number, sequence in enumerate(reference.header.sequences)}
    same = reference.only([order[sequence.item] for sequence in faulty.header.sequences])
    compared = compare_roles(same, faulty)
    lost = next((row.nonfinite - row.reference_nonfinite for row in compared.rows if row.condition == "cached"), 0)
    cached = next((prompt for prompt in compared.prompts if prompt.condition == "cached"), None)
    if cached is None or not len(cached.kl):
        observed = f"{lost} positions not finite" if lost else "no prompt was scored behind a cached prefix"
        return FaultSeen(suite="logits", seen=lost > 0, numbers=observed)
    limit, _ = limit_of(cached, policy.logits_limit, noise)
    # A divergence that is not a number counts as above, since the reference's was finite. An exact one-sided sign test.
    above = sum(not kl <= limit for kl in cached.kl.tolist())
    p = p_not_above(above, len(cached.kl), 0.5)
    observed = f"{above} of {len(cached.kl)} prompts above {limit:.3g} nats, {cached.kl.mean():.3g} on average"
    return FaultSeen(suite="logits", seen=lost > 0 or p <= policy.alpha, numbers=observed)


def _layers_see(place: Path, claimed: Sequence[str], role: Role = "reference", nonce: str = "") -> FaultSeen:
    """Test if a cell of the shadow of a faulty candidate is out of the bounds of noise."""
    errors = read_shadow_errors(place, nonce)
    against = compare_with_noise(errors if role == "reference" else with_roles_exchanged(errors, claimed))
    tests = (against.cells, against.gains, against.apart, against.reference)
    flagged, compared = sum(int(test.flagged.sum()) for test in tests), len(against.cells.index)
    worst = max((float(test.excess.max(initial=0.0)) for test in tests), default=0.0)
    observed = f"{flagged:,} tests out of bounds in {compared:,} cells, at worst {worst:.3g} times"
    return FaultSeen(suite="layers", seen=flagged > 0, numbers=observed)


def _check_sensitive(
    suites: Sequence[str], result: SensitivityResult | None, records: Mapping[Role, SensitivityRecord], url: bool
) -> Check:
    """Check that every suite of the run saw the fault."""
    required = Requirement("workload-sensitive")
    wanted = [suite for suite in _SUITES if suite in suites]
    if not wanted:
        observed = "no suite that could see a fault was requested"
        return required.check("not checked", observed, "add accuracy, logits or layers to --suites")
    if (result is None or not result.parts) and url:
        return required.check("missing", "a fault cannot be seeded in a server that assay did not start", _START_BOTH)
    if result is None or not result.parts:
        return required.check("missing", "no fault was seeded", "repeat the command, which resumes")
    if (idle := next(_idle(records), None)) is not None:
        why = f": {idle.why}" if idle.why else ", since none had a cached prefix"
        return required.check("missing", f"{result.fault} changed none of {idle.calls:,} calls{why}", _ATTENTIVE)
    seen: dict[str, bool] = {part.suite: part.seen for part in result.parts}
    if unmeasured := [suite for suite in wanted if suite not in seen]:
        observed = f"{result.sentence}; not measured by {' and '.join(unmeasured)}"
        return required.check("missing", observed, _START_BOTH if url else RUN_AGAIN)
    return required.met(all(seen[suite] for suite in wanted), result.sentence, _ATTENTIVE)


def _idle(records: Mapping[Role, SensitivityRecord]) -> Iterator[SeededCalls]:
    """List the measurements whose fault changed no call, or more calls than there were."""
    for record in records.values():
        for calls in (record.served, record.shadowed):
            if calls is not None and not 0 < calls.changed <= calls.calls:
                yield calls


def losses(items: Mapping[str, Item], reference: Mapping[str, str], faulty: Sequence[Answer]) -> list[float]:
    """Score each question: 1 if only the reference got it right, -1 if only the faulty candidate did, else 0.

    Args:
        items: the questions by id.
        reference: the reference's texts by id of the question. Questions that it did not answer are left out.
        faulty: the faulty candidate's answers, in the order in which they were asked. Those to another prompt are left out.
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
    """Compute the anytime-valid p value of "the loss is within the margin"; 1 where nothing was answered.

    Args:
        margin: of the suite, as a share of 1.
    """
    return p_value(log_wealth(lost, margin, -1, 1)) if lost else 1.0
