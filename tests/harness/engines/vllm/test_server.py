"""A real vLLM server on the CPU: answers, scores, forced tokens, its fingerprint, and its ends. It needs vLLM's own environment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from assay.harness.engines.base import ChatRequest, answers
from assay.harness.engines.environments import python_of
from assay.harness.engines.generation import generate
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import LaunchedServer, server
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.vllm import arguments
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Item
from assay.harness.sides import Side

PYTHON = python_of(Side(engine="vllm", backend="CPU_ATTN"))
pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="vLLM's environment, .nox/vllm beside this one, does not exist"),
]
HEADER = "Facts, trades with: Jungal bawexn . Koven solfinn . Tell me more about all of these, and of much else that is known here."


def make(folder: Path, **changes: Any) -> LaunchedServer:
    return server(Launch(**{
        "engine": "vllm", "role": "candidate", "backend": "CPU_ATTN", "model": TINY_MODEL, "device": "cpu",
        "evidence": folder / "evidence", "log": folder / "server.log", "decode_backend": "", "startup_timeout": 600.0,
        "request_timeout": 120.0, "cpu_core": 0, "interpreter": PYTHON, **changes,
    }))  # fmt: skip


def family(started: LaunchedServer) -> list[psutil.Process]:
    assert started._process is not None
    guardian = psutil.Process(started._process.pid)
    return [guardian, *guardian.children(recursive=True)]


def check_for(started: LaunchedServer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        started.check()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedServer]:
    with make(tmp_path_factory.mktemp("vllm")) as started:
        yield started


def test_it_answers_and_says_what_it_is(running: LaunchedServer) -> None:
    assert running.label.startswith("vLLM 0.")
    running.flush_cache()
    first, again = (answers(running, [ChatRequest(HEADER, 6, 3)], 1)[0] for _ in range(2))
    assert (first.text, len(first.tokens), first.cached_tokens) == (again.text, 6, 0)
    assert again.cached_tokens == 32 * ((first.prompt_tokens - 1) // 32), "whole blocks, never the last token"
    limits = running.limits(0)
    assert limits is not None
    assert (limits.context_tokens, limits.page_tokens) == (4096, 32)
    assert arguments.differences(running.resolved_arguments(), running.arguments()) == {}, "as resolved without a server"


def test_scores_on_a_cached_prefix_equal_those_without_to_the_bit(running: LaunchedServer) -> None:
    made = generate(running, HEADER, 4)
    ids = made.prompt_ids + made.ids
    start = len(made.prompt_ids) - 10
    for _ in range(2):
        running.flush_cache()
        cold = running.score(ids, start, 5, (1, 2, 1030))
        running.flush_cache()
        running.score(ids[:start], start - 2, 1)
        cached = running.score(ids, start, 5, (1, 2, 1030))
        assert (cold.cached_tokens, cached.cached_tokens) == (0, 32 * (start // 32))
        for name in ("token", "top_ids", "top", "at"):
            assert np.array_equal(getattr(cold, name), getattr(cached, name)), name
    assert cold.token.shape == (len(ids) - start - 1,)
    assert (cold.top[:, 0] >= cold.token - 1e-6).all()
    assert cold.token[-1] == pytest.approx(answers(running, [ChatRequest(HEADER, 4, 1)], 1)[0].tokens[-1].logprob, abs=1e-5)


def test_a_request_writes_the_tokens_that_it_brings(running: LaunchedServer) -> None:
    body = {"model": running.model, "prompt": [0, 1, 297, 80], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    free = running.send("/v1/completions", body)["choices"][0]["token_ids"]
    forced = running.send("/v1/completions", {**body, "vllm_xargs": {"assay_forced": [5, 6, 7]}})["choices"][0]["token_ids"]
    assert forced[:3] == [5, 6, 7] != free[:3]
    items = [Item(suite="envelope", id=str(n), prompt="", prompt_hash="") for n in range(2)]
    made = running.generate_all(items, [[5, 6, 7], [5, 6, 7, 8]], [3, 2], 2)
    assert [(len(each.tokens), each.prompt_tokens) for each in made] == [(3, 3), (2, 4)]


def test_the_fingerprint_has_the_weights_that_the_checkpoint_has(running: LaunchedServer) -> None:
    made = running.fingerprint()
    assert made is not None
    assert made.weights is not None
    assert all(weight.shape != (0,) for weight in made.weights), "vLLM empties them; assay keeps them"
    assert {each.runs for each in made.backends or () if each.operation == "attention"} == {"CPU_ATTN (vec)"}
    assert made.tokens is not None
    assert made.tokens.chats
    assert not [table.wrong for table in made.rope or () if table.wrong]


def test_an_idle_worker_sleeps(running: LaunchedServer) -> None:
    """A bench plays on two servers in turn: one that polls after its last request takes a core from the other."""
    answers(running, [ChatRequest(HEADER, 6)], 1)
    time.sleep(0.1)
    processes = family(running)
    before = sum(sum(each.cpu_times()[:2]) for each in processes)
    time.sleep(0.8)
    assert sum(sum(each.cpu_times()[:2]) for each in processes) - before < 0.1


def test_the_end_of_its_engine_is_a_failure_and_nothing_is_left(running: LaunchedServer) -> None:
    processes = family(running)
    api = next(
        each for each in processes if "api_server" in " ".join(each.cmdline()) and "guardian" not in " ".join(each.cmdline())
    )
    engine = next(each for each in api.children() if "resource_tracker" not in " ".join(each.cmdline()))
    engine.kill()
    with pytest.raises(EngineError, match="the candidate server"):
        check_for(running, 60.0)
    running.stop()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_a_start_that_fails_names_its_cause(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="during start-up") as failed:
        make(tmp_path, engine_args=("--block-size=16",)).start()
    assert failed.value.cause == "block-size"
    assert "multiple of 32" in failed.value.do
