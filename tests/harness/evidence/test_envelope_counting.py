"""What the shadow's process counts of each call."""

from __future__ import annotations

import pytest

from assay.harness.evidence.envelope import EngineLimits, EnvelopeCounts
from assay.harness.evidence.envelope_counting import EnvelopeCounting

LAYERS = 2


class Passes:
    """Forward passes through all layers, counted."""

    def __init__(self, chunk_tokens: int | None = None) -> None:
        self.counting = EnvelopeCounting(EngineLimits(context_tokens=4096, chunk_tokens=chunk_tokens))

    def step(self, phase: str, lens: list[tuple[int, int]], rids: list[str], *, mixed: bool = False) -> None:
        new, prefix = [n for n, _ in lens], [p for _, p in lens]
        extend = phase == "extend"
        values = self.counting.extend(new, prefix, rids, mixed=mixed) if extend else self.counting.decode(prefix, rids)
        for layer in range(LAYERS):
            self.counting.count(phase, layer, values)

    def counts(self) -> EnvelopeCounts:
        return self.counting.counts("")


@pytest.fixture
def passes() -> Passes:
    return Passes()


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


def test_a_later_chunk_is_full_where_it_has_as_many_tokens_as_ever() -> None:
    passes = Passes(chunk_tokens=64)
    passes.step("extend", [(64, 0)], ["long"])
    passes.step("extend", [(63, 64)], ["long"])
    assert "later chunk of full length" not in passes.counts().calls["extend"]["chunk"]
    passes.step("extend", [(64, 127)], ["long"])
    assert passes.counts().calls["extend"]["chunk"]["later chunk of full length"] == {0: 1, 1: 1}


def test_a_sequence_in_decode_among_prompts_is_no_chunk(passes: Passes) -> None:
    passes.step("extend", [(20, 0)], ["a"])
    passes.step("extend", [(30, 0), (1, 20)], ["b", "a"], mixed=True)
    counts = passes.counts()
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert counts.calls["extend"]["mix"]["extend and decode"] == {0: 1, 1: 1}


def test_decode_is_counted_by_how_far_each_request_has_come(passes: Passes) -> None:
    for step in range(9):
        passes.step("decode", [(1, 40 + step)], ["a"])
    counts = passes.counts()
    assert {label: by_layer[0] for label, by_layer in counts.calls["decode"]["depth"].items()} == {"1": 1, "2-8": 7, "9-32": 1}
    assert counts.reached("decode", "depth") == 9
