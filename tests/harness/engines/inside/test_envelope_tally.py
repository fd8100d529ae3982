"""What the shadow's process counts of each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from assay.harness.engines.inside.envelope_tally import EnvelopeTally
from assay.harness.engines.inside.observed_call import ForwardPass, ObservedCall
from assay.harness.evidence.envelope import EngineLimits, EnvelopeCounts, read_envelope

LAYERS = 2


class Passes:
    """Forward passes through all layers, counted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.tally = EnvelopeTally(folder, EngineLimits(context_tokens=4096))

    def step(self, phase: Any, lens: list[tuple[int, int]], rids: list[str], mode: str = "EXTEND") -> None:
        new, prefix = tuple(n for n, _ in lens), tuple(p for _, p in lens)
        forward_pass = ForwardPass(self.number, new, prefix, tuple(rids), torch.zeros(sum(new), dtype=torch.int64), mode == "MIXED")
        self.number += 1
        for layer in range(LAYERS):
            self.tally.count(ObservedCall(layer, phase, 4, forward_pass, cast(Any, None), None))

    def counts(self) -> EnvelopeCounts:
        self.tally.write()
        found = read_envelope(self.folder)
        assert found is not None
        return found


@pytest.fixture
def passes(tmp_path: Path) -> Passes:
    return Passes(tmp_path)


def test_a_call_counts_once_for_each_bucket_of_its_sequences(passes: Passes) -> None:
    passes.step("extend", [(20, 0), (30, 0), (200, 64)], ["a", "b", "c"])
    counts = passes.counts()
    assert counts.calls["extend"]["new-tokens"] == {"17-128": {0: 1, 1: 1}}
    assert counts.calls["extend"]["new-behind-prefix"] == {"129-512": {0: 1, 1: 1}}
    assert set(counts.calls["extend"]["prefix-tokens"]) == {"0", "16-128"}
    assert set(counts.calls["extend"]["batch"]) == {"2-8"}
    assert set(counts.calls["extend"]["mix"]) == {"some with a prefix"}
    assert counts.reached("extend", "total-tokens") == 264


def test_a_prompt_that_is_continued_is_a_later_chunk(passes: Passes) -> None:
    passes.step("extend", [(512, 0)], ["long"])
    passes.step("extend", [(64, 512), (20, 100)], ["long", "cached"])
    assert passes.counts().calls["extend"]["chunk"] == {"whole or first chunk": {0: 2, 1: 2}, "later chunk": {0: 1, 1: 1}}


def test_a_later_chunk_is_full_where_it_has_as_many_tokens_as_ever(passes: Passes) -> None:
    passes.tally = EnvelopeTally(passes.folder, EngineLimits(context_tokens=4096, chunk_tokens=64))
    passes.step("extend", [(64, 0)], ["long"])
    passes.step("extend", [(63, 64)], ["long"])
    assert "later chunk of full length" not in passes.counts().calls["extend"]["chunk"]
    passes.step("extend", [(64, 127)], ["long"])
    assert passes.counts().calls["extend"]["chunk"]["later chunk of full length"] == {0: 1, 1: 1}


def test_a_sequence_in_decode_among_prompts_is_no_chunk(passes: Passes) -> None:
    passes.step("extend", [(20, 0)], ["a"])
    passes.step("extend", [(30, 0), (1, 20)], ["b", "a"], mode="MIXED")
    counts = passes.counts()
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert counts.calls["extend"]["mix"]["extend and decode"] == {0: 1, 1: 1}


def test_decode_is_counted_by_how_far_each_request_has_come(passes: Passes) -> None:
    for step in range(9):
        passes.step("decode", [(1, 40 + step)], ["a"])
    counts = passes.counts()
    assert {label: by_layer[0] for label, by_layer in counts.calls["decode"]["depth"].items()} == {"1": 1, "2-8": 7, "9-32": 1}
    assert counts.reached("decode", "depth") == 9


def test_a_new_session_forgets_the_one_before(passes: Passes) -> None:
    passes.step("extend", [(20, 0)], ["a"])
    passes.tally.clear()
    passes.step("extend", [(20, 10)], ["a"])
    counts = passes.counts()
    assert set(counts.calls["extend"]["prefix-tokens"]) == {"1-15"}
    assert "later chunk" not in counts.calls["extend"]["chunk"]
