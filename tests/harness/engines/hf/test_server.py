"""A real server of transformers on the CPU: answers, scores, its key and its fingerprint."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from assay.evals.mmlu import draw_questions
from assay.harness.engines.base import ChatRequest, answers
from assay.harness.engines.generation import generate
from assay.harness.engines.hf.model import Model
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import LaunchedServer, server
from assay.harness.engines.model import TINY_MODEL
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Item
from assay.harness.fingerprint.parts import faults

pytestmark = [pytest.mark.server, pytest.mark.slow]
PROMPT = draw_questions("builtin", 1).questions[0].prompt


def make(folder: Path, **changes: object) -> LaunchedServer:
    return server(Launch(**{
        "engine": "hf", "role": "reference", "backend": "hf", "model": TINY_MODEL, "device": "cpu",
        "evidence": folder / "evidence", "log": folder / "server.log", "decode_backend": "", "startup_timeout": 300.0,
        "request_timeout": 120.0, **changes,
    }))  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedServer]:
    with make(tmp_path_factory.mktemp("hf")) as started:
        yield started


def test_it_answers_and_says_what_it_is(running: LaunchedServer) -> None:
    assert running.label.startswith("transformers 5.")
    assert running.arguments()["dtype"] == "float32"
    running.flush_cache()
    first, again = (answers(running, [ChatRequest(PROMPT, 12, 3)], 1)[0] for _ in range(2))
    assert first.text == again.text
    assert (first.finish_reason, first.cached_tokens) == ("stop", 0)
    assert len(first.tokens) == first.completion_tokens
    assert again.cached_tokens == first.prompt_tokens - 1
    assert first.tokens[0].top[0] == (first.tokens[0].text, first.tokens[0].logprob), "greedy"
    items = [Item(suite="envelope", id=str(n), prompt="", prompt_hash="") for n in range(2)]
    made = running.generate_all(items, [[5, 6, 7], [5, 6, 7, 8]], [3, 2], 2)
    assert [(len(each.tokens), each.prompt_tokens, each.finish_reason) for each in made] == [(3, 3, "length"), (2, 4, "length")]


def test_scores_are_those_of_the_model(running: LaunchedServer) -> None:
    made = generate(running, PROMPT, 4)
    ids = made.prompt_ids + made.ids
    start = len(made.prompt_ids) - 10
    running.flush_cache()
    cold, cached = (running.score(ids, start, 5, (1, 2, 1030)) for _ in range(2))
    assert (cold.cached_tokens, cached.cached_tokens) == (0, start)
    own = Model(TINY_MODEL).log_probabilities(ids)[0][start:-1]
    for scored in (cold, cached):
        assert np.allclose(scored.token, own.gather(1, own.new_tensor(ids[start + 1 :]).long()[:, None])[:, 0], atol=1e-5)
        assert np.allclose(scored.top, own.topk(5).values, atol=1e-5)
        assert np.allclose(scored.at, own[:, [1, 2, 1030]], atol=1e-5)
    with pytest.raises(ValueError, match="leave nothing to score"):
        running.score(ids[:3], 2, 5)


def test_the_fingerprint_agrees_with_the_folder(running: LaunchedServer) -> None:
    made = running.fingerprint()
    assert made is not None
    assert made.not_observed.keys() <= {"positions", "ignored"}
    assert [fault.says for fault in faults(made) if fault.outputs] == []
    assert made.rope is not None
    assert made.weights is not None
    assert made.tokens is not None
    assert len(made.tokens.chats) > 1


def test_it_wants_its_key_and_knows_its_paths(running: LaunchedServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{running.url}/server_info")
    with pytest.raises(EngineError, match="HTTP 400"):
        running.send("/nothing", {})
    assert json.loads(urllib.request.urlopen(f"{running.url}/health").read()) == {}


def test_a_model_that_it_cannot_load_is_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(EngineError, match=r"the reference server \(hf\) failed during start-up"):
        make(tmp_path, model=tmp_path / "model").start()
