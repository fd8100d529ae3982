"""Lengths of answers when they are not forced. Timing forces them, so a candidate with longer answers shows only here."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.evidence.records import Item
from assay.harness.evidence.timings import AnswerLength

PROMPTS = 16
"""Prompts whose answers are measured."""


def ask_lengths(engine: Engine, items: Sequence[Item], limit: int, concurrency: int) -> list[AnswerLength]:
    """Send prompts to a server, without forcing the length of answers, and return how long they are.

    Args:
        engine: a running engine.
        items: the prompts.
        limit: token limit of an answer.
        concurrency: largest number of requests in flight.

    Raises:
        EngineError: the server failed.
    """
    replies: dict[int, Reply] = {}
    engine.flush_cache()
    engine.ask([ChatRequest(item.prompt, limit) for item in items], concurrency, replies.__setitem__)
    return [
        AnswerLength(
            role=engine.role, item=item.id, tokens=replies[i].completion_tokens, finish_reason=replies[i].finish_reason
        )
        for i, item in enumerate(items)
    ]
