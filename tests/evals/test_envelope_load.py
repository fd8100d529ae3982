"""The load of the envelope, on a stand-in for the engine's prefix cache and chunked prefill."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import accumulate

import numpy as np
import pytest

from assay.evals.envelope_load import BATCH, Load, LoadReach, Wave, envelope_load, longest
from assay.harness.conditions import BORDER_TOKENS
from assay.harness.evidence.envelope import gaps, ranges_of

VOCABULARY = 1031
Calls = list[tuple[int, int]]
"""(new tokens, cached prefix) of each sequence of extend, or (1, earlier keys) of decode."""
REACHES = [
    LoadReach(256, 4096, 256), LoadReach(512, 4096, 512), LoadReach(2048, 8192, 2048), LoadReach(512, 4096, 512, page=64),
    LoadReach(512, 4096, 128), LoadReach(512, 4096), LoadReach(512, 4096, 2048),
    LoadReach(200, 4096, 200), LoadReach(2048, 4096, 2048, page=16),
]  # fmt: skip


@cache
def load_of(reach: LoadReach) -> Load:
    return envelope_load(reach, BATCH["cpu"], VOCABULARY, "seed")


class PrefixCache:
    """The prompts of the waves before, in a pool of so many tokens: those used least recently are evicted, the ends first."""

    def __init__(self, reach: LoadReach, pool: int) -> None:
        self.reach, self.pool, self.known = reach, pool, dict[int, None]()

    def found(self, ids: tuple[int, ...]) -> int:
        """Tokens of a prompt that are cached: whole pages, and never its last one."""
        most = bisect_left(_hashes(ids)[:-1], True, key=lambda one: one not in self.known)
        return most // self.reach.page * self.reach.page

    def keep(self, wave: Wave) -> None:
        for ids in (request.ids for request in wave):
            for one in reversed(_hashes(ids)):
                self.known.pop(one, None)
                self.known[one] = None
        for one in list(self.known)[: -self.pool]:
            del self.known[one]


def _hashes(ids: tuple[int, ...]) -> list[int]:
    """A hash of each prefix, the shortest first."""
    return list(accumulate(ids, lambda before, token: hash((before, token))))


@cache
def served(reach: LoadReach, pool: int = 10**6) -> tuple[Calls, Calls]:
    """The sequences of the calls that an engine makes of a load: of extend, and of decode."""
    known, extend, decode = PrefixCache(reach, pool), [], []
    for wave in load_of(reach).waves:
        for one, prefix in zip(wave, [known.found(one.ids) for one in wave], strict=True):
            while prefix < len(one.ids):
                new = min(len(one.ids) - prefix, reach.chunk or len(one.ids))
                extend.append((new, prefix))
                prefix += new
            decode += [(1, len(one.ids) + step) for step in range(one.output - 1)]
        known.keep(wave)
    return extend, decode


def met(reach: LoadReach) -> dict[tuple[str, str], set[int]]:
    extend, decode = served(reach)
    return {
        ("extend", "new-tokens"): {new for new, prefix in extend if not prefix},
        ("extend", "new-behind-prefix"): {new for new, prefix in extend if prefix},
        ("extend", "prefix-tokens"): {prefix for _, prefix in extend},
        ("extend", "total-tokens"): {new + prefix for new, prefix in extend},
        ("decode", "total-tokens"): {new + prefix for new, prefix in decode},
    }


@pytest.mark.few(5)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_no_length_of_the_envelope_is_left_out(reach: LoadReach) -> None:
    found = met(reach)
    for phase, lengths in reach.lengths.items():
        for quantity, wanted in lengths.items():
            step = reach.page if quantity == "prefix-tokens" else 1
            assert gaps(ranges_of(found[phase, quantity]), wanted, step) == (), quantity


@pytest.mark.few(5)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_prompts_find_in_the_cache_what_they_are_meant_to(reach: LoadReach) -> None:
    known = PrefixCache(reach, 10**6)
    for wave in load_of(reach).waves:
        assert [known.found(one.ids) for one in wave] == [one.cached // reach.page * reach.page for one in wave]
        known.keep(wave)


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_a_pool_of_a_few_prompts_evicts_no_prefix_before_it_is_used(reach: LoadReach) -> None:
    load, known = load_of(reach), PrefixCache(reach, 4 * reach.long)
    for wave in (load.long, *load.extend):
        assert [known.found(one.ids) for one in wave] == [one.cached // reach.page * reach.page for one in wave]
        known.keep(wave)


@pytest.mark.parametrize("reach", REACHES[:3], ids=str)
def test_every_pair_of_thresholds_that_leaves_a_block_is_exceeded_by_a_prompt(reach: LoadReach) -> None:
    lengths = np.array([one for one in served(reach)[0] if sum(one) <= reach.tokens])
    thresholds = [(n, p) for n in range(1, reach.tokens, 13) for p in range(1, reach.tokens - BORDER_TOKENS - n, 17)]
    exceeded = (lengths[None] >= np.array(thresholds)[:, None]).all(axis=2).any(axis=1)
    assert not [one for one, found in zip(thresholds, exceeded, strict=True) if not found]


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_no_wave_makes_the_engine_split_what_it_could_prefill_at_once(reach: LoadReach) -> None:
    for wave in load_of(reach).extend:
        sizes = [-(-(len(one.ids) - one.cached) // BORDER_TOKENS) * BORDER_TOKENS for one in wave]
        assert sum(sizes) <= max(reach.at_once, BORDER_TOKENS) or len(wave) == 1


def test_the_second_chunk_is_a_whole_one_where_the_context_has_room() -> None:
    assert len(load_of(LoadReach(512, 4096, 512)).long[0].ids) == 1024
    assert LoadReach(512, 4096, 512).has_full_later_chunk
    assert not LoadReach(2048, 4096, 2048).has_full_later_chunk
    assert len(load_of(LoadReach(512, 4096)).long[0].ids) == 512, "nothing is split"


def test_the_envelope_of_a_gpu_takes_a_few_hundred_requests() -> None:
    load = envelope_load(LoadReach(2048, 8192, 2048), BATCH["cuda"], 32_000, "seed")
    assert sum(len(wave) for wave in load.waves) < 660
    titles = [one.title for wave in load.waves for one in wave]
    assert len(set(titles)) == len(titles), "an answer is known by its request's lengths"


def test_a_candidate_without_decode_generates_one_token_each() -> None:
    load = envelope_load(LoadReach(256, 4096, 256), 9, VOCABULARY, "seed", decodes=False)
    assert {one.output for wave in load.waves for one in wave} == {1}
    assert not load.decode


def test_a_batch_has_sequences_with_and_without_a_prefix() -> None:
    most, *drawn = load_of(REACHES[0]).batch
    assert len(most) == BATCH["cpu"] + 3
    assert all(2 < len(wave) < len(most) and {one.cached for one in wave} == {0, 24} for wave in drawn)


def test_lengths_within_blocks_and_sizes_of_batches_are_drawn_by_the_seed() -> None:
    """A kernel that returns zeros for 201 to 254 new tokens passed, and so did one that does in batches of 6 alone."""
    loads = [envelope_load(REACHES[0], BATCH["cpu"], VOCABULARY, f"{seed}") for seed in range(40)]
    requests = [[one for wave in load.waves for one in wave] for load in loads]
    for cached in (False, True):
        new = [{len(one.ids) - one.cached for one in some if bool(one.cached) is cached} for some in requests]
        assert all(lengths & set(range(201, 255)) for lengths in new)
        assert len(set.union(*new) & set(range(201, 255))) > 20
    assert all({one.cached for one in some} & set(range(201, 249)) for some in requests)
    decoded = [{len(one.ids) + step for one in some for step in range(1, one.output)} for some in requests]
    assert len(set.union(*decoded) & set(range(2, 257))) > 180
    assert sum(bool(lengths & set(range(210, 241))) for lengths in decoded) >= 38
    in_step = [{sum(one.output > step for one in load.batch[0]) for step in range(1, 20)} for load in loads]
    assert all(set(range(1, BATCH["cpu"] + 2)) <= sizes for sizes in in_step), "decode batches of every size"
    assert {len(wave) for load in loads for wave in load.batch} == {*range(3, BATCH["cpu"] + 3), BATCH["cpu"] + 3}


def test_loads_of_other_seeds_share_nothing() -> None:
    one, other = (envelope_load(REACHES[0], 9, VOCABULARY, seed).long[0].ids for seed in "ab")
    assert one[:8] != other[:8]


@pytest.mark.parametrize("chunk", [None, 64, 128, 256, 512])
def test_no_two_requests_have_the_same_lengths(chunk: int | None) -> None:
    """Answers are kept by them: a second one of the same name would be no evidence."""
    load = envelope_load(LoadReach(256, 2048, chunk), 9, 1031, "seed")
    titles = [one.title for wave in load.waves for one in wave]
    assert len(titles) == len(set(titles))


def test_a_context_that_is_too_short_shortens_the_load() -> None:
    assert [longest(2048, 4096, 1), longest(2048, 1024, 33), longest(512, 64, 1)] == [2048, 896, -64]
