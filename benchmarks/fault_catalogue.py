"""The catalogue of seeded faults: bugs that were reported in public, and what has no report yet, each where such bugs sit.

A link is a report of a bug of the same kind; the fault is a model of it in PyTorch. For faults without a link none is known.
Equivalent faults change nothing that matters: to flag one is a false alarm. `seeded_faults.py` runs all of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Batch, Change, changing, changing_in_batch, keys_of, links, seeing
from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import with_noise
from assay.harness.attention.bugs.precision import denominator_rounded, inputs_rounded, scores_rounded, weights_rounded
from assay.harness.attention.bugs.scales import scaled
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, attend, scores

Effect = Callable[[AttentionCall, Tensor], "Tensor | None"]
"""(call, right output) -> wrong output, in the shape of the right one; None where the bug cannot show. NaN in it is meant."""
_ANY = (0, None)
"""A range without limits."""


@dataclass(frozen=True)
class Recomputed:
    """An effect that computes the output anew, in float64: the noise of the output that it is given is not in it.

    What the bug leaves undefined (a query that sees no key) is zero, as kernels leave it.

    Attributes:
        compute: what the bug computes; None where it cannot show.
    """

    compute: Callable[[AttentionCall], Tensor | None]

    def __call__(self, call: AttentionCall, out: Tensor) -> Tensor | None:
        wrong = self.compute(call)
        return None if wrong is None else wrong.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))


@dataclass(frozen=True)
class Where:
    """The place where a fault is seeded. Every restriction must hold; the defaults restrict nothing.

    Attributes:
        layers: layers; None for all.
        heads: q heads, negative ones counted from the last; None for all.
        phase: "extend" or "decode"; empty for both.
        new: (least, most) new tokens of a sequence; None for no limit.
        prefix: (least, most) cached tokens of a sequence.
        length: (least, most) tokens of a sequence, cached ones included.
        batch: (least, most) sequences of a call.
        unaligned: the length of a sequence is no multiple of this; 1 restricts nothing.
        from_call: first wrong call of each layer and phase, counted from 0 at the last `SeededFault.restart`.
        share: share of the calls that are wrong, drawn by `seed`.
        seed: seed of that draw.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    phase: str = ""
    new: tuple[int, int | None] = _ANY
    prefix: tuple[int, int | None] = _ANY
    length: tuple[int, int | None] = _ANY
    batch: tuple[int, int | None] = _ANY
    unaligned: int = 1
    from_call: int = 0
    share: float = 1.0
    seed: int = 0

    @property
    def counts(self) -> bool:
        """True if it depends on the number of calls before."""
        return self.from_call > 0 or self.share < 1

    def chooses(self, call: AttentionCall, number: int) -> bool:
        """Return True if a call is included, as the number-th of its layer and phase; sequences and heads are ignored."""
        return (
            (self.layers is None or call.layer in self.layers)
            and self.phase in ("", call.phase)
            and _within(len(call.cu_seqlens_q) - 1, self.batch)
            and number >= self.from_call
            and (
                self.share >= 1
                or random.Random(f"{self.seed} {call.layer} {call.phase} {number}").random() < self.share
            )
        )

    def sequences(self, call: AttentionCall) -> list[int]:
        """Return the indices of the sequences that it is restricted to."""
        return [
            b
            for b, (new, length) in enumerate(zip(call.lens_q, call.lens_k, strict=True))
            if _within(new, self.new)
            and _within(length - new, self.prefix)
            and _within(length, self.length)
            and (self.unaligned == 1 or length % self.unaligned)
        ]

    def q_heads(self, heads: int) -> list[int]:
        """Return the q heads that it is restricted to, of this many."""
        return (
            list(range(heads)) if self.heads is None else sorted({h % heads for h in self.heads if -heads <= h < heads})
        )


def _within(number: int, limits: tuple[int, int | None]) -> bool:
    least, most = limits
    return number >= least and (most is None or number <= most)


