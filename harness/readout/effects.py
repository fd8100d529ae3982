"""Effects on scores and outputs: what is multiplied, added, limited, mixed in or kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import torch

from assay.harness.attention.oracle import sequences
from assay.harness.bugs.bug import Change, Compute, changing
from assay.harness.bugs.family import FAMILY
from assay.harness.bugs.precision import denominator_rounded, inputs_rounded, scores_rounded, weights_rounded
from assay.harness.localize.reading import Numbers, softmax
from assay.harness.readout.features import Ints
from assay.harness.readout.formulas import Formula
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, einsum


@dataclass(frozen=True)
class Multiplied(Effect):
    """Scores are multiplied, or the output, or both.

    Attributes:
        scores: by what the scores are; None for 1.
        output: by what the output is; None for 1.
    """

    scores: Formula | None = None
    output: Formula | None = None
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        out = queries.right
        if self.scores is not None:
            out = queries.attended(queries.own_scores * self.scores.of(queries).reshape(*queries.shape, 1))
        return out if self.output is None else out * self.output.of(queries).reshape(*queries.shape, 1)


@dataclass(frozen=True)
class Constant(Effect):
    """The output is this number, which may be NaN or infinite."""

    value: float
    cost: float = 0.5

    def outputs(self, queries: Queries) -> Numbers:
        return np.full_like(queries.right, self.value)


MERGES = ("equal", "max", "base2", "base-e", "mean")
"""See `Merged.law`: log-sum-exps that are lost, replaced by the maximum, read in the wrong base (kernels that use exp2 store them
in base 2); and K that is smoothed by parts, which shifts the scores of each."""
PART_MERGES = ("cached base2", "cached base-e", "new base2", "new base-e")
"""The same where only cached, or only new keys go through a kernel that uses another base, which is how the two are cascaded."""
PARTS = (0, 8, 16, 32, 64, 128, 256)
"""See `Merged.block`: tiles and splits of common kernels."""


@dataclass(frozen=True)
class Merged(Effect):
    """Parts of the keys are merged with wrong weights.

    Attributes:
        block: keys of a part; 0 for cached and new keys.
        law: "equal", all parts count alike; "base2" or "base-e", their log-sum-exp is taken for that of the other base ("cached
            base2" or "new base2" and so on, that of cached or new keys alone); "max", their largest score in place of their
            log-sum-exp; "mean", each part's scores lose their mean over its keys' K.
    """

    block: int
    law: str
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        return queries.attended(queries.own_scores + self._offsets(queries))

    def _offsets(self, queries: Queries) -> Numbers:
        """Return what is added to each score, [rows, heads, total_k]."""
        label, cached = self._parts(queries)
        offsets = np.zeros_like(queries.own_scores)
        logits = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
        for part in np.unique(label):
            here = label == part
            if self.law == "mean":
                k = queries.k[here].mean(0)[queries.own]  # [heads, dim]
                offsets[:, :, here] = -queries.call.scale * einsum("thd,hd->th", queries.q, k)[..., None]
            elif not self.law.startswith("new " if cached[here].any() else "cached "):
                offsets[:, :, here] = self._offset(logits[:, :, here])[..., None]
        return offsets

    def _parts(self, queries: Queries) -> tuple[Ints, Ints]:
        """A number for the part of each packed key, and whether a key is cached, int64 [total_k]."""
        starts = np.array(queries.call.cu_seqlens_k.tolist())
        of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        j = np.arange(len(of)) - starts[of]
        cached = (j < np.array(queries.call.prefixes)[of]).astype(np.int64)
        part = j // self.block if self.block else 1 - cached
        return of * (part.max() + 1) + part, cached

    def _offset(self, logits: Numbers) -> Numbers:
        """Return what is added to the scores of a part, [rows, heads, keys] -> [rows, heads]; 0 for parts that are not seen."""
        top = logits.max(-1)
        safe = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.log(np.exp(logits - safe[..., None]).sum(-1)) + safe
            off = {
                "equal": -lse,
                "max": safe - lse,
                "base2": lse * (1 / math.log(2) - 1),
                "base-e": lse * (math.log(2) - 1),
            }[self.law.removeprefix("cached ").removeprefix("new ")]
        return np.where(np.isfinite(off), off, 0.0)


@dataclass(frozen=True)
class BlockScale(Effect):
    """K or V of a block of keys are dequantised with the scale of another block, as far as there is one.

    A scale is the largest size of a number in a block of one kv head, as symmetric quantisation takes it. The effect is data of the
    call: it can be computed, but not read from weights, since values that say who they are change the scale.

    Attributes:
        what: "k" or "v".
        size: keys of a block.
        whose: one of `WHOSE`.
    """

    what: str
    size: int
    whose: str
    cost: float = 2.0

    def outputs(self, queries: Queries) -> Numbers:
        factors = self._factors(queries)[:, queries.own].T[None]
        if self.what == "k":
            return queries.attended(queries.own_scores * factors)
        weights: Numbers = softmax(queries.own_scores, queries.visible[:, None]) * factors
        return queries.of_own(weights)

    def _factors(self, queries: Queries) -> Numbers:
        """The wrong scale over the right one of each key, [total_k, kv heads]."""
        x = np.abs(queries.k if self.what == "k" else queries.values).max(-1)
        factors: Numbers = np.ones_like(x)
        keys = [k for _, k in sequences(queries.call)]
        scales = [np.maximum.reduceat(x[k], np.arange(0, k.stop - k.start, self.size), axis=0) for k in keys]
        every = np.concatenate(scales)
        for seq, (k, own) in enumerate(zip(keys, scales, strict=True)):
            block = np.arange(k.stop - k.start) // self.size
            wrong = self._wrong(seq, k.start, block, scales, every)
            factors[k] = wrong / np.maximum(own[block], 1e-30)
        return factors

    def _wrong(self, seq: int, start: int, block: Ints, scales: Sequence[Numbers], every: Numbers) -> Numbers:
        """The scale that each key of a sequence gets, [keys, kv heads]."""
        own = scales[seq]
        if self.whose in ("next", "previous"):
            return own[np.clip(block + (1 if self.whose == "next" else -1), 0, len(own) - 1)]
        if self.whose == "packed":
            return every[np.minimum(start // self.size + block, len(every) - 1)]
        if self.whose == "first block":
            return own[0 * block]
        if self.whose == "next head":
            return np.roll(own, -1, 1)[block]
        other = scales[0 if self.whose == "first sequence" else max(seq - 1, 0)]
        return np.where((block < len(other))[:, None], other[np.minimum(block, len(other) - 1)], own[block])


WHOSE = {
    "next": "the next block of {size} keys", "previous": "the previous block of {size} keys",
    "packed": "block cu_seqlens_k[b] // {size} + j // {size} of all blocks of {size} keys of the batch",
    "first block": "the first block of {size} keys", "next head": "its block of {size} keys of the next kv head",
    "first sequence": "the same block of {size} keys of the first sequence",
    "previous sequence": "the same block of {size} keys of the previous sequence",
}  # fmt: skip
"""Whose scale a block may get: one beside it, or one that is found by a wrong index into the scales of the batch."""
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
"""Keys of a block that quantisations and pages have."""


def block_scales() -> Iterator[BlockScale]:
    """Yield every block and every other one."""
    yield from (BlockScale(what, size, whose) for what, size, whose in product("kv", BLOCK_SIZES, WHOSE))


@dataclass(frozen=True)
class KnownBug(Effect):
    """The effect of a known bug.

    Attributes:
        id: of the hypothesis, or of a rounding.
        about: what goes wrong, as a sentence without its full stop.
        compute: (call, rows) -> output.
    """

    id: str
    about: str
    compute: Compute = field(compare=False)
    cost: float = 3.0

    def __reduce__(self) -> tuple[object, ...]:
        return _known, (self.id,)  # formulas of hypotheses cannot be sent to another process

    def outputs(self, queries: Queries) -> Numbers:
        out = self.compute(queries.call, torch.from_numpy(queries.rows).to(queries.call.q.device))
        if out is None:
            return queries.right
        return out.double().cpu().numpy()


_FORMATS = (
    (torch.float8_e4m3fn, "FP8 E4M3"),
    (torch.float8_e5m2, "FP8 E5M2"),
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
)
"""The formats in which kernels keep Q, K, V, scores and weights."""
_INPUTS = (
    ("q", "Q is"), ("k", "K is"), ("v", "V is"), ("kv", "K and V are"), ("qk", "Q and K are"), ("qkv", "Q, K and V are")
)  # fmt: skip
"""What is rounded together: one input, the KV cache, what is multiplied first, or all."""
_ROUNDING_COST = 3.5
"""More than that of a hypothesis: on calls without much cancellation, one rounding is much like another."""


def known_effects() -> list[KnownBug]:
    """The effects of all hypotheses, and of roundings that nobody declared."""
    effects = [KnownBug(bug.id, bug.about, bug.compute) for bug in FAMILY]
    for dtype, name in _FORMATS:
        for what, words in _INPUTS:
            effects.append(
                _rounding(f"rounded-{what}-{name}", f"{words} rounded to {name}", partial(inputs_rounded, dtype, what))
            )
        effects += [
            _rounding(f"rounded-p-{name}", f"softmax weights are rounded to {name}", partial(weights_rounded, dtype)),
            _rounding(
                f"rounded-s-{name}", f"scores are rounded to {name} before the softmax", partial(scores_rounded, dtype)
            ),
        ]
    effects.append(
        _rounding("rounded-sum-bfloat16", "the softmax denominator is accumulated in bfloat16", denominator_rounded)
    )
    return effects


def _rounding(id: str, about: str, change: Change) -> KnownBug:
    return KnownBug(id, about, changing(change), cost=_ROUNDING_COST)


def _known(id: str) -> KnownBug:
    return next(effect for effect in known_effects() if effect.id == id)
