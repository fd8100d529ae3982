from __future__ import annotations

import pytest
from scipy.stats import binomtest

from assay.harness.ingest.guessing import _guessed_share, below_guessing


@pytest.mark.parametrize(
    ("task", "share"), [("mmlu", 0.25), ("MMLU_anatomy", 0.25), ("mmlu_pro_law", 0.1), ("mmlux", None), ("gsm8k", None)]
)
def test_guessing_is_known_by_the_longest_name(task: str, share: float | None) -> None:
    assert _guessed_share(task) == share


def test_a_score_below_guessing_has_its_exact_p_value() -> None:
    found = below_guessing("mmlu", 0.125, 64, "mmlu", (), ())
    assert found is not None
    assert found.severity == "serious"
    exact = binomtest(8, 64, 0.25, alternative="less").pvalue
    assert f"p = {exact:.2g}" in found.evidence[0]


def test_noise_is_no_regression_and_a_score_above_is_no_finding() -> None:
    noise = below_guessing("mmlu", 0.24, 100, "mmlu", (), ())
    assert noise is not None
    assert noise.severity == "info"
    assert below_guessing("mmlu", 0.26, 100, "mmlu", (), ()) is None
    assert below_guessing("gsm8k", 0.0, 100, "gsm8k", (), ()) is None
