"""What vLLM is asked and how its replies are read, on a stand-in for its server; a real one is in the suites with servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from assay.harness.engines import generation
from assay.harness.engines.base import ProbeRequest
from assay.harness.engines.inside.control import FORCED_TOKENS
from assay.harness.engines.vllm.probing import probe
from assay.harness.engines.vllm.worker import SCORED, SCORES
from assay.harness.errors import EngineError


class Server:
    """Answers every request, writes the scores of prompts as its worker does, and keeps the bodies."""

    who, role, kind = "the candidate server (CPU_ATTN)", "candidate", "vllm"

    def __init__(self, folder: Path, lost: int = 0, cached: int = 1) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.launch, self._lost, self._cached = SimpleNamespace(evidence=folder), lost, cached
        (folder / SCORES).mkdir()

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == "/inference/v1/generate"
        self.bodies.append(body)
        name, ids, sampling = f"generate-tokens-{body['request_id']}", body["token_ids"], body["sampling_params"]
        if scored := sampling["extra_args"].get(SCORED):
            first = max(scored[0], self._cached)
            rest = np.array(ids[first + 1 :])
            tops = np.tile([[3, 4]], (len(rest), 1))
            kept = {
                "ids": rest,
                "token": -rest / 10,
                "top_ids": tops,
                "top": -tops / 4,
                "at": -np.tile([scored[2:]], (len(rest), 1)) / 2,
                "first": np.array(first),
            }
            if len(rest):
                np.savez(self.launch.evidence / SCORES / f"{name}.npz", **kept)
        written = sampling["extra_args"].get(FORCED_TOKENS) or [4] * sampling["max_tokens"]
        top = [{"token_id": 4, "logprob": -0.5}, {"token_id": 9, "logprob": -9999.0}]
        content = [{"token_id": id_, "logprob": -0.5 if id_ == 4 else -7.0, "top_logprobs": top} for id_ in written]
        usage = {"prompt_tokens": len(ids) - self._lost, "prompt_tokens_details": {"cached_tokens": self._cached}}
        choice = {"logprobs": {"content": content}, "finish_reason": "length"}
        return {"request_id": name, "choices": [choice], "usage": usage}


REQUESTS = [ProbeRequest("a", "x-a", (5, 6, 7, 8), 1, 2, (2, 4), at=(20, 4)), ProbeRequest("prefix", "x-p", (9, 9, 9), 2, 1)]


def test_replies_have_the_scores_of_the_prompt_and_of_what_was_written(tmp_path: Path) -> None:
    server: Any = Server(tmp_path)
    scored, prefix = probe(server, REQUESTS)
    assert (scored.prefill.first, scored.prefill.tokens, scored.prefill.own) == (2, (7, 8), (-0.7, -0.8))
    assert scored.prefill.ids == ((3, 4, 20), (3, 4, 20))
    assert scored.prefill.logprobs[0] == (-0.75, -1.0, -10.0)
    assert (scored.decode.first, scored.decode.tokens, scored.decode.own) == (4, (2, 4), (-7.0, -0.5))
    assert np.isnan(scored.decode.logprobs[0][-1]), "what is not finite is not lost"
    assert scored.decode.ids[0] == (4, 2, 9), "the forced token too, though it is not among the most probable ones"
    assert (scored.cached_tokens, scored.finish) == (1, "length")
    assert prefix.prefill.tokens == (), "no position is left"
    asked = {body["request_id"]: body["sampling_params"] for body in server.bodies}
    assert "prompt_logprobs" not in asked["x-p"]
    assert not list((tmp_path / SCORES).iterdir())


def test_another_prompt_than_the_one_that_was_sent_is_an_error(tmp_path: Path) -> None:
    server: Any = Server(tmp_path, lost=1)
    with pytest.raises(EngineError, match="every prompt scored"):
        probe(server, REQUESTS)


@pytest.mark.parametrize(("cached", "scored"), [(2, (8,)), (3, ())])
def test_scores_begin_after_what_the_cache_gave_though_no_earlier_prompt_had_it(
    tmp_path: Path, cached: int, scored: tuple[int, ...]
) -> None:
    server: Any = Server(tmp_path, cached=cached)
    (reply,) = probe(server, REQUESTS[:1])
    assert (reply.cached_tokens, reply.foreign_tokens, reply.prefill.tokens) == (cached, cached - 1, scored)
    server.probe = lambda requests: probe(server, requests)
    score = generation.score(server, (5, 6, 7, 8), 1, 2, at=(20, 4))
    assert np.isnan(score.token).tolist() == [True] * (2 - len(scored)) + [False] * len(scored)
    assert (score.top_ids.shape, score.top.shape, score.at.shape) == ((2, 2), (2, 2), (2, 2))


def test_scores_of_another_position_are_an_error(tmp_path: Path) -> None:
    server: Any = Server(tmp_path)
    send = server.send

    def later(path: str, body: Mapping[str, Any]) -> Any:
        reply = send(path, body)
        reply["usage"]["prompt_tokens_details"]["cached_tokens"] = 2  # and its scores begin after 1
        return reply

    server.send = later
    with pytest.raises(EngineError, match="scores from position 1 on"):
        probe(server, REQUESTS[:1])
