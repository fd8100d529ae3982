"""The words of a bench: why a ratio has its verdict, and what overrules the ratios."""

from __future__ import annotations

from types import ModuleType

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.statement import state
from assay.reports.summary import latency_lines
from assay.reports.wording.say import measured_of
from assay.reports.wording.verdict import headline, reasons


@pytest.mark.parametrize(
    ("faster", "said"),
    [
        (True, "No speed-up: wrong answers (Questions of gsm8k, Logits)."),
        (False, "Wrong answers (Questions of gsm8k, Logits): the times prove nothing."),
    ],
)
def test_times_of_wrong_answers_are_no_pass_and_say_so_first(examples: ModuleType, faster: bool, said: str) -> None:
    timed: LatencyResult = examples.latency()
    note = state("no-gain", faster=faster, wrong=[("accuracy", "gsm8k"), ("logits", "")])
    result = timed.model_copy(update={"verdict": "inconclusive", "note": note})
    assert headline(result) == latency_lines(result)[0] == said
    assert not any(said in reason for reason in reasons(result))
    metric = measure("worst-time-ratio", 0.5, time="e2e", load="short, 1 in flight", ratios=24, note=note)
    assert measured_of(metric) == (
        "worst ratio of times",
        "0.500 times",
        f"{said} Candidate over reference: end-to-end latency, short, 1 in flight; the worst of 24 ratios",
    )
