from __future__ import annotations

import pytest

from assay.evals.envelope_load import BORDER, REST, again, batch_wave, long_wave, longest
from assay.harness.conditions import ENVELOPE

VOCABULARY, NEW_TOKENS = 1031, ENVELOPE["new-tokens"]


@pytest.mark.parametrize("tokens", [128, 512, 2048, 10_000])
def test_a_wave_has_the_long_prompt_first_and_others_that_end_around_a_border(tokens: int) -> None:
    wave = long_wave(tokens, 1, VOCABULARY, "seed")
    long = wave[0].ids
    assert len(long) == tokens + REST
    assert {len(one.ids) % BORDER for one in wave[1:4]} == {BORDER - 1, 0, 1}
    shared = [next(n for n, (a, b) in enumerate(zip(one.ids, long, strict=False)) if a != b) for one in wave[1:4]]
    assert shared[0] in range(1, 16)
    assert shared[1] >= BORDER
    assert shared[2] == 0


def test_every_bucket_of_new_tokens_up_to_the_envelope_is_in_the_first_wave() -> None:
    wave = long_wave(512, 1, VOCABULARY, "seed")
    assert {NEW_TOKENS.index(min(len(one.ids), 512)) for one in wave} >= set(range(1, NEW_TOKENS.index(512) + 1))


def test_a_long_envelope_has_prompts_and_prefixes_of_the_lengths_between() -> None:
    lengths = [len(one.ids) for one in long_wave(10_000, 1, VOCABULARY, "seed")]
    assert {512, 2048, 8192, 528, 2064, 8208} <= set(lengths)


def test_the_same_prefix_comes_again_with_another_end() -> None:
    wave = long_wave(512, 1, VOCABULARY, "seed")
    (one,) = again(wave, 512, 1, VOCABULARY)
    assert one.ids[:512] == wave[0].ids[:512]
    assert one.ids[512:] != wave[0].ids[512:]


def test_a_context_that_is_too_short_shortens_the_load() -> None:
    assert longest(2048, 4096, 1) == 2048
    assert longest(2048, 1024, 33) == 896
    assert longest(512, 64, 1) <= 0


def test_waves_of_other_seeds_share_nothing() -> None:
    one, other = (long_wave(128, 1, VOCABULARY, seed)[0].ids for seed in "ab")
    assert one[:8] != other[:8]


def test_a_batch_is_short_and_partly_shares_a_prefix() -> None:
    wave = batch_wave(9, 4, VOCABULARY, "seed")
    assert len(wave) == 10
    assert len({one.ids[:24] for one in wave if len(one.ids) > 24}) == 1
    assert {one.output for one in wave} == {4}


def test_a_prompt_passes_a_border_while_it_is_decoded() -> None:
    ends = {(len(one.ids) + step) % BORDER for one in long_wave(512, 9, VOCABULARY, "seed") for step in range(1, 9)}
    assert {BORDER - 1, 0, 1} <= ends
