from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from assay.evals.probes import Probe
from assay.harness.engines.features import Pass, shown
from assay.harness.engines.sglang.features import features_of
from assay.harness.evidence.counters import Admission

CPU, CUDA = features_of("cpu"), features_of("cuda")
PROBES = (Probe("0+5", (1,) * 5, 0, 8), Probe("32+9", (1,) * 41, 32, 8))


def admission(*requests: tuple[str, int, int]) -> Admission:
    rids, new, prefix = zip(*requests, strict=True)
    return Admission(process=1, rids=rids, new=new, prefix=prefix)


@pytest.fixture
def over(arm_records: ModuleType) -> Pass:
    """A pass in which no feature is seen to be on."""
    replies = [arm_records.reply("0+5"), arm_records.reply("32+9")]
    admissions = [admission(("a:0+5", 5, 0)), admission(("a:32+9", 41, 0))]
    return Pass(PROBES, replies, admissions, ["0+5", "32+9"], {})


def replied(over: Pass, **fields: Any) -> Pass:
    """The pass with other fields in the reply to the second probe."""
    return replace(over, replies=[over.replies[0], over.replies[1].model_copy(update=fields)])


def changed(over: Pass, id_: str) -> Pass:
    """The pass in which a feature was on."""
    admissions = {
        "batch": [admission(("a:0+5", 5, 0), ("a:32+9", 41, 0))],
        "chunked-prefill": [admission(("a:32+9", 32, 0)), admission(("a:32+9", 9, 32))],
        "mixed-chunk": [admission(("a:32+9:turn", 9, 32), ("a:0+5:turn", 1, 12))],
    }
    resolved = {**CPU, **CUDA}[id_].resolved
    over = replace(over, admissions=admissions.get(id_, over.admissions), arguments=resolved)
    if id_ == "prefix-cache":
        return replied(over, cached_tokens=32)
    if id_ == "hicache":
        return replied(over, host_tokens=32, cached_tokens=32)
    if id_ == "retraction":
        return replied(over, retractions=1)
    if id_ == "streamed":
        return replied(over, pieces=3)
    if id_ == "ngram":
        return replied(over, verifications=3)
    if id_ == "conversation":
        return replied(replace(over, turns={"32+9": 40}), cached_tokens=40)
    if id_ == "order":
        return replace(over, sent=["32+9", "0+5"])
    if id_ in ("weights-again", "sleep-wake", "zero-lora"):
        return replace(over, said={id_: "done"})
    if id_ == "cuda-graph-decode":
        return replace(over, arguments={"cuda_graph_config": {"decode": {"backend": "full"}}}, replays={("decode", 7): 3})
    if id_ == "torch-compile":
        return replace(over, arguments={**resolved, "torch_compile_max_bs": 4}, replays={("decode", 4): 3})
    return over


@pytest.mark.parametrize(
    "id_",
    [
        "prefix-cache", "batch", "order", "conversation", "streamed", "weights-again", "chunked-prefill", "mixed-chunk",
        "retraction", "ngram", "sleep-wake", "zero-lora", "cuda-graph-decode", "torch-compile", "hicache", "page-size", "overlap",
        "no-radix-cache",
    ],
)  # fmt: skip
def test_a_feature_is_shown_where_it_was_on_and_nowhere_else(id_: str, over: Pass) -> None:
    feature = {**CPU, **CUDA}[id_]
    found, why = shown(feature, changed(over, id_))
    assert (bool(found), why) == (True, ""), why
    off = replace(over, arguments=feature.resolved) if feature.seen else over
    found, why = shown(feature, off)
    assert (found, bool(why)) == ("", True), found


def test_a_flag_that_the_server_resolved_otherwise_proves_nothing(over: Pass) -> None:
    chunked = replace(changed(over, "chunked-prefill"), arguments={"chunked_prefill_size": 64})
    assert shown(CPU["chunked-prefill"], chunked) == ("", "the server resolved chunked_prefill_size = 64, not 128")


def test_a_miss_is_shown_unless_something_came_from_the_cache(over: Pass) -> None:
    assert shown(CPU["force-miss"], over) == ("", "no prefix was left in the cache")
    over = replace(over, warm=True)
    assert shown(CPU["force-miss"], over)[0]
    assert shown(CPU["force-miss"], replied(over, cached_tokens=32)) == ("", "1 prefixes came from the cache")


