"""Probes of an SGLang server: prompts scored token by token, answers of given lengths, and commands that toggle features.

SGLang uses the prefix cache no further than ``logprob_start_len``, so a start of 0 would switch prefix hits off
(``_compute_max_prefix_len`` in ``srt/managers/schedule_batch.py``, the same in 0.5.17 and 0.5.23). The start is therefore also the
longest prefix that can come from the cache; ``meta_info.cached_tokens`` is the part that did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assay.harness.engines.base import ProbeRequest
from assay.harness.engines.generation import readable, scores
from assay.harness.engines.inside.control import FORCED_REQUEST
from assay.harness.engines.sglang import forcing
from assay.harness.engines.sglang.beside_model import ADAPTER_NAME, OTHER_ADAPTER
from assay.harness.evidence.probes import ProbeReply

if TYPE_CHECKING:
    from assay.harness.engines.sglang.server import SGLangServer

_PATH, _EXPECTED = "/generate", "every prompt scored, and every token of its answer"
_Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


def probe(server: SGLangServer, requests: Sequence[ProbeRequest], *, streamed: bool) -> list[ProbeReply]:
    """Implement `Engine.probe`. Without streaming, one message holds all requests."""
    forced = {each.name: (*each.ids, *each.written) for each in requests if each.name.startswith(FORCED_REQUEST)}
    if forced:
        forcing.tell(server.launch.evidence, forced)
    if streamed:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: _streamed(server, request), requests))
    replies = server.send(_PATH, _body(requests, server.adapter))
    if not all(request.scored for request in requests):
        return []
    with readable(server, _PATH, _EXPECTED):
        return [_reply(request, reply, 1) for request, reply in zip(requests, replies, strict=True)]


def _streamed(server: SGLangServer, request: ProbeRequest) -> ProbeReply:
    fields = {
        key: value[0] if isinstance(value, list) else value for key, value in _body([request], server.adapter).items()
    }
    events = server.client().events(_PATH, {**fields, "stream": True})
    with readable(server, _PATH, _EXPECTED):
        return _reply(request, events[-1], len(events))


def toggle(server: SGLangServer, features: Collection[str], probe: ProbeRequest) -> dict[str, str]:
    """Implement `Engine.toggle`: load the weights again, sleep and wake, and name an adapter of zeros."""
    server.adapter = ADAPTER_NAME if "zero-lora" in features else ""
    commands: dict[str, Callable[[SGLangServer], str]] = {
        "weights-again": _reload, "sleep-wake": _sleep, "zero-lora": lambda of: _apply_another(of, probe),
    }  # fmt: skip
    return {id_: command(server) for id_, command in commands.items() if id_ in features}


def _reload(server: SGLangServer) -> str:
    """Have a server reload its own weights; return its reply, or an empty string if it failed."""
    model = server.arguments().get("model_path")
    reply = server.send("/update_weights_from_disk", {"model_path": model, "flush_cache": True})
    return f"the server says: {reply.get('message') or 'loaded'}" if reply.get("success") else ""


def _sleep(server: SGLangServer) -> str:
    """Have a server release its memory and take it back, and return a sentence that says so."""
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        server.send(path, {})
    return "the server gave its memory back and took it again"


def _apply_another(server: SGLangServer, probe: ProbeRequest) -> str:
    """Have a server load a nonzero adapter and ask a probe with either; return how far apart they are, or an empty string."""
    zeros, path = server.adapter, (server.launch.evidence / OTHER_ADAPTER).resolve()
    server.send("/load_lora_adapter", {"lora_name": OTHER_ADAPTER, "lora_path": str(path)})
    scored = []
    for name in (zeros, OTHER_ADAPTER):
        server.adapter = name
        server.flush_cache()
        (reply,) = server.probe([replace(probe, name=f"{probe.name}-{name}")])
        scored.append(reply.prefill.own)
    server.adapter = zeros
    server.send("/unload_lora_adapter", {"lora_name": OTHER_ADAPTER})
    apart = max(abs(first - second) for first, second in zip(*scored, strict=True))
    said = f"in this server, a nonzero adapter moves a log-probability by {apart:.2g} nats"
    return said if apart else ""


def _body(requests: Sequence[ProbeRequest], adapter: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": [request.name for request in requests],
        "input_ids": [list(request.ids) for request in requests],
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": request.depth, "ignore_eos": True} for request in requests
        ],
    }
    if adapter:
        body["lora_path"] = [adapter] * len(requests)
    if all(request.scored for request in requests):  # SGLang mixes chunks of prompts with decode only without scores
        most = max(request.top for request in requests)
        starts = [request.start for request in requests]
        body |= {"logprob_start_len": starts, "return_logprob": True, "top_logprobs_num": most}
    if any(request.at for request in requests):
        body["token_ids_logprob"] = [list(request.at) for request in requests]
    return body


def _reply(request: ProbeRequest, reply: Mapping[str, Any], pieces: int) -> ProbeReply:
    """Read a reply. Raises one of `MALFORMED` if a prompt or a token has no score."""
    ids, meta, scored = reply["output_ids"], reply["meta_info"], request.ids[request.start + 1 :]
    given, own, top = (meta[f"{name}_logprobs"] for name in ("input_token", "output_token", "output_top"))
    # The first entry is the first computed token, which no position predicts. SGLang returns 0 for ids at the end of the
    # vocabulary, its guard against image placeholders.
    same = len(given) == len(scored) + 1 and all(
        entry[1] in (id_, 0) for entry, id_ in zip(given[1:], scored, strict=True)
    )
    if meta["prompt_tokens"] != len(request.ids) or not same:
        raise ValueError(
            f"log-probabilities of {len(given)} tokens of a prompt of {meta['prompt_tokens']}, "
            f"not of the last {len(scored) + 1} of the {len(request.ids)} tokens that were sent"
        )
    best = (meta.get("input_top_logprobs") or [])[1:]
    if request.at:
        best = [
            [*listed, *asked, *listed] for listed, asked in zip(best, meta["input_token_ids_logprobs"][1:], strict=True)
        ]
    written = [_of(token, entry, row) for token, entry, row in zip(ids, own, top, strict=True)]
    return ProbeReply(
        probe=request.probe,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta.get("cached_tokens", 0),
        host_tokens=int((meta.get("cached_tokens_details") or {}).get("host") or 0),
        prefill=scores(request.start + 1, scored, [entry[0] for entry in given[1:]], _by_id(best)),
        decode=scores(len(request.ids), ids, written, _by_id(top)),
        finish=str((meta.get("finish_reason") or {}).get("type", "")),
        retractions=meta.get("num_retractions", 0),
        verifications=meta.get("spec_verify_ct", 0),
        pieces=pieces,
    )


def _by_id(rows: Sequence[Sequence[_Entry] | None]) -> list[dict[int, float | None]]:
    return [{id_: logprob for logprob, id_, _ in row or ()} for row in rows]


def _of(token: int, sampled: _Entry, top: Sequence[_Entry] | None) -> float | None:
    """Return the log-probability of a written token: the sampled one's or, if another was forced, the one among the top."""
    return sampled[0] if sampled[1] == token else next((logprob for logprob, id_, _ in top or () if id_ == token), None)
