"""The catalogue of seeded faults: bugs that were reported in public, and what has no report yet, each where such bugs sit.

A link is a report of a bug of the same kind; the fault is a model of it in PyTorch. For faults without a link none is known.
Equivalent faults change nothing that matters: to flag one is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.oracle import Request
from assay.harness.bugs import effects
from assay.harness.bugs.bug import links
from assay.harness.bugs.effects import changes, hypothesis
from assay.harness.bugs.family import BY_ID
from assay.harness.bugs.seeded import Effect, SeededFault, Where


def _of(id: str, *reports: str, suffix: str = "", where: Where | None = None, only: str = "") -> SeededFault:
    """Make a hypothesis a fault; `suffix` and `only` state in id and prose where it is seeded."""
    of = BY_ID[id]
    title = f"{of.title}, {only}" if only else of.title
    known = links(*(reports if suffix else of.reports))
    return SeededFault(id + suffix, title, of.about, hypothesis(id), known, where or Where(), id)


def _own(id: str, title: str, about: str, effect: Effect, *reports: str, where: Where | None = None) -> SeededFault:
    """Make a fault that no hypothesis describes."""
    return SeededFault(id, title, about, effect, links(*reports), where or Where())


def _same(id: str, title: str, about: str, effect: Effect, where: Where | None = None) -> SeededFault:
    """Make a fault that changes nothing that matters."""
    return SeededFault(id, title, about, effect, where=where or Where(), equivalent=True)


def _with(effect: Callable[..., Tensor | None], *values: object) -> Effect:
    """Bind the parameters of an effect on outputs."""
    return partial(effect, *values)


def _change(change: Callable[..., Request | Tensor | None], *values: object) -> Effect:
    """Make a change of one sequence, with its parameters, an effect."""
    return changes(partial(change, *values))


_MASKS = (
    _of("mask-top-left"),
    _of("mask-top-left", "pytorch/pytorch#108108", "jax-ml/jax#24491", suffix="-layer-2", where=Where(layers=(2,)),
        only="in layer 2"),
    _of("mask-top-left", "thu-ml/SageAttention#26", suffix="-head-3", where=Where(heads=(3,)), only="in head 3"),
    _of("mask-top-left", suffix="-long-prefix", where=Where(prefix=(64, None)), only="behind 64 cached tokens or more"),
    _of("mask-top-left", suffix="-share", where=Where(share=0.1, seed=1), only="in a tenth of the calls"),
    _of("mask-one-key-too-many"),
    _of("mask-one-key-too-few"),
    _of("mask-missing"),
    _of("mask-missing", suffix="-batch", where=Where(batch=(2, None)), only="in batches"),
)  # fmt: skip
_PREFIX = (
    _of("prefix-dropped"),
    _of("prefix-dropped", suffix="-layer-0", where=Where(layers=(0,)), only="in layer 0"),
    _of("prefix-dropped", suffix="-few-new", where=Where(phase="extend", new=(2, 16)), only="for 2 to 16 new tokens"),
    _of("prefix-one-token-late"),
    _of("prefix-one-token-early"),
    _of("prefix-values-shifted"),
    _own("prefix-last-page-zero", "last page of the prefix zero", "a prefix that ends with a page loses that page",
         changes(effects.last_prefix_page_zero), "sgl-project/sglang#22819"),
    _own("prefix-overwritten", "prefix overwritten", "the first page of the prefix holds the newest tokens",
         changes(effects.prefix_overwritten), "sgl-project/sglang#24527", "vllm-project/vllm!37152"),
    _own("prefix-cut", "prefix cut", "only the last 32 cached tokens are seen", _change(effects.prefix_cut, 32),
         "vllm-project/vllm#26042", where=Where(phase="extend")),
    _own("prefix-twice", "prefix seen twice", "every query sees the cached prefix twice", changes(effects.prefix_twice)),
)  # fmt: skip
_WINDOWS = (
    _of("sliding-window-16", suffix="-decode", where=Where(phase="decode"), only="in decode"),
    _of("sliding-window-128"),
    _of("sliding-window-512"),
    _of("sliding-window-2048"),
)  # fmt: skip
SCALES = (
    _of("scale-missing"),
    _of("scale-twice"),
    _of("scale-doubled"),
    _of("scale-of-all-heads"),
    _of("exp2-without-log2e"),
    _of("exp-with-log2e"),
    _own("scale-inverted", "scale inverted", "scores are multiplied by the root of head_dim", changes(effects.scale_inverted),
         "AI-Hypercomputer/maxtext#1370"),
    _own("scale-of-absorbed-dim", "scale of the absorbed dimension", "the scale is that of 576 instead of 256 dimensions",
         _change(effects.rescaled, math.sqrt(256 / 576)), "ollama/ollama!13893", "NVIDIA/Megatron-LM#1429"),
    _own("scale-of-queries-applied", "scale of quantised Q applied", "a q that is not quantised is scaled as if it were",
         _change(effects.rescaled, 1.25), "vllm-project/vllm#53754"),
    _own("scale-one-percent", "scale one percent too large", "scores are 1 % too large", _change(effects.rescaled, 1.01)),
)  # fmt: skip
HEADS = (
    _of("kv-heads-interleaved"),
    _of("kv-head-next-group"),
    _of("kv-head-previous-group"),
    _own("heads-rolled", "heads rolled", "each q head has the output of the next", effects.heads_rolled),
    _own("head-3-zero", "head 3 zero", "q head 3 has no output", _with(effects.constant, 0.0), where=Where(heads=(3,))),
    _own("dims-beyond-64-zero", "dimensions beyond 64 zero", "only 64 dimensions of the values are computed",
         _with(effects.last_dims_zero, 64)),
)  # fmt: skip
MERGES = (
    _own("lse-in-base-2", "log-sum-exp in base 2",
         "cached and new keys are merged by a base-2 log-sum-exp that is taken for base e",
         changes(effects.prefix_merged_in_base_2), "sgl-project/sglang#40903", "sgl-project/sglang!35045",
         "flashinfer-ai/flashinfer#4485"),
    _own("splits-merged-equally", "parts merged equally", "parts of 64 keys count alike", changes(effects.splits_merged_equally),
         "flashinfer-ai/flashinfer!50", "flashinfer-ai/flashinfer!58"),
    _own("splits-merged-by-next-head", "parts merged by the next head",
         "parts of 64 keys are merged by the next head's log-sum-exp",
         changes(effects.splits_merged_by_next_head), "vllm-project/vllm#22103", "Dao-AILab/flash-attention#87"),
    _own("last-split-lost", "last part of the keys lost", "the last part of 64 keys is not merged",
         changes(effects.last_split_lost), "gittensor-ai-lab/sparkinfer!714"),
    _own("empty-part-counted", "empty part counted", "in a batch, an empty cached part has weight",
         changes(effects.empty_part_counted), "sgl-project/sglang#22688", "flashinfer-ai/flashinfer#3047",
         "sgl-project/sglang#10526"),
    _own("first-sequence-everywhere", "first sequence everywhere", "decode gives every sequence the output of the first",
         effects.first_sequence_everywhere, "vllm-project/flash-attention!176", where=Where(phase="decode")),
)  # fmt: skip
_BLOCKS = (
    _of("last-block-lost-16"),
    _of("last-block-lost-64"),
    _of("last-block-lost-128"),
    _own("block-skipped", "block skipped", "the second block of 64 keys is not seen", _change(effects.block_skipped, 64)),
    _own("first-block-again", "first block read again", "every block of 64 keys is read from the first",
         _change(effects.first_block_again, 64), "sgl-project/sglang#25556"),
    _own("values-of-another-page", "values of another page", "the values of the first two pages are swapped",
         changes(effects.values_of_another_page)),
    _own("zero-page-past-the-end", "page read past the end", "a sequence that fills its last page sees a page of zeros",
         changes(effects.zero_page_past_the_end), "pegainfer-project/pegainfer#291"),
    _own("page-borders-zero", "page borders zero", "the first query of a page has no output", effects.zero_at_page_borders),
    _own("nan-off-block", "NaN off a block", "sequences whose length is no multiple of 64 have no finite output",
         _with(effects.constant, math.nan), "thu-ml/SageAttention!377", where=Where(phase="extend", unaligned=64)),
    _own("nan-below-64", "NaN below 64 tokens", "sequences of less than 64 tokens have no finite output",
         _with(effects.constant, math.nan), "woct0rdho/SageAttention!98", where=Where(length=(0, 63))),
)  # fmt: skip
BATCHES = (
    _of("leak-keys-previous"),
    _of("leak-values-next"),
    _of("leak-keys-values-next"),
    _of("leak-prefix-previous"),
    _of("leak-prefix-next"),
    _of("leak-last-key-previous"),
    _of("leak-first-key-next"),
    _of("leak-all-keys-previous", "Tencent-Hunyuan/HunyuanVideo!310", suffix="-layer-3", where=Where(layers=(3,)),
        only="in layer 3"),
    _own("rows-rolled", "rows of padding counted", "in batches, each query has the output of the one before",
         effects.rows_rolled, "sgl-project/sglang#9806", "sgl-project/sglang#10414", where=Where(batch=(2, None))),
    _own("last-query-copied", "last query copied", "the last new token has the output of the one before",
         effects.last_query_copied),
)  # fmt: skip
_NEWEST = (
    _of("newest-token-stale", suffix="-decode", where=Where(phase="decode"), only="in decode"),
    _of("newest-token-zero", suffix="-decode-layer-1", where=Where(phase="decode", layers=(1,)), only="in decode in layer 1"),
    _own("plan-stale", "stale plan", "from its sixth call on, decode does not see the newest key",
         _change(effects.keys_before, 1), "vllm-project/vllm#46329", where=Where(phase="decode", from_call=5)),
    _own("metadata-stale", "stale metadata", "in batches, sequences are taken to be 8 tokens shorter",
         _change(effects.keys_before, 8), "vllm-project/vllm#47042", "vllm-project/vllm#47567", "vllm-project/vllm#47766",
         where=Where(batch=(2, None))),
    _own("first-key-lost", "first key lost", "no query sees the first key", changes(effects.without_first_key)),
    _own("sink-added", "sink added", "every query also attends to nothing", changes(effects.sink_added),
         "sgl-project/sglang#11634"),
)  # fmt: skip
_QUANTISATION = (
    _of("k-scale-previous-block"),
    _of("k-scale-next-block"),
    _of("q-scale-next-block"),
    _of("k-smoothed-by-block"),
    _of("k-smoothed-new-only"),
    _of("k-smoothing-lost"),
    _own("value-scale-ignored", "scale of V ignored", "the scale of FP8 values is not applied", _with(effects.times, 2.0),
         "flashinfer-ai/flashinfer#4979", "flashinfer-ai/flashinfer#1023", "sgl-project/sglang!20705"),
    _own("key-scale-ignored", "scale of K ignored", "the scale of FP8 keys is not applied", _change(effects.rescaled, 0.25),
         "NVIDIA/TensorRT-LLM#16916", "flashinfer-ai/flashinfer#4979"),
    _own("value-scale-of-next-head", "scale of V of the next head", "values are dequantised with the scale of the next kv head",
         effects.other_heads_value_scale),
    _own("queries-in-fp8", "Q in FP8", "q is rounded to FP8, undeclared", _change(effects.keys_rounded, torch.float8_e4m3fn, "q"),
         "sgl-project/sglang!28144"),
    _own("kv-in-fp8-from-97", "K and V in FP8 from 97 tokens on", "longer sequences are read from an FP8 cache, undeclared",
         _change(effects.keys_rounded, torch.float8_e4m3fn, "kv"), "sgl-project/sglang#25790", where=Where(length=(97, None))),
    _own("weights-in-fp8", "weights in FP8", "attention weights are rounded to FP8, undeclared",
         _change(effects.weights_rounded, torch.float8_e4m3fn)),
)  # fmt: skip
_PRECISION = (
    _of("accumulator-fp16"),
    _of("accumulator-bf16"),
    _of("values-saturate-fp8-e4m3"),
    _own("scores-in-bf16", "scores in bfloat16", "scores are rounded to bfloat16 before the softmax",
         _change(effects.scores_rounded, torch.bfloat16), "mlc-ai/mlc-llm!1870"),
    _own("denominator-in-bf16", "denominator in bfloat16", "the sum of the weights is kept in bfloat16",
         changes(effects.denominator_rounded)),
    _own("overflow-beyond-256", "overflow beyond 256 keys", "sequences of more than 256 tokens have infinite outputs",
         _with(effects.constant, math.inf), "mlc-ai/mlc-llm!1870", "ikawrakow/ik_llama.cpp!1196",
         where=Where(length=(257, None), heads=(0,))),
)  # fmt: skip
OUTPUTS = (
    _own("zero-beyond-128-new", "zero beyond 128 new tokens", "new tokens from the 129th on have no output",
         _with(effects.zero_from, 128), "Dao-AILab/flash-attention#2199"),
    _own("zero-beyond-512", "zero beyond 512 tokens", "sequences of more than 512 tokens have no output",
         _with(effects.constant, 0.0), "thu-ml/SageAttention#386", where=Where(length=(513, None))),
    _own("layer-2-zero", "layer 2 zero", "layer 2 has no output", _with(effects.constant, 0.0), where=Where(layers=(2,))),
    _own("gain-0.1-percent", "gain of 0.1 %", "every output is 0.1 % too large", _with(effects.times, 1.001)),
    _own("shrink-4.5-percent", "shrunk by 4.5 %", "every output is 4.5 % too small", _with(effects.times, 0.955),
         where=Where(layers=(1,))),
    _own("bias-1-percent", "bias of 1 %", "1 % of the mean size is added to every output", _with(effects.plus, 0.01)),
    _own("nan-one-call", "NaN in 1 % of the calls", "one call in a hundred has no finite output", _with(effects.constant, math.nan),
         "1bit-MONSTER/1bit-MONSTER#393", "ELS-RD/kernl#170", where=Where(share=0.01)),
    _own("wrong-from-call-8", "wrong from the ninth call on", "each layer's outputs are shifted by a head from its ninth call on",
         effects.heads_rolled, where=Where(from_call=8)),
)  # fmt: skip
_EQUIVALENT = (
    _same("identity", "identity", "nothing is changed", lambda call, out: out),
    _same("rounded-again", "rounded again", "the output is converted to float64 and back", effects.rounded_again),
    _same("negative-zeros", "negative zeros", "zeros are negative", effects.negative_zeros),
    _same("keys-reversed", "keys in reverse order", "the keys are summed in reverse order", changes(effects.keys_reversed)),
    _same("pages-swapped", "pages swapped", "two cached pages are swapped, keys and values alike", changes(effects.pages_swapped)),
    _same("splits-merged", "parts merged", "parts of 64 keys are merged by their log-sum-exp", changes(effects.splits_merged)),
    _same("key-mean-subtracted", "mean of K subtracted", "the mean of K is subtracted, which no softmax sees",
          changes(effects.key_mean_subtracted)),
    _same("scale-in-queries", "scale in Q", "q is scaled instead of the scores", changes(effects.scale_in_queries)),
    _same("mask-missing-for-one-query", "no mask for one query", "the mask is missing where a sequence has one query",
          hypothesis("mask-missing"), Where(phase="decode", new=(1, 1))),
    _same("zero-in-layer-1000", "zero in layer 1000", "a layer that no model has gives zero", lambda call, out: out * 0,
          Where(layers=(1000,))),
    _same("zero-in-batches-of-1000", "zero in batches of 1000", "batches that no run reaches give zero", lambda call, out: out * 0,
          Where(batch=(1000, None))),
)  # fmt: skip

ALL = (
    _MASKS
    + _PREFIX
    + _WINDOWS
    + SCALES
    + HEADS
    + MERGES
    + _BLOCKS
    + BATCHES
    + _NEWEST
    + _QUANTISATION
    + _PRECISION
    + OUTPUTS
    + _EQUIVALENT
)
"""Every seeded fault, by group."""


def public_reports(hypothesis: str) -> tuple[str, ...]:
    """Give the addresses of public reports of bugs that a hypothesis names; empty if none is known."""
    faults = (fault for fault in ALL if fault.hypothesis == hypothesis)
    return tuple(dict.fromkeys(link for fault in faults for link in fault.links))
