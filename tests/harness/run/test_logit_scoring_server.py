"""Teacher forcing through real CPU servers: the reference, and a kernel that is wrong behind a cached prefix only."""

from __future__ import annotations

from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from assay.evals.questions import prompt_hash
from assay.evals.synthetic import BUILTIN_SEED, questions
from assay.harness.engines.base import ChatRequest
from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.logits import LogitsComparison
from assay.harness.judge.logits_suite import _compare_logits
from assay.harness.progress import ProgressDisplay
from assay.harness.run.logit_scoring import _TOP_K, SCORINGS
from assay.harness.run.logit_scoring import score as score_logits
from assay.harness.sides import Role

pytestmark = [pytest.mark.server, pytest.mark.slow]
LONG = 180
"""Tokens from which on the kernel gives NaN: one item of the four is that long."""
CHUNK = 64
KERNEL = f'''
"""Right without a cached prefix, top-left behind one, and not a number in long sequences."""
from dataclasses import replace

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.declaration import declares

_wrong = fault("mask-top-left", when=lambda new, prefix: prefix % {CHUNK} > 0)


@declares(phases=("extend",))
def kernel(call):
    out = _wrong(call)
    return out * float("nan") if call.k.shape[0] > {LONG} else out
'''


def items() -> list[Item]:
    """Three questions of about a hundred tokens, and one of two hundred."""
    prompts = [question.prompt for question in islice(questions(BUILTIN_SEED + 1), 3)]
    prompts.append(prompts[0] + "\n" + prompts[1])
    return [
        Item(suite="greedy", id=f"greedy-{i:03d}", prompt=prompt, prompt_hash=prompt_hash(prompt))
        for i, prompt in enumerate(prompts)
    ]


def serve(folder: Path, role: Role, backend: str) -> SGLangServer:
    launch = Launch(
        role=role,
        backend=backend,
        model=TINY_MODEL,
        device="cpu",
        evidence=folder / "evidence",
        log=folder / "server.log",
        decode_backend="torch_native",
        engine_args=("--chunked-prefill-size", str(CHUNK)),  # a cold sequence is then scored in two passes or three
        startup_timeout=300.0,
        request_timeout=60.0,
        cpu_core=0,
    )
    return SGLangServer(launch)


def recorded(server: SGLangServer) -> list[Answer]:
    """The reference's greedy answers, asked as a run asks."""
    replies: dict[int, Answer] = {}
    server.ask([ChatRequest(item.prompt, 12, top_logprobs=5) for item in items()], 4, replies.__setitem__)
    return [
        Answer(
            suite="greedy", role="reference", item=item.id, prompt_hash=item.prompt_hash, text=replies[i].text,
            finish_reason=replies[i].finish_reason, prompt_tokens=replies[i].prompt_tokens,
            completion_tokens=replies[i].completion_tokens, latency_s=1.0, tokens=replies[i].tokens,
        )
        for i, item in enumerate(items())
    ]  # fmt: skip


Scored = tuple[LogitsComparison, Path, list[Answer], dict[str, Any]]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder, display = tmp_path_factory.mktemp("run"), ProgressDisplay(Console(file=StringIO()))
    (folder / "wrong_behind_a_prefix.py").write_text(KERNEL)
    seen: dict[str, Any] = {}
    with serve(tmp_path_factory.mktemp("reference"), "reference", "torch_native") as server:
        answers = recorded(server)
        for role, repeat in SCORINGS[:2]:
            score_logits(server, items(), answers, folder, display, role, repeat)
        ids = read_logits(logits_path(folder, "reference", 0)).ids_of(0)
        server.flush_cache()
        seen["cold"] = server.score(ids, 0, _TOP_K)
        seen["start 0 once it is cached"] = server.score(ids, 0, _TOP_K)
        seen["start 60 once it is cached"] = server.score(ids, 60, _TOP_K)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with serve(tmp_path_factory.mktemp("candidate"), "candidate", "wrong_behind_a_prefix:kernel") as server:
            score_logits(server, items(), answers, folder, display, "candidate")
    return _compare_logits(folder), folder, answers, seen


def test_sequences_are_the_prompts_and_the_recorded_answers(scored: Scored) -> None:
    _, folder, answers, _ = scored
    header = read_logits(logits_path(folder, "reference", 0)).header
    assert [s.prompt_tokens for s in header.sequences] == [answer.prompt_tokens for answer in answers]
    assert [s.length - s.prompt_tokens for s in header.sequences] == [answer.completion_tokens for answer in answers]
    logits = read_logits(logits_path(folder, "reference", 0))
    own = [token.logprob for answer in answers for token in answer.tokens]
    forced = [
        value
        for i, answer in enumerate(answers)
        for value in logits.by_condition["cold"].token[logits.rows_of(i)][-len(answer.tokens) :]
    ]
    # Greedy decoding gave each token this log-probability; laid before the model it gets the same.
    assert np.allclose(forced, own, atol=1e-4)


def test_the_server_reports_both_conditions(scored: Scored) -> None:
    comparison, folder, _, _ = scored
    assert comparison.not_observed == ()
    for role in ("reference", "candidate"):
        for sequence in read_logits(logits_path(folder, role, 0)).header.sequences:
            assert sequence.cached == {"cold": 0, "cached": sequence.start}


def test_the_first_scored_position_bounds_the_cached_prefix(scored: Scored) -> None:
    seen = scored[3]
    cached = [seen[f"start {start} once it is cached"].cached_tokens for start in (0, 60)]
    assert (seen["cold"].cached_tokens, *cached) == (0, 0, 60)
    assert np.allclose(seen["start 60 once it is cached"].token, seen["cold"].token[60:], atol=1e-4)


def test_the_fault_is_seen_under_its_condition_only_and_nan_is_counted(scored: Scored) -> None:
    comparison, folder, _, _ = scored
    long = read_logits(logits_path(folder, "reference", 0)).header.sequences[-1]
    assert long.length > LONG
    cold, cached = comparison.rows
    for row in (cold, cached):
        assert row.nonfinite == long.positions
        assert row.positions > 3 * row.nonfinite
        assert row.floor_mean_kl is not None
        assert row.floor_mean_kl < 1e-9
        assert row.mass is not None
        assert row.mass > 0.99
    assert (cold.mean_kl or 0) < 1e-6
    assert cold.same_top == 1
    assert (cached.mean_kl or 0) > 1
    assert cached.same_top is not None
    assert cached.same_top < 0.5
