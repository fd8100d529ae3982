"""``timings.jsonl``: when each token of each request of a bench came, appended block by block."""

from __future__ import annotations

from assay.harness.evidence.records import Role
from assay.harness.schema import Record


class Timing(Record):
    """One timed request.

    Attributes:
        role: server that was asked.
        again: whether it is of the role's second block of the round; the reference's two give the floor.
        round: number of the round; each round plays every cell once.
        block: number of the block in the order of playing.
        shape: name of the load's shape.
        concurrency: most requests in flight.
        index: number of the request in its block.
        sent_s: when it was sent, in seconds of the client's clock.
        latency_s: seconds from sending to the end of the answer.
        chunk_s: seconds from sending to each chunk that carried a token; the first is the time to first token.
        chunk_tokens: tokens of the answer up to and with each chunk.
        prompt_tokens: tokens of the prompt, by the server's account.
        completion_tokens: tokens of the answer, by the server's account.
        cached_tokens: prompt tokens from the prefix cache; None where the server does not say.
    """

    role: Role
    again: bool = False
    round: int
    block: int
    shape: str
    concurrency: int
    index: int
    sent_s: float
    latency_s: float
    chunk_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class AnswerLength(Record):
    """How long a role's answer to a prompt is if it may end when it likes (``lengths.jsonl``).

    Attributes:
        item: the prompt's id.
        tokens: tokens of the answer.
        finish_reason: "stop", or "length" where it ran to the limit.
    """

    role: Role
    item: str
    tokens: int
    finish_reason: str
