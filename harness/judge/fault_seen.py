"""Tests of whether answers and logits show a seeded fault, with the numbers that they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.evals.questions import parse_answer
from assay.harness.evidence.records import Answer, Item
from assay.harness.stats.betting import log_wealth, p_value
from assay.harness.stats.share import p_not_above

_LOST, _GAINED = 1.0, -1.0


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
        lost: see `losses`.
        margin: of the suite, as a share of 1.
    """
    return p_value(log_wealth(lost, margin, _GAINED, _LOST)) if lost else 1.0


def p_within(divergences: Sequence[float], limit: float) -> float:
    """Compute the exact one-sided sign test's p value of "half of the prompts or more have a mean KL within the limit".

    1 without prompts.

    A divergence that is not a number counts as above: the reference's was finite.

    Args:
        divergences: mean KL of each prompt, in nats.
        limit: of the suite, in nats.
    """
    above = sum(not divergence <= limit for divergence in divergences)
    return p_not_above(above, len(divergences), 0.5)
