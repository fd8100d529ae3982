"""Probes of a vLLM server: prompts scored token by token, and answers of given lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.harness.engines.base import ProbeRequest
from assay.harness.engines.generation import readable, scores
from assay.harness.engines.inside.control import FORCED_TOKENS
from assay.harness.engines.vllm.worker import SCORED, SCORES
from assay.harness.evidence.probes import ProbeReply, Scores

if TYPE_CHECKING:
    from assay.harness.engines.vllm.server import VLLMServer

_GENERATE = "/inference/v1/generate"
# What vLLM's JSON has for a log-probability that is not finite.
_NOT_FINITE = -9999.0


def probe(server: VLLMServer, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
    """Implement `Engine.probe`. vLLM has no request for several prompts, so they are sent side by side."""
    with ThreadPoolExecutor(len(requests)) as pool:
        replies = list(pool.map(lambda request: server.send(_GENERATE, _body(request)), requests))
    with readable(server, _GENERATE, "every prompt scored, and every token of its answer"):
        return [_reply(server, request, reply) for request, reply in zip(requests, replies, strict=True)]


def _body(request: ProbeRequest) -> dict[str, Any]:
    extra: dict[str, Any] = {FORCED_TOKENS: list(request.written)} if request.written else {}
    sampling = {
        "temperature": 0, "max_tokens": request.depth, "ignore_eos": True, "logprobs": request.top, "extra_args": extra,
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    if len(request.ids) > request.start + 1:
        sampling["prompt_logprobs"] = 0
        extra[SCORED] = [request.start, request.top, *request.at]
    return {"request_id": request.name, "token_ids": list(request.ids), "sampling_params": sampling}


def _reply(server: VLLMServer, request: ProbeRequest, reply: Mapping[str, Any]) -> ProbeReply:
    """Read a reply. Raises one of `MALFORMED` if a prompt or a token has no score."""
    choice, usage = reply["choices"][0], reply["usage"]
    entries = choice["logprobs"]["content"]
    if usage["prompt_tokens"] != len(request.ids) or len(entries) != request.depth:
        raise ValueError(f"{len(entries)} tokens after a prompt of {usage['prompt_tokens']}")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ProbeReply(
        probe=request.probe,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        foreign_tokens=max(0, cached - request.start),
        prefill=_prefill(server, request, str(reply["request_id"]), cached),
        decode=_decode(len(request.ids), entries),
        finish=str(choice["finish_reason"]),
    )


def _prefill(server: VLLMServer, request: ProbeRequest, name: str, cached: int) -> Scores:
    """Read the scores of a prompt, which the worker writes to a file in float32.

    They begin later if more tokens came from the cache than can be those of an earlier prompt.
    """
    if len(request.ids) <= max(request.start, cached) + 1:
        return Scores()
    written = server.launch.evidence / SCORES / f"{name}.npz"
    if not written.exists():
        raise ValueError("no scores were written by its worker")
    with np.load(written) as arrays:
        kept = {key: arrays[key].tolist() for key in arrays.files}
    written.unlink()
    first = max(request.start, cached)
    if kept["first"] != first or kept["ids"] != list(request.ids[first + 1 :]):
        raise ValueError(f"scores from position {kept['first']} on, of {len(kept['ids'])} tokens")
    tops = zip(kept["top_ids"], kept["top"], kept["at"], strict=True)
    rows = [zip((*request.at, *ids), map(_finite, (*at, *top)), strict=True) for ids, top, at in tops]
    return scores(first + 1, kept["ids"], [*map(_finite, kept["token"])], [*map(dict, rows)])


def _decode(first: int, entries: Sequence[Mapping[str, Any]]) -> Scores:
    # The sampled token comes first, and once more if it is among the most probable ones.
    rows = [
        {int(each["token_id"]): _finite(each["logprob"]) for each in (*entry["top_logprobs"], entry)}
        for entry in entries
    ]
    return scores(
        first, [entry["token_id"] for entry in entries], [_finite(entry["logprob"]) for entry in entries], rows
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or value <= _NOT_FINITE else value
