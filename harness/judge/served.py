"""The served envelope: with which lengths the candidate's own server answered, where its texts are compared with the reference's.

The reference answers the requests of the envelope while the candidate runs in its shadow; the candidate's own server answers them
as it serves: with the KV cache that its own calls wrote, and in CUDA graphs where it has them. Which lengths its calls had is read
from the prefill batches that it admitted, and from the tokens of its answers up to the first that differs: what follows has another
history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, EnvelopeCounts
from assay.harness.evidence.envelope_counting import EnvelopeCounting
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import Pair, pair
from assay.harness.judge.greedy_texts import first_divergence

_ANY_LAYER = 0
"""A request passes through all layers, so one stands for them."""


def envelope_pairs(answers: Sequence[Answer]) -> Sequence[Pair]:
    """Return both roles' answers to the requests of the envelope.

    Raises:
        EvidenceError: a role answered a request twice.
    """
    asked = {answer.item: answer for answer in answers if answer.suite == "envelope"}
    items = [Item(suite="envelope", id=id_, prompt=id_, prompt_hash=a.prompt_hash) for id_, a in asked.items()]
    return pair(items, answers, "envelope").pairs


def served_envelope(
    limits: EngineLimits, pairs: Sequence[Pair], admissions: Iterable[Admission]
) -> EnvelopeCounts | None:
    """Count the passes of the candidate's own server by condition, as of one layer; None where no answer is compared.

    The batches of decode are not known.

    Args:
        limits: the engine's limits.
        pairs: answers of both roles with the log-probabilities of their tokens.
        admissions: the prefill batches of the candidate's server, in order.
    """
    if not pairs:
        return None
    counting = EnvelopeCounting(limits)
    _count_extend(counting, {both.candidate.request_id for both in pairs}, admissions)
    for both in pairs:
        for step in range(_compared_tokens(both) - 1):
            length = both.candidate.prompt_tokens + step
            counting.count("decode", _ANY_LAYER, counting.decode([length], [both.candidate.request_id]))
    return counting.counts("")


def _count_extend(counting: EnvelopeCounting, compared: Collection[str], admissions: Iterable[Admission]) -> None:
    """Count the prefill batches of the requests whose answers are compared."""
    seen = set()
    for batch in admissions:
        passed = (batch.rids, batch.new, batch.prefix)
        rows = [row for row, rid in enumerate(batch.rids) if rid in compared]
        if not rows or passed in seen:  # processes that share the heads of a layer admit the same batches
            continue
        seen.add(passed)
        new, prefix = ([lengths[row] for row in rows] for lengths in (batch.new, batch.prefix))
        counting.count("extend", _ANY_LAYER, counting.extend(new, prefix, [batch.rids[row] for row in rows]))


def _compared_tokens(both: Pair) -> int:
    """Count the tokens of the candidate's answer whose history is that of the reference's, the first differing one included."""
    tokens = both.candidate.tokens
    parting = first_divergence(both.reference.tokens, tokens)
    return len(tokens) if parting is None else min(parting + 1, len(tokens))
