from __future__ import annotations

import pytest

from assay.harness.ingest.pairing import ItemPair, decide_pairs
from assay.harness.ingest.result_set import ResultItem
from assay.harness.judge.paired_accuracy import Rule
from assay.harness.stats.paired_margin import p_not_above, p_not_below

RULE = Rule(margin=0.02, alpha=0.05, regression_alpha=0.05, loss_suffices=True)


def pairs(same: int, lost: int = 0, gained: int = 0, wrong: int = 0, parsed: str | None = "A") -> list[ItemPair]:
    scores = [(1, 1)] * same + [(1, 0)] * lost + [(0, 1)] * gained + [(0, 0)] * wrong

    def item(number: int, score: float) -> ResultItem:
        return ResultItem(key=str(number), prompt_hash="p", target="ABCD"[number % 4], answer="A", parsed=parsed, score=score)

    return [(item(n, a), item(n, b)) for n, (a, b) in enumerate(scores)]


def test_a_loss_above_the_margin_is_a_regression() -> None:
    found = decide_pairs(pairs(same=250, lost=40, gained=5), RULE)
    assert found.verdict == "regression"
    assert (found.lost, found.gained) == (40, 5)
    assert found.loss == pytest.approx(35 / 295)
    assert found.p_regression == p_not_above(40, 5, 295, 0.02)
    assert found.p_inferior == p_not_below(40, 5, 295, 0.02)
    assert found.low > 0.02


def test_results_that_stopped_by_their_answers_get_the_test_that_holds_at_every_look() -> None:
    fixed, adaptive = (decide_pairs(pairs(same=180), RULE, adaptive=one) for one in (False, True))
    assert (fixed.test, fixed.verdict) == ("exact", "pass")
    assert (adaptive.test, adaptive.verdict) == ("betting", "inconclusive")
    assert decide_pairs(pairs(same=400), RULE, adaptive=True).verdict == "pass"


def test_scores_between_0_and_1_and_repeats_are_bet_on_once_for_each_document() -> None:
    graded = [(a.model_copy(update={"score": 0.5}), b) for a, b in pairs(same=300)]
    assert decide_pairs(graded, RULE).test == "betting"
    repeated = pairs(same=100)
    repeated += [(a.model_copy(update={"repeat": 1}), b.model_copy(update={"repeat": 1})) for a, b in repeated]
    found = decide_pairs(repeated, RULE)
    assert found.test == "betting"
    # 100 documents asked twice are not 200: they pass no margin that 100 do not.
    assert found.p_inferior == pytest.approx(decide_pairs(pairs(same=100), RULE, adaptive=True).p_inferior)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (pairs(same=250, gained=40), "pass"),
        (pairs(same=50, lost=100, parsed=None), "regression"),  # answers without a letter hide no loss
        ([], "inconclusive"),
    ],
    ids=["gain", "unparsed", "nothing"],
)
def test_gains_pass_and_losses_are_never_hidden(found: list[ItemPair], verdict: str) -> None:
    assert decide_pairs(found, RULE).verdict == verdict
