"""What the policy asks of a run as a whole: its suites, its limits, and that it was not repeated until it passed."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.history import check_repeated
from assay.harness.judge.judgement import WHOLE
from assay.harness.statement import state
from assay.harness.verdict import Check, Requirement


def claim(run: RunEvidence, ran: Sequence[str]) -> Judged:
    """Check that the required suites ran, and with which policy.

    In a gate whose policy names none, every suite of a whole run is required.
    """
    spec, manifest = run.spec, run.manifest
    require, line = spec.policy.require, spec.policy.line("require")
    if run.baselines is not None and "require" not in spec.policy.given_by:
        require, line = WHOLE, ""
    compared = spec.device, spec.reference.backend, manifest.model, tuple(sorted(spec.treatment.items()))
    return Judged(
        checks=[
            *_check_required(require, ran, line),
            *check_repeated(run.folder.path, manifest.created, compared),
            _check_policy(run),
        ]
    )


def _check_policy(run: RunEvidence) -> Check:
    """Check that the policy is as strict as the default. A weaker one is the user's to choose, and is not chosen in silence."""
    noise = run.manifest.noise.get("candidate", "")
    declared = noise if noise not in run.spec.policy.bounds else ""
    weaker = bool(run.spec.weakened or declared)
    outcome = state("policy-weakened", lines=run.spec.weakened, declared=declared) if weaker else state("policy-strict")
    return Requirement("policy").check("not checked" if weaker else "ok", outcome)


def _check_required(require: Sequence[str], ran: Sequence[str], line: str) -> list[Check]:
    """Check that the suites ran that the policy requires; `line` is the policy's, empty for the default of a gate."""
    return [
        Requirement("required")
        .of(suite)
        .met(suite in ran, state("suite-required", suite=suite, ran=suite in ran, line=line, required=require))
        for suite in require
    ]
