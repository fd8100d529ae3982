"""Reading SGLang's scoring interface, from replies as SGLang 0.5.23 sends them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from assay.harness.engines.base import ProbeReply, ProbeRequest
from assay.harness.engines.generation import generate, score
from assay.harness.engines.sglang import probing
from assay.harness.errors import EngineError

IDS = (0, 2, 45, 46, 13, 916)
META: dict[str, Any] = {
    "id": "a07df3b52b6b",
    "finish_reason": {"type": "length", "length": 1},
    "prompt_tokens": 6,
    "cached_tokens": 3,
    "input_token_logprobs": [[None, 46, None], [-0.5, 13, None], [None, 916, None]],
    "input_top_logprobs": [None, [[-0.5, 13, None], [-2.0, 40, None]], [[None, 7, None], [None, 8, None]]],
    "input_token_ids_logprobs": [
        None,
        [[-0.5, 13, None], [-9.0, 5, None], [-3.5, 1030, None]],
        [[None, id_, None] for id_ in (13, 5, 1030)],
    ],
    "output_token_logprobs": [[-1.7e-06, 1, None]],
    "output_top_logprobs": [[[-1.7e-06, 1, None]]],
}
CHAT: dict[str, Any] = {
    "id": "3f",
    "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    "choices": [
        {
            "message": {"role": "assistant", "content": " A"},
            "logprobs": {"content": [{"token": " A", "logprob": 0.0}, {"token": "<|end|>", "logprob": 0.0}]},
            "finish_reason": "stop",
            "prompt_token_ids": [0, 1, 296, 2],
            "response_token_ids": [324, 3],
        }
    ],
}


class Canned:
    """Returns one prepared reply."""

    who, kind, adapter = "the reference server (triton)", "sglang", ""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.sent: list[tuple[str, Mapping[str, Any]]] = []

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        self.sent.append((path, body))
        return self.reply

    def probe(self, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
        return probing.probe(self, requests, streamed=False)  # type: ignore[arg-type]

    def flush_cache(self) -> None:
        raise AssertionError("scoring must leave the cache alone")


def meta(**changes: Any) -> list[dict[str, Any]]:
    return [{"text": "", "output_ids": [1], "meta_info": {**META, **changes}}]


def test_positions_ids_and_null() -> None:
    server = Canned(meta())
    got = score(server, IDS, start=3, top_k=2, at=(13, 5, 1030))
    assert got.cached_tokens == 3
    assert got.token.dtype == np.float32
    assert got.token[0] == -0.5
    assert math.isnan(got.token[1])
    assert got.top_ids.tolist() == [[13, 40], [7, 8]]
    assert got.top[0].tolist() == [-0.5, -2.0]
    assert np.isnan(got.top[1]).all()
    assert got.at.shape == (2, 3)
    assert got.at[0].tolist() == [-0.5, -9.0, -3.5]
    assert np.isnan(got.at[1]).all()
    sent = {
        "input_ids": [list(IDS)], "sampling_params": [{"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}],
        "return_logprob": True, "logprob_start_len": [3], "top_logprobs_num": 2, "token_ids_logprob": [[13, 5, 1030]],
    }  # fmt: skip
    ((path, body),) = server.sent
    assert (path, {name: value for name, value in body.items() if name != "rid"}) == ("/generate", sent)
    assert score(Canned(meta(input_token_ids_logprobs=None)), IDS, start=3, top_k=2).at.shape == (2, 0)


def test_an_id_at_the_end_of_the_vocabulary_is_returned_as_zero() -> None:
    hidden = [[None, 46, None], [-0.5, 13, None], [-1.0, 0, None]]
    assert score(Canned(meta(input_token_logprobs=hidden)), IDS, start=3, top_k=2).token[1] == -1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": 7}, "of a prompt of 7"),
        ({"input_token_logprobs": [[None, 46, None], [-0.5, 14, None], [-0.1, 916, None]]}, "the last 3 of the 6 tokens"),
        ({"input_token_logprobs": [[None, 13, None], [-0.1, 916, None]]}, "log-probabilities of 2 tokens"),
        ({"input_top_logprobs": [None, [[-0.5, 13, None]], [[-0.5, 7, None]]], "input_token_ids_logprobs": [None, [], []]}, "rows"),
        ({"input_top_logprobs": [None, None, None]}, "TypeError"),
        ({"input_token_ids_logprobs": None}, "TypeError"),
        ({"input_top_logprobs": 5}, "TypeError"),
    ],
)
def test_a_wrong_reply_is_an_engine_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=r"the reference server \(triton\) answered ") as caught:
        score(Canned(meta(**changes)), IDS, start=3, top_k=2, at=(13, 5, 1030))
    assert said in str(caught.value)


@pytest.mark.parametrize("start", [-1, 5, 9])
def test_a_prefix_that_leaves_nothing_to_score_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match="nothing to score"):
        score(Canned(meta()), IDS, start, top_k=2)


@pytest.mark.parametrize("name", ["response_token_ids", "token_ids"])  # the latter in 0.5.17
def test_a_generation_has_the_ids_that_the_server_returns(name: str) -> None:
    choice = dict(CHAT["choices"][0])
    server = Canned({**CHAT, "choices": [{name: choice.pop("response_token_ids"), **choice}]})
    got = generate(server, "Who?", 8)
    assert (got.prompt_ids, got.ids, got.texts) == ((0, 1, 296, 2), (324, 3), (" A", "<|end|>"))
    path, sent = server.sent[0]
    assert path == "/v1/chat/completions"
    assert (sent["return_token_ids"], sent["temperature"], sent["max_tokens"]) == (True, 0, 8)


def test_a_server_without_token_ids_is_named() -> None:
    choice = {key: value for key, value in CHAT["choices"][0].items() if key != "response_token_ids"}
    with pytest.raises(EngineError, match=r"KeyError: 'token_ids'"):
        generate(Canned({**CHAT, "choices": [choice]}), "Who?", 8)
    with pytest.raises(EngineError, match=r"1 token ids and 2 texts"):
        generate(Canned({**CHAT, "choices": [{**choice, "response_token_ids": [3]}]}), "Who?", 8)
