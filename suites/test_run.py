"""The claims of a run: the intended kernels ran, every question was answered, and each suite passes."""

from __future__ import annotations

import pytest

from assay.harness.judge.report import Report
from assay.suites import claims


def test_only_the_backend_differs(assay_run: Report) -> None:
    """Check that weights, tokenizer and flags are the same."""
    claims.needs(assay_run, "accuracy", "greedy")
    claims.check(assay_run, "same-servers")


def test_the_candidates_own_kernel_ran(assay_run: Report) -> None:
    """Check that it ran in every phase that it claims and in every layer, and that nothing else ran in its place."""
    claims.needs(assay_run, "accuracy", "greedy")
    phases = assay_run.candidate.claimed_phases
    claims.check(assay_run, *([f"kernel-ran-{phase}" for phase in phases] or ["kernel-ran"]))


def test_every_question_was_answered_by_both(assay_run: Report) -> None:
    """Check that both servers answered: an engine that stops early proves nothing."""
    claims.needs(assay_run, "accuracy", "greedy")
    claims.check(assay_run, "all-answered")


def test_prefixes_were_cached(assay_run: Report) -> None:
    """Check that prefixes were cached: SageAttention as shipped is wrong only after a cached prefix."""
    claims.check(assay_run, "cached-prefix")


def test_every_layer_was_compared(assay_run: Report) -> None:
    """Check that every layer was compared on the same inputs, in one server."""
    claims.check(assay_run, "layers-compared")


@pytest.mark.parametrize("suite", ["accuracy", "greedy", "logits", "layers", "latency"])
def test_the_suite_is_a_pass(suite: str, assay_run: Report) -> None:
    """Check each suite's claim: accuracy is not inferior, texts and distributions agree, layers and times are within bounds."""
    claims.needs(assay_run, suite)
    claims.suite(assay_run, suite)
