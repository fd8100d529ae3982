"""Log-probabilities on disk."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from assay.harness.errors import EvidenceError
from assay.harness.evidence.logit_files import (
    CACHE_STATES,
    Logits,
    LogitsHeader,
    Positions,
    ScoredSequence,
    logits_path,
    read_logits,
    write_logits,
)

K = 3


def example() -> Logits:
    sequences = (
        ScoredSequence(item="a", prompt_tokens=20, length=24, start=17, cached={"cold": 1, "cached": 17}),
        ScoredSequence(item="b", prompt_tokens=20, length=22, start=17, cached={"cold": 2, "cached": 15}),
    )
    n = 6 + 4
    generator = np.random.default_rng(0)
    logprobs = -generator.random((n, K)).astype(np.float32)
    logprobs[2, 1] = math.nan
    positions = Positions(logprobs[:, 0], np.arange(n, dtype=np.int32), np.arange(n * K, dtype=np.int32).reshape(n, K), logprobs)
    header = LogitsHeader(role="candidate", repeat=0, backend="sage_attn", engine="SGLang", top_k=K, sequences=sequences)
    return Logits(header, np.arange(46, dtype=np.int32), dict.fromkeys(CACHE_STATES, positions))


def test_a_scoring_is_read_as_it_was_written(tmp_path: Path) -> None:
    logits = example()
    write_logits(tmp_path, logits)
    back = read_logits(logits_path(tmp_path, "candidate", 0))
    assert back.header == logits.header
    assert np.array_equal(back.ids, logits.ids)
    for condition in CACHE_STATES:
        for name in ("token", "best", "top_ids", "logprobs"):
            ours, theirs = getattr(logits.by_condition[condition], name), getattr(back.by_condition[condition], name)
            assert theirs.dtype == ours.dtype
            assert np.array_equal(theirs, ours, equal_nan=name in ("token", "logprobs"))
    assert [file.name for file in (tmp_path / "logits").iterdir()] == ["candidate-0.safetensors"]


def test_a_sequence_knows_its_tokens_its_positions_and_whether_the_cache_was_as_it_should() -> None:
    logits = example()
    assert [logits.ids_of(n) for n in (0, 1)] == [tuple(range(24)), tuple(range(24, 46))]
    assert [logits.rows_of(n) for n in (0, 1)] == [slice(0, 6), slice(6, 10)]
    honoured = [[sequence.honoured(state) for state in CACHE_STATES] for sequence in logits.header.sequences]
    assert honoured == [[True, True], [False, False]], "by the server's count of cached tokens"


def test_missing_and_damaged_files_are_errors(tmp_path: Path) -> None:
    path = logits_path(tmp_path, "candidate", 0)
    with pytest.raises(EvidenceError, match=r"candidate-0.safetensors is damaged"):
        read_logits(path)
    write_logits(tmp_path, example())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(EvidenceError, match="is damaged"):
        read_logits(path)
    path.write_bytes(content.replace(b"top_k", b"of_it"))
    with pytest.raises(EvidenceError, match="is damaged"):
        read_logits(path)


def test_arrays_that_do_not_fit_the_header_are_damage(tmp_path: Path) -> None:
    logits = example()
    cut = {c: replace(p, token=p.token[1:]) for c, p in logits.by_condition.items()}
    write_logits(tmp_path, replace(logits, by_condition=cut))
    with pytest.raises(EvidenceError, match=r"cold.token is \(9,\), not \(10,\)"):
        read_logits(logits_path(tmp_path, "candidate", 0))
    write_logits(tmp_path, replace(logits, ids=logits.ids[1:]))
    with pytest.raises(EvidenceError, match=r"ids is \(45,\)"):
        read_logits(logits_path(tmp_path, "candidate", 0))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logits").write_text("in the way")
    with pytest.raises(EvidenceError, match="cannot be written"):
        write_logits(tmp_path, example())
