"""Teacher forcing: a running vLLM server's log-probabilities of given tokens, cold and on a cached prefix.

``/inference/v1/generate`` takes token ids, and with ``skip_reading_prefix_cache`` off it scores after a cached prefix: whole
blocks, never the last token. The worker writes the scores to a file in float32 (`assay.harness.engines.vllm.worker`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from assay.harness.engines.base import ChatRequest, Engine, Floats, Score
from assay.harness.engines.client import number
from assay.harness.engines.generation import readable
from assay.harness.engines.vllm.worker import SCORED, SCORES
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.sides import Role

_GENERATE = "/inference/v1/generate"


def generate_all(
    server: Engine,
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    top_logprobs: int,
) -> list[Answer]:
    """Implement `Engine.generate_all`; vLLM has no request for several prompts, so they are sent side by side."""

    def ask(ids: Sequence[int], most: int) -> Any:
        sampling = {"temperature": 0, "max_tokens": most, "ignore_eos": True, "logprobs": top_logprobs}
        return server.send(_GENERATE, {"token_ids": list(ids), "sampling_params": sampling})

    begun = time.monotonic()
    with ThreadPoolExecutor(max(len(prompts), 1)) as pool:
        replies = list(pool.map(ask, prompts, tokens))
    seconds = time.monotonic() - begun
    with readable(server, _GENERATE, "an answer to each prompt, with log-probabilities"):
        made = [_answer(reply, item, server.role, seconds) for item, reply in zip(items, replies, strict=True)]
        if [answer.prompt_tokens for answer in made] != [len(ids) for ids in prompts]:
            raise ValueError("other prompts than those that were sent")
        return made


def _answer(reply: Mapping[str, Any], item: Item, role: Role, seconds: float) -> Answer:
    """Return the generated tokens as the answer to an item, whose text is token ids."""
    choice, usage = reply["choices"][0], reply["usage"]
    tokens = tuple(
        Token(
            text=str(entry["token_id"]),
            logprob=number(entry["logprob"]),
            top=tuple((str(other["token_id"]), number(other["logprob"])) for other in entry["top_logprobs"]),
        )
        for entry in choice["logprobs"]["content"]
    )
    return ChatRequest.of(item, usage["completion_tokens"]).answered(
        role,
        " ".join(token.text for token in tokens),
        request_id=reply["request_id"],
        finish_reason="length",
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        latency_s=seconds,
        tokens=tokens,
    )


def score(
    server: Engine, folder: Path, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = (), *, cached: bool
) -> Score:
    """Implement `Engine.score`.

    vLLM takes from its cache all whole blocks that match, however long the prefix. So that the tokens after the first
    ``start + 1`` are computed here, each request has a salt, under which nothing is cached, or the prefix alone.

    Args:
        folder: the server's folder.
        cached: whether to send the prefix first.
    """
    positions = len(ids) - start - 1
    if start < 0 or positions < 1:
        raise ValueError(f"{len(ids)} tokens leave nothing to score after a prefix of {start} and the next token")
    name = f"assay-score-{secrets.token_hex(6)}"
    sampling = {
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "skip_reading_prefix_cache": False,
        "extra_args": {SCORED: [start, top_k, *at]},
    }
    if cached and start:
        before = {"token_ids": list(ids[:start]), "sampling_params": {"temperature": 0, "max_tokens": 1}}
        server.send(_GENERATE, {**before, "cache_salt": name})
    body = {"request_id": name, "token_ids": list(ids), "sampling_params": sampling, "cache_salt": name}
    reply = server.send(_GENERATE, body)
    with readable(server, _GENERATE, "log-probabilities of the prompt"):
        hits = int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        written = folder / SCORES / f"{reply['request_id']}.npz"
        if not written.exists():
            raise ValueError("no scores were written by its worker")
        with np.load(written) as arrays:
            kept = {key: arrays[key] for key in arrays.files}
        written.unlink()
        if int(kept["first"]) != start or kept["ids"].tolist() != list(ids[start + 1 :]):
            raise ValueError(f"scores from position {int(kept['first'])} on, of {len(kept['ids'])} tokens")
        return Score(
            cached_tokens=hits,
            token=_floats(kept["token"]),
            top_ids=kept["top_ids"].astype(np.int32),
            top=_floats(kept["top"]),
            at=_floats(kept["at"]).reshape(positions, len(at)),
        )


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float32)
