"""Merging: outputs of parts of the keys become that of all keys, by their log-sum-exps. An operation of its own, with its matrix.

The merged output is attention again: of one query whose scores are the log-sum-exps of the parts and whose values are their
outputs. A kernel that merges is therefore checked as one that attends is, by the same oracle, within bounds of the same ensembles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Kernel, KernelRefused, Mask, Outputs, cumulative
from assay.harness.attention.kernels import Declaration
from assay.harness.attention.matrix import DTYPES, Case

SIGNATURE = "a function of one argument with .outs [parts, tokens, heads, head_dim] and .lses [parts, tokens, heads]"
"""What merges, in words for who names something else."""
_EMPTY = -1e30
"""The score that stands for the log-sum-exp of a part without keys, -inf: an infinite key has no length, and so no rounding."""
_PARTS = (2, 3, 4, 5, 8)
_TOKENS = (1, 7, 64, 200)
_HEADS_AND_DIMS = ((4, 64), (8, 128), (16, 128), (3, 512))


@dataclass(frozen=True)
class MergeCall:
    """Outputs and log-sum-exps of parts of the keys, as kernels that declare "lse" return them.

    Attributes:
        outs: [parts, tokens, heads, head_dim]. That of a part of which a query sees no key is finite, and has no meaning.
        lses: float32 [parts, tokens, heads], -inf for a query that sees no key of the part.
    """

    outs: Tensor
    lses: Tensor


MergeKernel = Callable[[MergeCall], Outputs]
"""Returns the output of all keys, [tokens, heads, head_dim] in the dtype of `MergeCall.outs`, and its log-sum-exp, float32 [tokens,
heads]. What it returns for a query that sees no key in any part is not looked at; it must not spoil that of others."""


def merged(call: MergeCall) -> Outputs:
    """Merge in float64: sum of exp(lse - LSE) * out over the parts, with LSE the log-sum-exp of their log-sum-exps."""
    lses = call.lses.double()
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(lse.isinf(), 0.0, lse)).exp()
    return Outputs((weights[..., None] * call.outs.double()).sum(0), lse)


def _as_attention(call: MergeCall, nowhere: int = 0) -> AttentionCall:
    """Write a merge as attention: a sequence for each token, a key for each part.

    Args:
        call: the merge.
        nowhere: tokens at the end that see no key in any part: they are padding.
    """
    parts, tokens, heads, dim = call.outs.shape
    seen = tokens - nowhere
    scores = torch.where(call.lses.isinf(), _EMPTY, call.lses)[:, :seen]
    return AttentionCall(
        q=call.outs.new_ones(tokens, heads, 1),
        k=scores.transpose(0, 1).reshape(seen * parts, heads, 1),
        v=call.outs[:, :seen].transpose(0, 1).reshape(seen * parts, heads, dim),
        cu_seqlens_q=cumulative([1] * seen, call.outs.device),
        cu_seqlens_k=cumulative([parts] * seen, call.outs.device),
        spec=CallSpec(1.0, Mask(causal=False), phase="decode", padded_rows=nowhere),
    )


def _as_merge(call: AttentionCall) -> MergeCall:
    """Read a merge back from its attention.

    Raises:
        KernelRefused: it is not the attention of a merge.
    """
    lens, (heads, dim) = set(call.lens_k), call.v.shape[1:]
    if len(lens) != 1 or set(call.lens_q) != {1} or call.q.shape[2] != 1:
        raise KernelRefused("this is no merge: all tokens have the same number of parts")
    nowhere = call.spec.padded_rows
    by_token = (call.rows, lens.pop(), heads)
    outs, scores = call.v.reshape(*by_token, dim).transpose(0, 1), call.k.reshape(by_token).transpose(0, 1)
    lses = torch.where(scores <= _EMPTY, -torch.inf, scores)
    outs = torch.cat([outs, outs.new_zeros(len(outs), nowhere, heads, dim)], 1)
    lses = torch.cat([lses, lses.new_full((len(outs), nowhere, heads), -torch.inf)], 1)
    return MergeCall(outs.contiguous(), lses.contiguous())


def merging(kernel: MergeKernel) -> Kernel:
    """Make a kernel of the contract of one that merges."""

    def attends(call: AttentionCall) -> Outputs:
        given = _as_merge(call)
        try:
            return kernel(given)
        except AttributeError as error:
            if error.obj is not given:
                raise
            raise KernelRefused(f"it takes no merge, which has no {error.name}; expected {SIGNATURE}") from error

    attends.__qualname__ = attends.__name__ = getattr(kernel, "__qualname__", type(kernel).__name__)
    vars(attends)["assay"] = Declaration(phases=("decode",), prefix=False, features=("padding", "lse"))
    return attends


def _near(parts: int, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
    return 3 * torch.randn(parts, tokens, heads, generator=draw)


def _far(parts: int, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
    # exp(-200) is 0 in float32, and exp(100) beyond it: a maximum has to be subtracted, and that of all parts.
    return 100 * torch.randn(parts, tokens, heads, generator=draw)


def _high(parts: int, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
    return 200 + _near(parts, tokens, heads, draw)


def _some_empty(parts: int, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
    # A part is empty for all heads of a token; one of them is not, in turn.
    empty = torch.rand(parts, tokens, 1, generator=draw) < 0.5
    empty[torch.arange(tokens) % parts, torch.arange(tokens)] = False
    return _near(parts, tokens, heads, draw).masked_fill(empty, -torch.inf)


def _one_empty(parts: int, tokens: int, heads: int, draw: torch.Generator) -> Tensor:
    lses = _near(parts, tokens, heads, draw)
    lses[0] = -torch.inf  # as where no token of a batch has a cached prefix
    return lses


_LSES: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "normal": _near, "far apart": _far, "near 200": _high, "some -inf": _some_empty, "first part -inf": _one_empty,
    "some tokens without a key": _near,
}  # fmt: skip
"""Log-sum-exps of the parts."""
_LARGE = ("far apart", "near 200")
"""Those that are no part of the matrix in float32. Right merges that divide by the exponential of the total, or that raise 2 to
powers, round numbers of their size, and a weight is off by 2 ** -24 of it: more than bounds of float32 allow."""


def merge_cases(device: str = "cpu", seed: int = 0) -> list[Case]:
    """Make the matrix of merges: 2 to 8 parts, with every kind of log-sum-exps in every dtype, but large ones in float32."""
    return list(_cases(device, seed))


def _cases(device: str, seed: int) -> Iterator[Case]:
    tokens, shapes, number = cycle(_TOKENS), cycle(_HEADS_AND_DIMS), seed * 10_000
    for parts in _PARTS:
        for lses in _LSES:
            for dtype in DTYPES:
                count, (heads, dim), number = next(tokens), next(shapes), number + 1
                if dtype == torch.float32 and lses in _LARGE:
                    next(tokens)
                    continue
                condition = {
                    "phase": "decode", "parts": str(parts), "tokens": str(count), "heads": f"MHA {heads}/{heads}",
                    "head_dim": str(dim), "dtype": str(dtype).removeprefix("torch."), "log-sum-exps": lses,
                }  # fmt: skip
                name = f"merge-{parts}_parts-{count}_tokens-{heads}_heads-d{dim}-{condition['dtype']}-{lses}"
                make = partial(_make, parts, count, heads, dim, dtype, lses, number, device)
                yield Case(name.replace(" ", "_"), condition, make, ("parts",) if parts > 2 else ())
                next(tokens)
            next(shapes)


def _make(
    parts: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, lses: str, seed: int, device: str
) -> AttentionCall:
    draw = torch.Generator().manual_seed(seed)
    nowhere = 3 if lses == "some tokens without a key" else 0
    outs = torch.randn(parts, tokens + nowhere, heads, dim, generator=draw)
    drawn = _LSES[lses](parts, tokens + nowhere, heads, draw)
    if nowhere:
        drawn[:, -nowhere:] = -torch.inf
    outs = torch.where(drawn.isinf()[..., None], 57.0, outs).to(dtype)
    call = MergeCall(outs.to(device), drawn.to(device))
    return _as_attention(call, nowhere)
