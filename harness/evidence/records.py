"""One line of ``records.jsonl``: what one server answered to one item, appended as it happens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, Role] = ("reference", "candidate")
Suite = Literal["mmlu", "greedy", "layers"]


class Record(BaseModel):
    """Base of everything that is written to disk: unknown keys are an error, values do not change."""

    # Log-probabilities of a broken kernel may be NaN, and must come back as such.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        """Replace lone surrogates: a model's text may hold them, and no file can."""
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        return type(value)(map(cls._encodable, value)) if type(value) in (list, tuple) else value


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
