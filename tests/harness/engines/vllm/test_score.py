"""What vLLM is asked to compute, on a stand-in for its server; a real one scores in the suites with servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from assay.harness.engines.base import TracedPrompt
from assay.harness.engines.vllm.score import prefill
from assay.harness.errors import EngineError


class Server:
    """Answers every request with the number of its tokens, and keeps the bodies."""

    who, role, kind = "the candidate server (CPU_ATTN)", "candidate", "vllm"

    def __init__(self, lost: int = 0) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self._lost = lost

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == "/inference/v1/generate"
        self.bodies.append(body)
        return {"usage": {"prompt_tokens": len(body["token_ids"]) - self._lost}}


PROMPTS = [TracedPrompt("a", (5, 6, 7, 8), 2, cached=True), TracedPrompt("b", (9, 9, 9), 1)]


def test_a_cached_prefix_is_computed_before_and_no_other_prompt_shares_it() -> None:
    server: Any = Server()
    prefill(server, PROMPTS)
    prefix, *together = server.bodies
    assert (prefix["token_ids"], prefix["cache_salt"], prefix["request_id"]) == ([5, 6], "a", "a-prefix")
    asked = {body["request_id"]: (body["token_ids"], body["cache_salt"]) for body in together}
    assert asked == {"a": ([5, 6, 7, 8], "a"), "b": ([9, 9, 9], "b")}
    assert {body["sampling_params"]["max_tokens"] for body in server.bodies} == {1}


def test_another_prompt_than_the_one_that_was_sent_is_an_error() -> None:
    server: Any = Server(lost=1)
    with pytest.raises(EngineError, match="answer"):
        prefill(server, PROMPTS)
