"""Scoring both roles on a stand-in that answers as SGLang does but is fast and can be made to misbehave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.special import log_softmax

from assay.harness.engines.base import ProbeReply, ProbeRequest, Score
from assay.harness.engines.generation import score as score_tokens
from assay.harness.engines.sglang import probing
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.judge.logits import LogitsComparison
from assay.harness.judge.logits_suite import _compare_logits
from assay.harness.progress import ProgressDisplay
from assay.harness.run.logit_scoring import _PROMPT_TAIL, _TOP_K, SCORINGS, score
from assay.harness.sides import Engine as EngineName
from assay.harness.sides import Role

VOCABULARY, END = 64, 63
PROMPTS = {"greedy-000": 40, "greedy-001": 18, "greedy-002": 60}
"""Prompt tokens by item."""


class Model:
    """A server whose next-token distribution follows from the token before alone, and whose fault shows behind a cached prefix."""

    kind: EngineName = "sglang"
    who, backend, label, adapter = "the server (stand-in)", "stand-in", "stand-in 1", ""

    def __init__(self, role: Role, shift: float = 0.0, radix: bool = True) -> None:
        self.role = role
        self.shift, self.radix = shift, radix
        self.cache: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self.scored: list[tuple[int, ...]] = []
        self.answer_tokens = 5

    def flush_cache(self) -> None:
        self.cache = []
        self.calls.append("flush")

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        self.calls.append(path)
        return self._chat(body) if path.startswith("/v1") else self._generate(body)

    def score(self, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
        return score_tokens(self, ids, start, top_k, at)  # type: ignore[arg-type]

    def probe(self, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
        return probing.probe(self, requests, streamed=False)  # type: ignore[arg-type]

    def _chat(self, body: Mapping[str, Any]) -> Any:
        length = int(body["messages"][0]["content"])
        prompt = [(7 * i + length) % (VOCABULARY - 1) for i in range(length)]
        ids = [*range(1, min(self.answer_tokens, body["max_tokens"])), END]
        content = [{"token": f"t{token}", "logprob": 0.0} for token in ids]
        choice = {"prompt_token_ids": prompt, "response_token_ids": ids, "logprobs": {"content": content}}
        message = {"message": {"content": ""}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"id": "1", "choices": [message | choice], "usage": usage}

    def _generate(self, body: Mapping[str, Any]) -> Any:
        ids, start, k = tuple(body["input_ids"][0]), body["logprob_start_len"][0], body["top_logprobs_num"]
        self.scored.append(ids)
        cached = max((len(known) for known in self.cache if ids[: len(known)] == known), default=0) if self.radix else 0
        self.cache.append(ids)
        rows = [self._logprobs(ids[i - 1], bool(cached)) for i in range(start + 1, len(ids))]
        asked = body.get("token_ids_logprob", [None])[0]
        listed = [np.argsort(-np.array(row), kind="stable")[:k].tolist() for row in rows]
        meta = {
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "input_token_logprobs": [
                (None, ids[start], None),
                *((row[i], i, None) for row, i in zip(rows, ids[start + 1 :], strict=True)),
            ],
            "input_top_logprobs": [None, *([(r[i], i, None) for i in top] for r, top in zip(rows, listed, strict=True))],
            "input_token_ids_logprobs": asked and [None, *([(row[i], i, None) for i in asked] for row in rows)],
        }
        meta |= {"output_token_logprobs": [(0.0, 1, None)], "output_top_logprobs": [[(0.0, 1, None)]]}
        return [{"output_ids": [1], "meta_info": meta}]

    def _logprobs(self, before: int, cached: bool) -> list[float]:
        logits = 4 * np.cos(np.arange(VOCABULARY) * (before + 1) * 0.37)
        if cached:
            logits[before % 5] += self.shift
        return [float(value) for value in log_softmax(logits)]


def items() -> list[Item]:
    return [Item(suite="greedy", id=id_, prompt=str(length), prompt_hash="h") for id_, length in PROMPTS.items()]


def recorded(item: str, texts: list[str], prompt_tokens: int) -> Answer:
    return Answer(
        suite="greedy", role="reference", item=item, prompt_hash="h", text="".join(texts), finish_reason="stop",
        prompt_tokens=prompt_tokens, completion_tokens=len(texts), latency_s=0.1,
        tokens=tuple(Token(text=text, logprob=0.0) for text in texts),
    )  # fmt: skip


def display() -> ProgressDisplay:
    return ProgressDisplay(Console(file=StringIO()))


def score_role(model: Model, items: Sequence[Item], answers: Sequence[Answer], folder: Path) -> None:
    """Score what is left of a model's role."""
    for role, repeat in SCORINGS:
        if role == model.role and not logits_path(folder, role, repeat).exists():
            score(model, items, answers, folder, display(), role, repeat)


def both(folder: Path, candidate: Model) -> LogitsComparison:
    for model in (Model("reference"), candidate):
        score_role(model, items(), (), folder)
    return _compare_logits(folder)


