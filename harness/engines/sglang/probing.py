"""Probes: a prompt scored token by token and an answer of a given length, in one request to SGLang's ``/generate``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from assay.harness.engines.client import number
from assay.harness.engines.generation import readable
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.probes import ProbeReply, Scores

# Most probable tokens to return at each position.
_TOP = 8
_PATH, _EXPECTED = "/generate", "every prompt scored, and every token of its answer"
_Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


@dataclass(frozen=True)
class ProbeRequest:
    """One request.

    Attributes:
        probe: id of the probe.
        rid: its id in the server.
        ids: tokens of the prompt.
        start: the tokens after the first ``start + 1`` are scored; at most ``start`` tokens come from the cache.
        depth: tokens to generate, whether or not they include the end-of-text token.
    """

    probe: str
    rid: str
    ids: tuple[int, ...]
    start: int
    depth: int


def ask_together(server: SGLangServer, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
    """Send requests at once, in one message, and return the replies in their order.

    Raises:
        EngineError: the server failed, or did not answer all of them.
    """
    replies = server.send(_PATH, _body(requests, server.adapter))
    with readable(server, _PATH, _EXPECTED):
        return [_reply(request, reply, 1) for request, reply in zip(requests, replies, strict=True)]


def leave_in_cache(server: SGLangServer, requests: Sequence[ProbeRequest]) -> None:
    """Send requests at once, without log-probabilities, so that their K and V stay in the cache.

    SGLang mixes chunks of prompts with decode only if no request asks for log-probabilities.

    Raises:
        EngineError: the server failed.
    """
    scores = ("logprob_start_len", "return_logprob", "top_logprobs_num")
    server.send(_PATH, {name: value for name, value in _body(requests, server.adapter).items() if name not in scores})


def ask_streamed(server: SGLangServer, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
    """Send requests at once, which are answered in pieces, and return the replies in their order.

    Raises:
        EngineError: as `ask_together`.
    """

    def single(request: ProbeRequest) -> ProbeReply:
        body = _body([request], server.adapter)
        fields = {key: value[0] for key, value in body.items() if isinstance(value, list)}
        events = server.client().events(
            _PATH, {**fields, "return_logprob": True, "top_logprobs_num": _TOP, "stream": True}
        )
        with readable(server, _PATH, _EXPECTED):
            return _reply(request, events[-1], len(events))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(single, requests))


def _body(requests: Sequence[ProbeRequest], adapter: str) -> dict[str, Any]:
    named = {"lora_path": [adapter] * len(requests)} if adapter else {}
    return {
        **named,
        "rid": [request.rid for request in requests],
        "input_ids": [list(request.ids) for request in requests],
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": request.depth, "ignore_eos": True} for request in requests
        ],
        "logprob_start_len": [request.start for request in requests],
        "return_logprob": True,
        "top_logprobs_num": _TOP,
    }


def _reply(request: ProbeRequest, reply: Mapping[str, Any], pieces: int) -> ProbeReply:
    """Read a reply. Raises one of `MALFORMED` if a prompt or a token has no score."""
    ids, meta, scored = reply["output_ids"], reply["meta_info"], request.ids[request.start + 1 :]
    given, own, top = (meta[f"{name}_logprobs"] for name in ("input_token", "output_token", "output_top"))
    if meta["prompt_tokens"] != len(request.ids) or len(given) != len(scored) + 1:
        raise ValueError(f"{len(given) - 1} scored tokens of a prompt of {meta['prompt_tokens']}")
    written = [_of(token, entry, row) for token, entry, row in zip(ids, own, top, strict=True)]
    return ProbeReply(
        probe=request.probe,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta.get("cached_tokens", 0),
        host_tokens=int((meta.get("cached_tokens_details") or {}).get("host") or 0),
        # The first entry is the first computed token, which no position predicts.
        prefill=_scores(
            request.start + 1, scored, [entry[0] for entry in given[1:]], (meta.get("input_top_logprobs") or [])[1:]
        ),
        decode=_scores(len(request.ids), ids, written, top),
        finish=str((meta.get("finish_reason") or {}).get("type", "")),
        retractions=meta.get("num_retractions", 0),
        verifications=meta.get("spec_verify_ct", 0),
        pieces=pieces,
    )


def _of(token: int, sampled: _Entry, top: Sequence[_Entry] | None) -> float | None:
    """Return the log-probability of a written token: the sampled one's or, if another was forced, the one among the top."""
    return sampled[0] if sampled[1] == token else next((logprob for logprob, id_, _ in top or () if id_ == token), None)


def _scores(
    first: int, tokens: Sequence[int], own: Sequence[float | None], top: Sequence[list[_Entry] | None]
) -> Scores:
    ranked = [sorted(row or (), key=lambda entry: math.inf if entry[0] is None else -entry[0]) for row in top]
    return Scores(
        first=first,
        tokens=tuple(tokens),
        own=tuple(round(number(logprob), 7) for logprob in own),
        ids=tuple(tuple(id_ for _, id_, _ in row) for row in ranked),
        logprobs=tuple(tuple(round(number(logprob), 7) for logprob, _, _ in row) for row in ranked),
    )
