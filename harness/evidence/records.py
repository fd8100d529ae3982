"""One line of ``records.jsonl``: what one server answered to one item, appended as it happens."""

from __future__ import annotations

from typing import Literal

from assay.harness.schema import Record

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, Role] = ("reference", "candidate")
Suite = Literal["mmlu", "greedy", "layers"]


class Token(Record):
    """A generated token: its text, its log-probability, and the best alternatives at its position (best first)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Item(Record):
    """What was asked: one line of ``items.jsonl``, written once for both roles."""

    suite: Suite
    id: str
    prompt: str
    prompt_hash: str
    group: str = ""
    subject: str = ""
    expected: str | None = None


class Answer(Record):
    """What one server answered to one item.

    Attributes:
        repeat: 0 is the comparison itself; 1 and above are the reference asked again, for the run-to-run floor.
        parsed: the letter found in `text`, None where there was none (multiple choice only).
        finish_reason: "stop", or "length" where the answer ran to the token limit.
        cached_tokens: prompt tokens served from the prefix cache, by the server's own account; None if it gives none.
        batch_size: sequences in the prefill batch that admitted the request; None where it was not observed.
        latency_s: seconds from sending the request to its whole answer, as the client saw it.
        tokens: generated tokens with log-probabilities (greedy comparison only).
    """

    suite: Suite
    role: Role
    item: str
    repeat: int = 0
    prompt_hash: str
    request_id: str = ""
    text: str
    parsed: str | None = None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    batch_size: int | None = None
    latency_s: float
    tokens: tuple[Token, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What an answer is to: (suite, role, item, repeat)."""
        return (self.suite, self.role, self.item, self.repeat)
