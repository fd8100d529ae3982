from __future__ import annotations

import pytest

from assay.evals.questions import prompt_hash
from assay.harness.drivers.bisect.layer_search import RestoredLayer
from assay.harness.drivers.bisect.layer_task import (
    LayerBisection,
    ProbeRecord,
    can_fail,
    choose_criterion,
    conclude,
    fewest_prompts,
    probe_record,
    right_prompts,
)
from assay.harness.evidence.records import Item
from assay.harness.statement import state
from assay.harness.stats.share import mcnemar_of_loss

ITEMS = [Item(suite="accuracy", id=f"q{n}", prompt="p", prompt_hash=prompt_hash("p"), expected="ABCD"[n % 4]) for n in range(16)]
RIGHT = [f"Answer: {item.expected}" for item in ITEMS]


def test_answers_need_the_right_letter_and_texts_must_equal_the_references() -> None:
    texts = ["So, Answer: A", "Answer: A", *RIGHT[2:15], "no letter"]
    assert right_prompts("answers", ITEMS, RIGHT, texts) == [True, False, *[True] * 13, False]
    assert right_prompts("text", ITEMS, RIGHT, texts) == [False, False, *[True] * 13, False]


def test_a_set_is_wrong_once_its_loss_is_significant() -> None:
    def judge(lost: int) -> ProbeRecord:
        return probe_record(frozenset({1}), [True] * 16, [False] * lost + [True] * (16 - lost), 0.05, 16, 1.0)

    assert judge(4).outcome == "right"
    judged = judge(5)
    assert (judged.outcome, judged.right, judged.lost, judged.gained) == ("wrong", 11, 5, 0)
    assert judged.p == 0.5**5


@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.01, 0.5**7])
def test_fewest_prompts_is_the_smallest_significant_loss(alpha: float) -> None:
    fewest = fewest_prompts(alpha)
    assert mcnemar_of_loss(fewest, 0) < alpha <= mcnemar_of_loss(fewest - 1, 0)


def test_answers_are_the_criterion_if_the_reference_knows_them() -> None:
    assert choose_criterion(ITEMS, RIGHT, 0.05) == ("answers", 16)
    assert choose_criterion(ITEMS, RIGHT[:9] + [""] * 7, 0.05)[0] == "answers"


def test_text_is_the_criterion_if_the_reference_only_guesses() -> None:
    assert choose_criterion(ITEMS, ["Answer: A"] * 16, 0.05) == ("text", 4)
    assert not can_fail("answers", 7, 16, 0.05), "guessing gets 7 of 16 as well"
    assert can_fail("text", 7, 16, 0.05)
    assert not can_fail("text", 4, 16, 0.05)


def record(candidate: set[int], lost: int) -> ProbeRecord:
    return ProbeRecord(
        candidate=tuple(sorted(candidate)), right=32 - lost, lost=lost, gained=0, p=mcnemar_of_loss(lost, 0),
        outcome="wrong" if lost > 4 else "right", with_prefix=32, seconds=1.0,
    )  # fmt: skip


def test_the_finding_states_layers_and_losses() -> None:
    kept = [record({0, 2}, 6), record({0, 2}, 1), record({0, 2}, 2), record({0, 2}, 0)]
    probes = [record(set(), 0), record({0, 1, 2, 3}, 27), *kept]
    (made,) = conclude(
        LayerBisection(
            reference="triton", candidate="mine", model="tiny", device="cpu", engine="SGLang", phases=("extend",),
            layers=(0, 1, 2, 3), prompts=32, alpha=0.05, reproduce="assay bisect layers", by="answers", known=32,
            reference_right=32, floor=0, candidate_floor=0, outcome="found", why=state("found"), seconds=1.0,
            restored=(RestoredLayer(1, True), RestoredLayer(3, False)), monotone=False, probes=tuple(probes),
        )
    ).findings  # fmt: skip
    assert made.where == "layers 1, 3 of 0-3"
    assert made.claim == state("layers-need-reference", reference="triton", candidate="mine", by="answers")
    assert made.reproduce == "assay bisect layers"
    scores, more = made.shown_by[:3], made.shown_by[3:]
    assert [[score.values[name] for name in ("layers", "but", "right", "lost")] for score in scores] == [
        [0, [], 32, 0], [4, [], 5, 27], [2, [1, 3], 31, 1]
    ], "outvoted answers are no evidence"  # fmt: skip
    assert scores[1].values["p"] == mcnemar_of_loss(27, 0)
    assert more == (
        state("layer-alone", layer=1, wrong=True),
        state("layer-alone", layer=3, wrong=False),
        state("each-layer-needed"),
        state("errors-may-cancel"),
    )
