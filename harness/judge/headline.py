"""The headline of a run beside its verdict and its cause: how a regression shows, and what a pass covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.harness.judge.answer_length_check import LENGTH_RATIO
from assay.harness.judge.decide import BASELINE
from assay.harness.judge.report import EnvelopeResult, SuiteResult
from assay.harness.text import one_line


def shown_by(suites: Sequence[SuiteResult]) -> str:
    """Describe how a regression shows: accuracies if they regressed, else the deciding number of the first suite that did."""
    for suite in (each for each in suites if each.verdict == "regression"):
        if suite.id == "accuracy" and len(suite.tallies) == 2 and suite.decided_by != LENGTH_RATIO:
            before, after = (tally.right / tally.total if tally.total else 0.0 for tally in suite.tallies)
            return f"accuracy {before:.3f} -> {after:.3f}"
        if suite.deciding_metric and suite.id != BASELINE:
            return f"{suite.deciding_metric.title} {suite.deciding_metric.text}"
    return ""


def _tokens(reached: Mapping[str, Mapping[str, int]]) -> int:
    """Return the length that every phase reached."""
    return min((values.get("total-tokens", 0) for values in reached.values()), default=0)


def scope_of(
    model: str, questions: int, synthetic: bool, envelope: EnvelopeResult | None, claimed: Sequence[str]
) -> str:
    """Describe what a pass covers: "on the tiny model: 260 synthetic questions, up to 256 tokens; decode is the reference's".

    The tokens are those up to which calls were compared without a gap; with what was served, where that is less.

    Args:
        model: its name or path.
        questions: that both roles answered; 0 if none was asked.
        synthetic: whether they are synthetic.
        envelope: what the layer diff covers; None without one.
        claimed: phases that the candidate claims.
    """
    reach = [f"{questions:,} {'synthetic ' if synthetic else ''}questions"] if questions else []
    if envelope and (tokens := _tokens(envelope.reached)):
        served = _tokens(envelope.served_reached)
        reach.append(f"up to {tokens:,} tokens")
        if served < tokens:
            reach[-1] += f" ({f'{served:,}' if served else 'none'} of them served)"
    name = one_line(model.rstrip("/").rpartition("/")[2] or model, 60)
    others = [phase for phase in ("extend", "decode") if claimed and phase not in claimed]
    delegated = f"; {' and '.join(others)} is the reference's" if others else ""
    return f"on the {name} model{': ' if reach else ''}{', '.join(reach)}{delegated}"
