"""Teacher forcing: a running SGLang server's log-probabilities of given tokens.

SGLang's ``/generate`` scores a prompt that is given as token ids. It uses the prefix cache no further than
``logprob_start_len``, so a start of 0 would switch prefix hits off (``_compute_max_prefix_len`` in
``srt/managers/schedule_batch.py``, the same in 0.5.17 and 0.5.23). The start is therefore also the longest prefix that can
come from the cache; ``meta_info.cached_tokens`` is the part that did.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.harness.engines.base import ChatRequest, Engine, Floats, Score
from assay.harness.engines.client import number
from assay.harness.engines.generation import readable
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.sides import Role


def generate_all(
    server: Engine,
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    top_logprobs: int,
) -> list[Answer]:
    """Implement `Engine.generate_all`."""
    path = "/generate"
    sampling = [{"temperature": 0, "max_new_tokens": most, "ignore_eos": True} for most in tokens]
    body = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": top_logprobs,
    }
    begun = time.monotonic()
    replies = server.send(path, body)
    seconds = time.monotonic() - begun
    with readable(server, path, "an answer to each prompt, with log-probabilities"):
        made = [
            _answer(reply["meta_info"], item, server.role, seconds) for item, reply in zip(items, replies, strict=True)
        ]
        if [answer.prompt_tokens for answer in made] != [len(ids) for ids in prompts]:
            raise ValueError("other prompts than those that were sent")
        return made


def _answer(meta: Mapping[str, Any], item: Item, role: Role, seconds: float) -> Answer:
    """Return the generated tokens as the answer to an item, whose text is token ids."""
    tokens = tuple(
        Token(text=str(id_), logprob=number(logprob), top=tuple((str(other), number(p)) for p, other, _ in top or ()))
        for (logprob, id_, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    )
    return ChatRequest.of(item, meta["completion_tokens"]).answered(
        role,
        " ".join(token.text for token in tokens),
        request_id=meta["id"],
        finish_reason="length",
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        cached_tokens=meta.get("cached_tokens", 0),
        latency_s=seconds,
        tokens=tokens,
    )


def score(server: Engine, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
    """Implement `Engine.score`."""
    positions = len(ids) - start - 1
    if start < 0 or positions < 1:
        raise ValueError(f"{len(ids)} tokens leave nothing to score after a prefix of {start} and the next token")
    path = "/generate"
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": top_k,
        "token_ids_logprob": list(at) or None,
    }
    reply = server.send(path, body)
    with readable(server, path, "log-probabilities of the prompt"):
        meta = reply["meta_info"]
        entries = meta["input_token_logprobs"]
        # SGLang returns 0 for ids at the end of the vocabulary, its guard against image placeholders.
        same = len(entries) == positions + 1 and all(
            entry[1] in (id_, 0) for entry, id_ in zip(entries, ids[start:], strict=False)
        )
        if meta["prompt_tokens"] != len(ids) or not same:
            raise ValueError(
                f"log-probabilities of {len(entries)} tokens of a prompt of {meta['prompt_tokens']}, "
                f"not of the last {positions + 1} of the {len(ids)} tokens that were sent"
            )
        # The first entry is the first computed token, which no position predicts.
        top = meta["input_top_logprobs"][1:]
        asked = (meta["input_token_ids_logprobs"] or [None])[1:] if at else [[]] * positions
        for rows, width in ((top, top_k), (asked, len(at))):
            if len(rows) != positions or any(row is None or len(row) != width for row in rows):
                raise ValueError(f"{len(rows)} rows, expected {positions} rows of {width} log-probabilities")
        return Score(
            cached_tokens=meta.get("cached_tokens", 0),
            token=_values([entries[1:]])[0],
            top_ids=np.array([[entry[1] for entry in row] for row in top], dtype=np.int32),
            top=_values(top),
            at=_values(asked),
        )


def _values(rows: Sequence[Sequence[Sequence[Any]]]) -> Floats:
    """Convert to an array, NaN for null: SGLang's JSON has null for every number that is not finite."""
    numbers = [[number(entry[0]) for entry in row] for row in rows]
    return np.array(numbers, dtype=np.float32).reshape(len(rows), -1)
