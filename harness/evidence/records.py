"""Items and answers, which are the lines of ``items.jsonl`` and ``records.jsonl``. Answers are appended as they arrive."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from assay.harness.evidence.run_file import RunRecord
from assay.harness.schema import Record
from assay.harness.sides import Role

Suite = Literal["accuracy", "greedy", "logits", "layers", "envelope"]
FLOOR_REPEAT = 1
"""`Answer.repeat` of the reference's second answers, which give its run-to-run floor. 0 is the comparison itself."""


class Token(Record):
    """A generated token: its text, its log-probability, and the most probable tokens at its position, best first."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Item(Record):
    """One question or prompt: one line of ``items.jsonl``, the same for both roles.

    Attributes:
        unit: unit of sampling, shared by all questions about one passage, or empty for a question drawn alone.
        cold: whether it is asked with an empty cache.
    """

    suite: Suite
    id: str
    prompt: str
    prompt_hash: str
    group: str = ""
    subject: str = ""
    expected: str | None = None
    unit: str = ""
    cold: bool = False

    def is_right(self, parsed: str | None) -> bool:
        """Return True if an answer was parsed and matches the expected one."""
        return parsed is not None and parsed == self.expected


class Answer(RunRecord):
    """One server's answer to an item.

    Attributes:
        repeat: 0 for the comparison itself; 1 and above for the reference asked again, for the run-to-run floor.
        parsed: the letter in `text` (multiple choice only), or None if there is no letter.
        finish_reason: "stop", "length" if the answer reached the token limit, or another if it was ended, such as "abort".
        stopped_at: id of the token, or the string, at which it stopped, or empty if the server does not report it.
        cached_tokens: prompt tokens from the prefix cache, or None if the server does not report them.
        batch_size: sequences in the prefill batch that admitted the request, or None if not observed.
        latency_s: seconds from sending the request to its complete answer, at the client.
        tokens: generated tokens with log-probabilities (greedy texts, and the requests of the envelope, whose texts are token ids).
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
    stopped_at: str = ""
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt | None = None
    batch_size: int | None = None
    latency_s: float
    tokens: tuple[Token, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Identity of the answer: (suite, role, item, repeat)."""
        return (self.suite, self.role, self.item, self.repeat)