def test_every_prefix_must_come_from_the_cache(over: Pass) -> None:
    assert shown(CPU["prefix-cache"], replied(over, cached_tokens=31)) == ("", "0 of 1 shared prefixes came from the cache")
    assert shown(CPU["prefix-cache"], replace(replied(over, cached_tokens=32), page=16))[0]
    assert not shown(CPU["prefix-cache"], replace(replied(over, cached_tokens=31), page=32))[0]
    assert shown(CPU["prefix-cache"], replace(over, page=64)) == ("", "no shared prefix fills a page")
    other = (*PROBES, Probe("16+9", (1,) * 25, 16, 8))
    missed = replace(replied(over, cached_tokens=32), probes=other)
    assert shown(CPU["prefix-cache"], missed) == ("", "1 of 2 shared prefixes came from the cache")


def test_an_earlier_turn_is_shown_by_a_page_that_only_it_fills(over: Pass) -> None:
    turns = {"32+9": 40}
    assert shown(CPU["conversation"], replace(replied(over, cached_tokens=39), turns=turns)) == (
        "", "0 of 1 earlier turns came from the cache"
    )  # fmt: skip
    both = replace(replied(over, cached_tokens=40), turns={"0+5": 3, **turns})
    assert shown(CPU["conversation"], both) == ("", "1 of 2 earlier turns came from the cache")
    paged = replace(replied(over, cached_tokens=32), turns=turns, page=16)
    assert shown(CPU["conversation"], paged) == ("", "no earlier turn fills a page by itself")
    assert shown(CPU["conversation"], replace(paged, turns={"32+9": 48})) == ("", "0 of 1 earlier turns came from the cache")
    assert shown(CPU["conversation"], replace(replied(over, cached_tokens=48), turns={"32+9": 48}, page=16))[0]


def test_few_tokens_of_a_prefix_may_stay_in_the_hosts_memory(over: Pass) -> None:
    short = replied(over, cached_tokens=23)
    assert not shown(CUDA["prefix-cache"], short)[0]
    on_host = {"enable_hierarchical_cache": True}
    assert shown(CUDA["prefix-cache"], replace(short, arguments=on_host))[0]
    assert not shown(CUDA["prefix-cache"], replace(replied(over, cached_tokens=22), arguments=on_host))[0]
    for host, read_back in ((0, False), (9, False), (10, True), (23, True), (24, False)):
        told = replace(replied(over, cached_tokens=23, host_tokens=host), arguments=on_host)
        assert bool(shown(CUDA["hicache"], told)[0]) == read_back, host


def test_graphs_and_compiled_code_are_shown_by_passes_that_they_served(over: Pass) -> None:
    graphs = replace(over, arguments={"cuda_graph_config": {"prefill": {"backend": "full"}, "decode": {"backend": "full"}}})
    only_decode = replace(graphs, replays={("decode", 7): 2, ("decode", 2): 1})
    assert shown(CUDA["cuda-graph-decode"], only_decode) == ("3 passes of decode ran in CUDA graphs (full)", "")
    assert shown(CUDA["cuda-graph-prefill"], only_decode) == (
        "", "the server resolved full graphs for prefill, and no pass ran in one"
    )  # fmt: skip
    compiled = {"enable_torch_compile": True, "torch_compile_max_bs": 4}
    assert shown(CUDA["torch-compile"], replace(over, arguments=compiled, replays={("decode", 7): 2, ("prefill", 1): 1})) == (
        "", "no pass of at most 4 requests, the compiled ones, ran in a CUDA graph"
    )  # fmt: skip


def test_a_retracted_request_is_no_prompt_that_was_split(over: Pass) -> None:
    resolved = CPU["chunked-prefill"].resolved
    for again in (("a:32+9", 43, 0), ("a:32+9", 2, 41), ("a:32+9", 11, 32)):  # anew, behind its prompt, and behind its prefix
        admitted = replace(over, admissions=[admission(("a:32+9", 41, 0)), admission(again)], arguments=resolved)
        assert shown(CPU["chunked-prefill"], admitted) == ("", "no prompt was split")
    both = [admission(("a:32+9", 32, 0)), admission(("a:32+9", 32, 0)), admission(("a:32+9", 9, 32))]
    seen, _ = shown(CPU["chunked-prefill"], replace(over, admissions=both, arguments=resolved))
    assert seen.endswith("1 prompt split, into up to 2 chunks")
