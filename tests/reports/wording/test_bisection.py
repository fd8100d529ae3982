"""The words of a layer bisection."""

from __future__ import annotations

import pytest

from assay.harness.statement import Statement, state
from assay.reports.wording.say import say


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            state("no-outcome-leads", layers=[0, 1, 2, 5], right=3, wrong=2),
            "With the candidate in layers 0-2, 5 the task was right 3 times and wrong 2 times: neither leads clearly.",
        ),
        (
            state("right-with-layers-restored", layers=[3]),
            "The task is right with the reference in layer 3 and the candidate in all others.",
        ),
        (
            state("right-with-layers-restored", layers=[3, 4, 5, 9]),
            "The task is right with the reference in the 4 layers 3-5, 9 and the candidate in all others; with the candidate in "
            "any one of 3-5, 9 as well, it is wrong.",
        ),
        (
            state("right-without-cached-prefix", layers=4, cached=0, prompts=16, tokens=16),
            "The task is right with the candidate in all 4 layers, but only 0 of 16 prompts had a cached prefix of 16 tokens or "
            "more: run with the prefix cache on.",
        ),
        (
            state("reference-too-weak", right=0, prompts=16, by="text"),
            "The reference alone gets 0 of 16 right by text: a broken candidate could not look worse.",
        ),
        (
            state("layers-need-reference", reference="triton", candidate="mine", by="text"),
            "must run triton for the texts to be right again; with mine in all other layers, these prompts show no loss.",
        ),
        (state("layer-alone", layer=1, wrong=True), "layer 1: wrong alone"),
        (state("layer-alone", layer=3, wrong=False), "layer 3: right alone, wrong only together with others"),
    ],
)
def test_a_bisection_says_what_it_found(statement: Statement, said: str) -> None:
    assert say(statement) == said


@pytest.mark.parametrize(
    ("layers", "but", "where"),
    [(0, [], "no layer"), (4, [], "all layers"), (2, [1, 3], "all layers but 1, 3"), (0, [0, 1, 2, 3], "all layers but 0-3")],
)
def test_a_set_of_layers_is_said_with_what_it_lost(layers: int, but: list[int], where: str) -> None:
    score = state(
        "right-with-candidate", candidate="mine", layers=layers, but=but, by="answers", alone=32,
        right=5, lost=27, gained=0, p=7.45e-9
    )  # fmt: skip
    assert say(score) == f"mine in {where}: 5 answers right, the reference alone 32 (27 lost, 0 gained, p = 7.4e-09)"