def test_a_fault_behind_a_cached_prefix_shows_there_and_nowhere_else(tmp_path: Path) -> None:
    candidate = Model("candidate", shift=2.0)
    comparison = both(tmp_path, candidate)
    cold, cached = comparison.rows
    assert comparison.not_observed == ()
    assert (cold.condition, cold.mean_kl, cold.floor_mean_kl, cold.same_top) == ("cold", 0.0, 0.0, 1.0)
    assert cached.mean_kl is not None
    assert (cached.mean_kl > 0.01, cached.floor_mean_kl) == (True, 0.0)
    # The tail of the prompt as far as 17 tokens are left before it, and 5 answer tokens.
    expected = sum(min(_PROMPT_TAIL, length - 17) + 5 for length in PROMPTS.values())
    assert cold.positions == cached.positions == expected
    assert cold.top_k == _TOP_K


def test_both_roles_are_scored_on_the_same_ids_cold_and_then_cached(tmp_path: Path) -> None:
    reference, candidate = Model("reference"), Model("candidate")
    for model in (reference, candidate):
        score_role(model, items(), (), tmp_path)
    once = ["flush", "/generate", "flush", "/generate", "/generate"]
    assert candidate.calls == once * 3
    assert reference.calls == ["/v1/chat/completions"] * 3 + once * 5
    assert candidate.scored == reference.scored[:9]
    assert reference.scored[9:] == [*reference.scored[6:9], *reference.scored[:3]], "every second one again, for the floor"
    assert [s.cached for s in read_logits(logits_path(tmp_path, "candidate", 0)).header.sequences] == [
        {"cold": 0, "cached": start} for start in (40 - 1 - _PROMPT_TAIL, 16, 60 - 1 - _PROMPT_TAIL)
    ]


def test_without_a_prefix_cache_the_condition_is_not_observed(tmp_path: Path) -> None:
    comparison = both(tmp_path, Model("candidate", shift=2.0, radix=False))
    assert [row.condition for row in comparison.rows] == ["cold"]
    [missed] = comparison.not_observed
    assert (missed.id, missed.values["required"], missed.values["cached"][1]) == ("not-cached-as-required", 16, ["candidate", 0, 0])


def test_existing_scores_are_kept(tmp_path: Path) -> None:
    both(tmp_path, Model("candidate"))
    logits_path(tmp_path, "reference", 1).unlink()
    idle, rest = Model("candidate"), Model("reference")
    for model in (idle, rest):
        score_role(model, items(), (), tmp_path)
    assert idle.calls == []
    assert len(rest.scored) == 6
    assert _compare_logits(tmp_path).rows[0].floor_mean_kl == 0.0


def test_the_floor_is_scored_in_the_opposite_order(tmp_path: Path) -> None:
    many = [item.model_copy(update={"id": f"greedy-{i:03d}"}) for i, item in enumerate(items() * 3)]
    reference = Model("reference")
    score_role(reference, many, (), tmp_path)
    assert reference.scored[27::3] == [reference.scored[3 * i] for i in (8, 6, 4, 2, 0)]
    header = read_logits(logits_path(tmp_path, "reference", 1)).header
    assert [sequence.item for sequence in header.sequences] == [f"greedy-{i:03d}" for i in (0, 2, 4, 6, 8)]


def test_the_answer_is_cut_where_it_differs_from_the_recorded_one(tmp_path: Path) -> None:
    texts = ["t1", "t2", "other", "t4", "t63"]
    answers = [recorded("greedy-000", texts, 40), recorded("greedy-001", ["t1", "t2"], 18)]
    score_role(Model("reference"), items(), answers, tmp_path)
    header = read_logits(logits_path(tmp_path, "reference", 0)).header
    # The second was recorded with two tokens, so that its last one is now the end of the text instead of t2.
    assert [s.length - s.prompt_tokens for s in header.sequences] == [2, 1, 5]


def test_an_answer_to_another_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="recorded answer to greedy-000 had 41 tokens; it has 40 now"):
        score_role(Model("reference"), items(), [recorded("greedy-000", ["t1"], 41)], tmp_path)


def test_the_candidate_needs_the_reference_first(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="The candidate cannot be scored"):
        score_role(Model("candidate"), items(), (), tmp_path)
    with pytest.raises(EvidenceError, match="The run has no prompt"):
        score_role(Model("reference"), [], (), tmp_path)
    with pytest.raises(EvidenceError, match=r"reference-0.safetensors is damaged"):
        _compare_logits(tmp_path)


def test_a_server_that_fails_midway_leaves_no_partial_file(tmp_path: Path) -> None:
    class Dying(Model):
        def flush_cache(self) -> None:
            if len(self.scored) >= 2:
                raise EngineError("the server died")
            super().flush_cache()

    with pytest.raises(EngineError, match="the server died"):
        score_role(Dying("reference"), items(), (), tmp_path)
    assert not (tmp_path / "logits").exists()
    assert math.isfinite(both(tmp_path, Model("candidate")).rows[0].mean_kl or 0.0)
