"""What an endpoint sends: the answers of OpenAI's interface, whole and streamed, and those of them with token ids."""

from __future__ import annotations

import math
from typing import Generic, NotRequired, TypeVar

from pydantic import AliasPath, BaseModel, Field, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from assay.harness.engines.base import ChatRequest, Reply
from assay.harness.evidence.records import Token

_MOST_TOKENS = 1 << 32
"""No request has so many: a server that reports so many counts something else."""


class _Alternative(TypedDict):  # hundreds in a reply: models would take three times as long
    token: str
    logprob: float | None


class Position(_Alternative):
    """A token of an answer, with its log-probability and those of the alternatives."""

    top_logprobs: NotRequired[list[_Alternative]]


class ChatChoice(BaseModel):
    """A whole answer."""

    text: str = Field(validation_alias=AliasPath("message", "content"))
    finish_reason: str
    matched_stop: int | str | None = None
    logprobs: list[Position] | None = Field(None, validation_alias=AliasPath("logprobs", "content"))


class _Usage(BaseModel):
    """Token counts that a server reports with an answer."""

    prompt_tokens: int = Field(ge=0, lt=_MOST_TOKENS)
    completion_tokens: int = Field(ge=0, lt=_MOST_TOKENS)
    cached_tokens: int | None = Field(
        None,
        ge=0,
        lt=_MOST_TOKENS,
        validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"),
        description="prompt tokens that came from the prefix cache; None if the server does not report them",
    )


AnyChoice = TypeVar("AnyChoice", bound=ChatChoice)


class Completion(BaseModel, Generic[AnyChoice]):
    """A chat completion."""

    id: str
    choices: list[AnyChoice] = Field(min_length=1)
    usage: _Usage


class _Piece(BaseModel):
    text: str
    finish_reason: str | None = None


class Chunk(BaseModel):
    """A piece of a streamed completion."""

    id: str
    choices: list[_Piece]
    usage: _Usage | None = None


class BadReply(ValueError):
    """A body that is not a valid completion; the message states what is wrong with it."""


def read_reply(body: str, ask: ChatRequest, latency_s: float) -> Reply:
    """Parse the body of a chat completion.

    A log-probability of null, which is how SGLang writes NaN, becomes NaN: that is a finding about the candidate, not an
    engine failure.

    Raises:
        BadReply: the body is not JSON, or lacks a field of a chat completion, or the log-probabilities that ``ask`` requests.
    """
    try:
        completion = Completion[ChatChoice].model_validate_json(body)
    except ValidationError as error:
        raise BadReply(problem(error)) from None
    choice, usage = completion.choices[0], completion.usage
    if ask.top_logprobs and choice.logprobs is None:
        raise BadReply("log-probabilities were requested, and there are none")
    return Reply(
        request_id=completion.id,
        text=choice.text,
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        latency_s=latency_s,
        tokens=tuple(map(_token, choice.logprobs or ())),
        stopped_at="" if choice.matched_stop is None else str(choice.matched_stop),
    )


def _token(position: Position) -> Token:
    top = [(other["token"], number(other["logprob"])) for other in position.get("top_logprobs", ())]
    top.sort(key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1], reverse=True)
    # Validated already. Validating again would take longer than parsing the reply.
    return Token.model_construct(text=position["token"], logprob=number(position["logprob"]), top=tuple(top))


def number(value: float | None) -> float:
    """Return a number of an answer; NaN for null, which SGLang writes for every number that is not finite."""
    return math.nan if value is None else value


def problem(error: ValidationError) -> str:
    """Describe what is wrong with an answer: the field, and what it should be."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