@dataclass(frozen=True)
class SeededFault:
    """One bug, seeded on purpose into right outputs.

    Attributes:
        id: stable, unique name, kebab-case.
        title: name in prose.
        about: what goes wrong, as a sentence without its full stop.
        effect: what the bug makes of a right output.
        links: public reports of such a bug; empty if none is known.
        where: where it is seeded.
        hypothesis: id of the hypothesis that it was made of; empty if none describes it.
        equivalent: whether it changes nothing that matters, so that it must not be flagged.
    """

    id: str
    title: str
    about: str
    effect: Effect
    links: tuple[str, ...] = ()
    where: Where = Where()
    hypothesis: str = ""
    equivalent: bool = False
    _calls: Counter[tuple[int, str]] = field(default_factory=Counter, compare=False, repr=False)

    def restart(self) -> None:
        """Count calls from the beginning: whoever switches a fault on calls this first."""
        self._calls.clear()

    def apply(self, call: AttentionCall, out: Tensor, truth: Tensor | None = None) -> Tensor:
        """Compute the output of a call with the fault.

        Args:
            call: the call.
            out: its right output, [total_q, num_q_heads, head_dim_v]; it is not written to.
            truth: the exact output, float64, if `out` has the noise of a quantisation, which the wrong output then has as well;
                None if it only rounds.

        Returns:
            `out` itself where the fault does not show, else a changed copy in its dtype.
        """
        number = self._calls[call.layer, call.phase]
        self._calls[call.layer, call.phase] += 1
        if not self.where.chooses(call, number):
            return out
        sequences, heads = self.where.sequences(call), self.where.q_heads(out.shape[1])
        if not sequences or not heads:
            return out
        wrong = self.effect(call, out)
        if wrong is None:
            return out
        if truth is not None and isinstance(self.effect, Recomputed):
            wrong = with_noise(wrong, out, truth)
        return _mixed(out, wrong.to(out.dtype), _rows(call, sequences), heads)


def _rows(call: AttentionCall, sequences: Sequence[int]) -> Tensor:
    edges = list(pairwise(call.cu_seqlens_q.tolist()))
    return torch.cat([torch.arange(*edges[b], device=call.q.device) for b in sequences])


def _mixed(out: Tensor, wrong: Tensor, rows: Tensor, heads: Sequence[int]) -> Tensor:
    chosen = torch.tensor(heads, device=out.device)
    mixed = out.clone()
    mixed[rows[:, None], chosen] = wrong[rows[:, None], chosen]
    return mixed


def of_bug(id: str, suffix: str = "", where: Where | None = None, only: str = "") -> SeededFault:
    """Make a fault of a known bug; `suffix` and `only` state in id and prose where it is seeded."""
    of = BY_ID[id]
    title = f"{of.title}, {only}" if only else of.title
    return SeededFault(id + suffix, title, of.about, Recomputed(of.compute), links(*of.reports), where or Where(), id)


def own(
    id: str, title: str, about: str, effect: Effect, *reports: str, where: Where | None = None, equivalent: bool = False
) -> SeededFault:
    """Make a fault that is of no known bug. `reports` are those of a `Bug`, the rest is as in `SeededFault`."""
    return SeededFault(id, title, about, effect, links(*reports), where or Where(), equivalent=equivalent)


def changes(change: Change) -> Effect:
    """Make an effect of a change of each sequence by itself."""
    return Recomputed(changing(change))


def constant(value: float) -> Effect:
    """Make the effect that every output is this number, which may be NaN or infinite."""
    return lambda call, out: torch.full_like(out, value)


# Keys of a part in the faults of merging.
_SPLIT = 64
PAGE = 16
"""Tokens of a page of the KV cache in the faults of pages."""
# Keys of a block in the faults of blocks.
_BLOCK = 64


def _first_block_again(r: Request) -> Request | None:
    index = keys_of(r) % _BLOCK
    return replace(r, k=r.k[:, index], v=r.v[:, index]) if r.len_k > _BLOCK else None


def _values_of_another_page(r: Request) -> Request | None:
    return replace(r, v=first_pages_swapped(r.v)) if r.len_k >= 2 * PAGE else None


def first_pages_swapped(x: Tensor) -> Tensor:
    """Swap the first two pages of K or V, [heads, tokens, dim]."""
    return torch.cat([x[:, PAGE : 2 * PAGE], x[:, :PAGE], x[:, 2 * PAGE :]], 1)


def _zero_page_past_the_end(r: Request) -> Request | None:
    if r.len_k % PAGE:
        return None
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, PAGE)) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.nn.functional.pad(r.visible, (0, PAGE), value=True))


