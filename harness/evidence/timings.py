"""``timings.jsonl``: when each token of each request of a bench arrived, appended block by block."""

from __future__ import annotations

from assay.harness.evidence.nonce import RunRecord
from assay.harness.sides import Role


class Timing(RunRecord):
    """One timed request.

    Attributes:
        role: role of the server.
        again: whether it belongs to the role's second block of the round. The reference's two blocks give the floor.
        round: number of the round. Each round plays every load once.
        block: number of the block, in playing order.
        shape: name of the load's shape.
        concurrency: largest number of requests in flight.
        index: number of the request in its block.
        sent_s: time of sending, in seconds of the client's clock.
        latency_s: seconds from sending to the end of the answer.
        chunk_s: seconds from sending to each chunk with a token. The first is the time to first token.
        chunk_tokens: tokens of the answer up to and including each chunk.
        prompt_tokens: tokens of the prompt, as the server reports.
        completion_tokens: tokens of the answer, as the server reports.
        cached_tokens: prompt tokens from the prefix cache; None if the server does not report them.
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


class AnswerLength(RunRecord):
    """Length of a role's answer to a prompt when it is not forced (``lengths.jsonl``).

    Attributes:
        item: the prompt's id.
        tokens: tokens of the answer.
        finish_reason: "stop", or "length" if it reached the limit.
    """

    role: Role
    item: str
    tokens: int
    finish_reason: str