def _zero_at_page_borders(call: AttentionCall, out: Tensor) -> Tensor | None:
    wrong, crosses_one = out.clone(), False
    for (start, stop), prefix in zip(pairwise(call.cu_seqlens_q.tolist()), call.prefixes, strict=True):
        first = start + -prefix % PAGE
        if first < stop:
            wrong[first:stop:PAGE], crosses_one = 0, True
    return wrong if crosses_one else None


_BLOCKS = (
    of_bug("last-block-lost-16"),
    of_bug("last-block-lost-64"),
    of_bug("last-block-lost-128"),
    own("block-skipped", "block skipped", "the second block of 64 keys is not seen",
        changes(seeing(lambda r, keys: keys // _BLOCK != 1))),
    own("first-block-again", "first block read again", "every block of 64 keys is read from the first",
        changes(_first_block_again), "sgl-project/sglang#25556"),
    own("values-of-another-page", "values of another page", "the values of the first two pages are swapped",
        changes(_values_of_another_page)),
    own("zero-page-past-the-end", "page read past the end", "a sequence that fills its last page sees a page of zeros",
        changes(_zero_page_past_the_end), "pegainfer-project/pegainfer#291"),
    own("page-borders-zero", "page borders zero", "the first query of a page has no output", _zero_at_page_borders),
    own("nan-off-block", "NaN off a block", "sequences whose length is no multiple of 64 have no finite output",
        constant(math.nan), "thu-ml/SageAttention!377", where=Where(phase="extend", unaligned=64)),
    own("nan-below-64", "NaN below 64 tokens", "sequences of less than 64 tokens have no finite output",
        constant(math.nan), "woct0rdho/SageAttention!98", where=Where(length=(0, 63))),
)  # fmt: skip


_MASKS = (
    of_bug("mask-top-left"),
    of_bug("mask-top-left", suffix="-layer-2", where=Where(layers=(2,)),
        only="in layer 2"),
    of_bug("mask-top-left", suffix="-head-3", where=Where(heads=(3,)), only="in head 3"),
    of_bug("mask-top-left", suffix="-long-prefix", where=Where(prefix=(64, None)), only="behind 64 cached tokens or more"),
    of_bug("mask-top-left", suffix="-share", where=Where(share=0.1, seed=1), only="in a tenth of the calls"),
    of_bug("mask-one-key-too-many"),
    of_bug("mask-one-key-too-few"),
    of_bug("mask-missing"),
    of_bug("mask-missing", suffix="-batch", where=Where(batch=(2, None)), only="in batches"),
)  # fmt: skip
_WINDOWS = (
    of_bug("sliding-window-16", suffix="-decode", where=Where(phase="decode"), only="in decode"),
    of_bug("sliding-window-128"),
    of_bug("sliding-window-512"),
    of_bug("sliding-window-2048"),
)  # fmt: skip


def merged(r: Request, edges: list[int], wrong: Callable[[Tensor], Tensor] = lambda lse: lse) -> Tensor:
    """Attend to each part of the keys alone, and merge the parts, [num_q_heads, asked, head_dim_v].

    Args:
        r: the sequence.
        edges: where parts begin, and the end of the last one.
        wrong: log-sum-exps of the parts, [parts, num_q_heads, asked, 1] -> what they are merged by.
    """
    logits, values = scores(r), r.v[r.kv_head]
    outs, sums = [], []
    for start, stop in pairwise(edges):
        part = logits[..., start:stop]
        lse = part.logsumexp(-1, keepdim=True)
        weights = (part - torch.where(lse.isfinite(), lse, 0.0)).exp()
        outs.append(weights @ values[:, start:stop])
        sums.append(lse)
    return (torch.stack(outs) * wrong(torch.stack(sums)).softmax(0).nan_to_num(0.0)).sum(0)


def splits_of(r: Request) -> list[int]:
    """Return where the parts of a sequence's keys begin, and the end of the last one."""
    return [*range(0, r.len_k, _SPLIT), r.len_k]


def with_a_sink(r: Request) -> Tensor:
    """Attend to the keys, and to one more with score 0 and value 0, [num_q_heads, asked, head_dim_v]."""
    return attend(r) * torch.sigmoid(scores(r).logsumexp(-1, keepdim=True))


def _prefix_merged_in_base_2(r: Request) -> Tensor | None:
    return merged(r, [0, r.prefix, r.len_k], lambda lse: lse / math.log(2)) if r.prefix else None


def _splits_merged(wrong: Callable[[Tensor], Tensor]) -> Effect:
    """Merge the parts of the keys by something else than their log-sum-exps, which `merged` gives."""
    return changes(lambda r: merged(r, splits_of(r), wrong) if r.len_k > _SPLIT else None)


def _by_next_head(r: Request) -> Tensor | None:
    if r.len_k <= _SPLIT or len(r.kv_head) < 2:
        return None
    return merged(r, splits_of(r), lambda lse: lse.roll(-1, 1))


def _last_split_lost(r: Request) -> Tensor | None:
    return merged(r, splits_of(r)[:-1]) if r.len_k > _SPLIT else None


def _empty_part_counted(batch: Batch, b: int) -> Tensor | None:
    return with_a_sink(batch[b]) if not batch[b].prefix and len(batch) > 1 else None


def _first_sequence_everywhere(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give every sequence the output of the first one, as far as that reaches."""
    edges = list(pairwise(call.cu_seqlens_q.tolist()))
    first = out[slice(*edges[0])]
    if len(edges) < 2:
        return None
    rows = torch.cat([torch.arange(stop - start) % max(1, len(first)) for start, stop in edges])
    return first[rows.to(out.device)]


_MERGES = (
    of_bug("later-sequences-unwritten"),
    of_bug("merged-at-wrong-strides"),
    own("lse-in-base-2", "log-sum-exp in base 2",
        "cached and new keys are merged by a base-2 log-sum-exp that is taken for base e", changes(_prefix_merged_in_base_2),
        "sgl-project/sglang#40903", "sgl-project/sglang!35045", "flashinfer-ai/flashinfer#4485"),
    own("splits-merged-equally", "parts merged equally", "parts of 64 keys count alike",
        _splits_merged(lambda lse: torch.where(lse.isfinite(), 0.0, lse)), "flashinfer-ai/flashinfer!50",
        "flashinfer-ai/flashinfer!58"),
    own("splits-merged-by-next-head", "parts merged by the next head", "parts of 64 keys are merged by the next head's log-sum-exp",
        changes(_by_next_head), "vllm-project/vllm#22103", "Dao-AILab/flash-attention#87"),
    own("last-split-lost", "last part of the keys lost", "the last part of 64 keys is not merged", changes(_last_split_lost),
        "gittensor-ai-lab/sparkinfer!714"),
    own("empty-part-counted", "empty part counted", "in a batch, an empty cached part has weight",
        Recomputed(changing_in_batch(_empty_part_counted)), "sgl-project/sglang#22688", "flashinfer-ai/flashinfer#3047",
        "sgl-project/sglang#10526"),
    own("first-sequence-everywhere", "first sequence everywhere", "decode gives every sequence the output of the first",
        _first_sequence_everywhere, "vllm-project/flash-attention!176", where=Where(phase="decode")),
)  # fmt: skip


def _last_page_zero(r: Request) -> Request | None:
    if not r.prefix or r.prefix % PAGE:
        return None
    k, v = r.k.clone(), r.v.clone()
    for t in (k, v):
        t[:, r.prefix - PAGE : r.prefix] = 0
    return replace(r, k=k, v=v)


def _overwritten(r: Request) -> Request | None:
    """Put the newest tokens into the first page of the cached prefix: a stale writer came last."""
    if r.prefix < PAGE or r.len_k < 2 * PAGE:
        return None
    k, v = (torch.cat([t[:, -PAGE:], t[:, PAGE:]], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


def _twice(r: Request) -> Request | None:
    if not r.prefix:
        return None
    k, v = (torch.cat([t[:, : r.prefix], t], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.cat([r.visible[:, : r.prefix], r.visible], 1))


def _without_last(by: int, r: Request, keys: Tensor) -> Tensor:
    """Return the keys of a sequence that is taken to be `by` tokens shorter; all of one that has no more."""
    return keys < r.len_k - by * (r.len_k > by)


_PREFIXES = (
    of_bug("prefix-dropped"),
    of_bug("prefix-dropped", suffix="-layer-0", where=Where(layers=(0,)), only="in layer 0"),
    of_bug("prefix-dropped", suffix="-few-new", where=Where(phase="extend", new=(2, 16)), only="for 2 to 16 new tokens"),
    of_bug("prefix-one-token-late"),
    of_bug("prefix-one-token-early"),
    of_bug("prefix-values-shifted"),
    own("prefix-last-page-zero", "last page of the prefix zero", "a prefix that ends with a page loses that page",
        changes(_last_page_zero), "sgl-project/sglang#22819"),
    own("prefix-overwritten", "prefix overwritten", "the first page of the prefix holds the newest tokens",
        changes(_overwritten), "sgl-project/sglang#24527", "vllm-project/vllm!37152"),
    own("prefix-cut", "prefix cut", "only the last 32 cached tokens are seen",
        changes(seeing(lambda r, keys: keys >= r.prefix - 32)), "vllm-project/vllm#26042", where=Where(phase="extend")),
    own("prefix-twice", "prefix seen twice", "every query sees the cached prefix twice", changes(_twice)),
)  # fmt: skip
_NEWEST = (
    of_bug("newest-token-stale", suffix="-decode", where=Where(phase="decode"), only="in decode"),
    of_bug("newest-token-zero", suffix="-decode-layer-1", where=Where(phase="decode", layers=(1,)), only="in decode in layer 1"),
    own("plan-stale", "stale plan", "from its sixth call on, decode does not see the newest key",
        changes(seeing(partial(_without_last, 1))), "vllm-project/vllm#46329", where=Where(phase="decode", from_call=5)),
    own("metadata-stale", "stale metadata", "in batches, sequences are taken to be 8 tokens shorter",
        changes(seeing(partial(_without_last, 8))), "vllm-project/vllm#47042", "vllm-project/vllm#47567",
        "vllm-project/vllm#47766", where=Where(batch=(2, None))),
    own("first-key-lost", "first key lost", "no query sees the first key",
        changes(seeing(lambda r, keys: keys > 0 if r.len_k > 1 else keys >= 0))),
    own("sink-added", "sink added", "every query also attends to nothing", changes(with_a_sink), "sgl-project/sglang#11634"),
)  # fmt: skip


_SCALES = (
    of_bug("scale-missing"),
    of_bug("scale-twice"),
    of_bug("scale-doubled"),
    of_bug("scale-of-all-heads"),
    of_bug("exp2-without-log2e"),
    of_bug("exp-with-log2e"),
    own("scale-inverted", "scale inverted", "scores are multiplied by the root of head_dim", changes(scaled(lambda r: 1 / r.scale)),
        "AI-Hypercomputer/maxtext#1370"),
    own("scale-of-absorbed-dim", "scale of the absorbed dimension", "the scale is that of 576 instead of 256 dimensions",
        changes(scaled(lambda r: r.scale * math.sqrt(256 / 576))), "ollama/ollama!13893", "NVIDIA/Megatron-LM#1429"),
    own("scale-of-queries-applied", "scale of quantised Q applied", "a q that is not quantised is scaled as if it were",
        changes(scaled(lambda r: r.scale * 1.25)), "vllm-project/vllm#53754"),
    own("scale-one-percent", "scale one percent too large", "scores are 1 % too large", changes(scaled(lambda r: r.scale * 1.01))),
)  # fmt: skip


def heads_rolled(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give each q head the output of the next one."""
    return out.roll(-1, 1) if out.shape[1] > 1 else None


def _last_dims_zero(call: AttentionCall, out: Tensor) -> Tensor | None:
    if out.shape[2] <= _DIMS:
        return None
    wrong = out.clone()
    wrong[..., _DIMS:] = 0
    return wrong


_DIMS = 64
_HEADS = (
    of_bug("kv-heads-interleaved"),
    of_bug("kv-head-next-group"),
    of_bug("kv-head-previous-group"),
    own("heads-rolled", "heads rolled", "each q head has the output of the next", heads_rolled),
    own("head-3-zero", "head 3 zero", "q head 3 has no output", constant(0.0), where=Where(heads=(3,))),
    own("dims-beyond-64-zero", "dimensions beyond 64 zero", "only 64 dimensions of the values are computed", _last_dims_zero),
)  # fmt: skip


def _rows_rolled(call: AttentionCall, out: Tensor) -> Tensor | None:
    return out.roll(1, 0) if len(out) > 1 else None


def _last_query_copied(call: AttentionCall, out: Tensor) -> Tensor | None:
    wrong, copied = out.clone(), False
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        if stop - start > 1:
            wrong[stop - 1], copied = out[stop - 2], True
    return wrong if copied else None


_LEAKS = (
    of_bug("leak-keys-previous"),
    of_bug("leak-values-next"),
    of_bug("leak-keys-values-next"),
    of_bug("leak-prefix-previous"),
    of_bug("leak-prefix-next"),
    of_bug("leak-last-key-previous"),
    of_bug("leak-first-key-next"),
    of_bug("leak-all-keys-previous", suffix="-layer-3", where=Where(layers=(3,)),
        only="in layer 3"),
    own("rows-rolled", "rows of padding counted", "in batches, each query has the output of the one before", _rows_rolled,
        "sgl-project/sglang#9806", "sgl-project/sglang#10414", where=Where(batch=(2, None))),
    own("last-query-copied", "last query copied", "the last new token has the output of the one before", _last_query_copied),
)  # fmt: skip


def _other_heads_value_scale(call: AttentionCall, out: Tensor) -> Tensor | None:
    kv_heads = call.v.shape[1]
    if kv_heads < 2:
        return None
    scale = call.v.abs().amax((0, 2)).double()
    wrong = (scale.roll(-1) / scale)[call.heads.kv_head(torch.arange(out.shape[1], device=scale.device))]
    return out * wrong[None, :, None].to(out.dtype)


_QUANTISATION = (
    of_bug("k-scale-previous-block"),
    of_bug("k-scale-next-block"),
    of_bug("q-scale-next-block"),
    of_bug("k-smoothed-by-block"),
    of_bug("k-smoothed-new-only"),
    of_bug("k-smoothing-lost"),
    own("value-scale-ignored", "scale of V ignored", "the scale of FP8 values is not applied", lambda call, out: out * 2.0,
        "flashinfer-ai/flashinfer#4979", "flashinfer-ai/flashinfer#1023", "sgl-project/sglang!20705"),
    own("key-scale-ignored", "scale of K ignored", "the scale of FP8 keys is not applied",
        changes(scaled(lambda r: r.scale * 0.25)), "NVIDIA/TensorRT-LLM#16916", "flashinfer-ai/flashinfer#4979"),
    own("value-scale-of-next-head", "scale of V of the next head", "values are dequantised with the scale of the next kv head",
        _other_heads_value_scale),
)  # fmt: skip


_PRECISION = (
    own("queries-in-fp8", "Q in FP8", "q is rounded to FP8, undeclared", changes(partial(inputs_rounded, torch.float8_e4m3fn, "q")),
        "sgl-project/sglang!28144"),
    own("kv-in-fp8-from-97", "K and V in FP8 from 97 tokens on", "longer sequences are read from an FP8 cache, undeclared",
        changes(partial(inputs_rounded, torch.float8_e4m3fn, "kv")), "sgl-project/sglang#25790", where=Where(length=(97, None))),
    own("weights-in-fp8", "weights in FP8", "attention weights are rounded to FP8, undeclared",
        changes(partial(weights_rounded, torch.float8_e4m3fn))),
    of_bug("accumulator-fp16"),
    of_bug("accumulator-bf16"),
    of_bug("values-saturate-fp8-e4m3"),
    own("scores-in-bf16", "scores in bfloat16", "scores are rounded to bfloat16 before the softmax",
        changes(partial(scores_rounded, torch.bfloat16)), "mlc-ai/mlc-llm!1870"),
    own("denominator-in-bf16", "denominator in bfloat16", "the sum of the weights is kept in bfloat16",
        changes(denominator_rounded)),
    own("overflow-beyond-256", "overflow beyond 256 keys", "sequences of more than 256 tokens have infinite outputs",
        constant(math.inf), "mlc-ai/mlc-llm!1870", "ikawrakow/ik_llama.cpp!1196", where=Where(length=(257, None), heads=(0,))),
)  # fmt: skip


def _zero_beyond_128(call: AttentionCall, out: Tensor) -> Tensor | None:
    wrong, beyond = out.clone(), False
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        if stop - start > 128:
            wrong[start + 128 : stop], beyond = 0, True
    return wrong if beyond else None


_OUTPUTS = (
    own("zero-beyond-128-new", "zero beyond 128 new tokens", "new tokens from the 129th on have no output", _zero_beyond_128,
        "Dao-AILab/flash-attention#2199"),
    own("zero-beyond-512", "zero beyond 512 tokens", "sequences of more than 512 tokens have no output", constant(0.0),
        "thu-ml/SageAttention#386", where=Where(length=(513, None))),
    own("layer-2-zero", "layer 2 zero", "layer 2 has no output", constant(0.0), where=Where(layers=(2,))),
    own("gain-0.1-percent", "gain of 0.1 %", "every output is 0.1 % too large", lambda call, out: out * 1.001),
    own("shrink-4.5-percent", "shrunk by 4.5 %", "every output is 4.5 % too small", lambda call, out: out * 0.955,
        where=Where(layers=(1,))),
    own("bias-1-percent", "bias of 1 %", "1 % of the mean size is added to every output",
        lambda call, out: out + 0.01 * out.abs().mean()),
    own("nan-one-call", "NaN in 1 % of the calls", "one call in a hundred has no finite output", constant(math.nan),
        "1bit-MONSTER/1bit-MONSTER#393", "ELS-RD/kernl#170", where=Where(share=0.01)),
    own("wrong-from-call-8", "wrong from the ninth call on", "each layer's outputs are shifted by a head from its ninth call on",
        heads_rolled, where=Where(from_call=8)),
)  # fmt: skip


def _pages_swapped(r: Request) -> Request | None:
    """Swap the first two pages of the cached prefix, keys and values alike: no query can tell."""
    return replace(r, k=first_pages_swapped(r.k), v=first_pages_swapped(r.v)) if r.prefix >= 2 * PAGE else None


_same = partial(own, equivalent=True)
_EQUIVALENT = (
    _same("identity", "identity", "nothing is changed", lambda call, out: out),
    _same("rounded-again", "rounded again", "the output is converted to float64 and back", lambda call, out: out.double()),
    _same("negative-zeros", "negative zeros", "zeros are negative",
          lambda call, out: torch.where(out == 0, -torch.zeros_like(out), out)),
    _same("keys-reversed", "keys in reverse order", "the keys are summed in reverse order",
          changes(lambda r: replace(r, k=r.k.flip(1), v=r.v.flip(1), visible=r.visible.flip(1)))),
    _same("pages-swapped", "pages swapped", "two cached pages are swapped, keys and values alike", changes(_pages_swapped)),
    _same("splits-merged", "parts merged", "parts of 64 keys are merged by their log-sum-exp",
          changes(lambda r: merged(r, splits_of(r)))),
    _same("key-mean-subtracted", "mean of K subtracted", "the mean of K is subtracted, which no softmax sees",
          changes(lambda r: replace(r, k=r.k - r.k.mean(1, keepdim=True)))),
    _same("scale-in-queries", "scale in Q", "q is scaled instead of the scores",
          changes(lambda r: replace(r, q=r.q * r.scale, scale=1.0))),
    replace(of_bug("mask-missing"), id="mask-missing-for-one-query", title="no mask for one query",
            about="the mask is missing where a sequence has one query", links=(), hypothesis="", equivalent=True,
            where=Where(phase="decode", new=(1, 1))),
    _same("zero-in-layer-1000", "zero in layer 1000", "a layer that no model has gives zero", lambda call, out: out * 0,
          where=Where(layers=(1000,))),
    _same("zero-in-batches-of-1000", "zero in batches of 1000", "batches that no run reaches give zero", lambda call, out: out * 0,
          where=Where(batch=(1000, None))),
)  # fmt: skip

_GROUPS = (
    _MASKS, _PREFIXES, _WINDOWS, _SCALES, _HEADS, _MERGES, _BLOCKS, _LEAKS, _NEWEST, _QUANTISATION, _PRECISION, _OUTPUTS,
    _EQUIVALENT,
)  # fmt: skip
CATALOGUE: dict[str, SeededFault] = {fault.id: fault for group in _GROUPS for fault in group}
"""Every seeded fault, by id."""
