"""Honest implementations: simulates the possible outputs of correct kernels of a noise family on a call.

Correct kernels of one family differ in block sizes, in where blocks begin, in the order of additions, in the maximum that they
subtract before exponentials (of the row, of the blocks so far, or of a part of the keys that is merged later, as in split-KV
kernels), in the tokens over which they average K, and in the phase of every rounding. Each member of an ensemble draws these
independently. A rounding is simulated with a random phase (integers: a dither that is subtracted again; floating point: a random
factor that is divided out), so that it errs like another implementation's rounding of the same width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.noise import FORMATS, NoiseFamily, NumberFormat, Quantised
from assay.harness.attention.oracle import numbers_at_once
from assay.harness.attention.sequence_groups import SequenceGroup, sequence_groups

MEMBERS = 16
"""Default number of members of an ensemble."""
# The bits of a float32's exponent.
_EXPONENT = 0x7F800000
# Standard deviations of the errors of sums and exponents, in units of the accumulator's eps. Adding n numbers one after the other
# rounds each partial sum by eps / sqrt(12) of its size; for a sum that grows like a random walk that makes eps / sqrt(12) *
# sqrt(n / 2) of the sum's size, or 0.2 sqrt(n) eps, and for a score 0.2 eps |q| |k|. The exponential of a GPU is accurate to 2
# ulp (CUDA C++ Programming Guide, intrinsic functions), about half of eps as a standard deviation.
_SCORE_ROUNDINGS, _EXP_ROUNDINGS, _SUM_ROUNDINGS = 0.2, 0.5, 0.2
# The error of capping and tempering scores, relative to a score: in float32 a standard deviation of two roundings, for a
# quotient, a tanh or a logarithm, and a product; for 16-bit inputs, kernels such as FlashAttention's use tanh.approx, whose
# relative error is up to 2**-11 (PTX ISA), with half of it as the standard deviation here. Triton kernels of SGLang and vLLM
# compute tanh(x) as 2 sigmoid(2x) - 1, whose error in float32 is 0.35 to 0.45 eps of the cap for any score (measured, caps of 1
# to 50).
_MODIFIER_ROUNDINGS, _FAST_TANH, _CAP_ROUNDINGS = 2.0, 2.0**-11, 0.4


@dataclass(frozen=True)
class _Way:
    """One way to implement attention, shared by a group of members.

    Attributes:
        q_block: queries that share a scale.
        k_block: keys that share a scale, and keys between two rescalings of the accumulator.
        maximum: "row", "running" (of all blocks so far) or "block" (of each block alone, merged later).
        backwards: whether blocks are visited from the last to the first.
        shifted: whether blocks begin in the middle of those of other ways.
        over_batch: whether K is averaged over the whole batch instead of its sequence.
        rounded_sum: whether the weights are summed after rounding instead of before.
    """

    q_block: int
    k_block: int
    maximum: str
    backwards: bool = False
    shifted: bool = False
    over_batch: bool = False
    rounded_sum: bool = False


_WAYS = (
    _Way(128, 64, "running", over_batch=True),
    _Way(64, 64, "block", shifted=True, rounded_sum=True),
    _Way(128, 128, "row"),
    _Way(64, 32, "running", backwards=True, over_batch=True),
)


def here(family: NoiseFamily, call: AttentionCall) -> NoiseFamily:
    """Return the family as the call's device implements it.

    In float32, a kernel may use TF32 wherever the device has it (a CUDA device of compute capability 8.0 or above): it is the
    default of Triton's ``tl.dot`` and of many libraries. Elsewhere, no correct kernel has its noise without declaring it. If a
    call has stored K and V, kernels do not store them again, except for products with Q or weights in equally few bits. If it is
    on the grid, storing is exact. A cast to the dtype of K and V reduces the bits only if these are stored in fewer bits.
    """
    if call.spec.on_grid:
        family = NoiseFamily(accumulation=family.accumulation)
    if family.beside_fp8 and call.stored is None:
        family = replace(family, q=None, p=None)
    if call.stored is not None:
        # k and v already include the error of storing them; a product in few bits still has both of its operands in few bits.
        family = replace(family, k=family.q and family.k, v=family.p and family.v)
    if family.accumulation != "fp32" or call.q.dtype != torch.float32 or call.q.device.type != "cuda":
        return family
    ampere = torch.cuda.get_device_capability(call.q.device) >= (8, 0)
    return replace(family, accumulation="tf32") if ampere else family


def members_by_way(call: AttentionCall, family: NoiseFamily, members: int = MEMBERS) -> list[int]:
    """Count the members that implement attention in each way, in the order of `honest_outputs`.

    If scales depend on blocks, the four ways count as one: each has few members, whose draws vary more than the ways do.
    """
    used = here(family, call)
    return [members] if _depends_on_blocks(used) else _by_way(members, len(_ways(used)))


def _by_way(members: int, ways: int) -> list[int]:
    return [len(range(number, members, ways)) for number in range(min(ways, members))]


def honest_outputs(
    call: AttentionCall,
    family: NoiseFamily,
    rows: Tensor | None = None,
    members: int = MEMBERS,
    seed: int = 0,
    stretch: float = 1.0,
    lse: bool = False,
) -> Tensor:
    """Compute the outputs of honest implementations of a family on a call. The same arguments give the same outputs.

    Memory does not grow with the call beyond the result itself and `oracle.NUMBERS_AT_ONCE`, or one member's keys.

    Args:
        call: the call.
        family: the noise family.
        rows: packed query rows, int64 [rows], in increasing order, by default all.
        members: number of implementations.
        seed: the seed of all draws.
        stretch: factor on the error of storing Q and K, to simulate a rare draw.
        lse: whether to return the log-sum-exps, with a last axis of one, instead of the outputs.

    Returns:
        float64 [members, rows, num_q_heads, head_dim_v], on the call's device. Not finite where a format overflows.
    """
    used = here(family, call)
    work = torch.promote_types(call.q.dtype, torch.float32)
    generator = torch.Generator(call.q.device).manual_seed(seed)
    largest = {name: getattr(call, name).abs().amax().to(work) for name in "qkv" if getattr(call, name).numel()}
    mean = call.k.to(work).mean(0)
    width = 1 if lse else call.v.shape[2]
    whole = lse or bool(call.spec.softcap or call.spec.sinks)  # where subtracting a mean from K is to change no score
    result, groups, first = _nothing(call, rows, members, width), _groups(call, rows), 0
    for way, count in zip(_ways(used), _by_way(members, len(_ways(used))), strict=False):
        draw = _Draw(generator, used, way, call.q.dtype, work, largest, mean, stretch, lse, whole)
        for group in groups:
            _answer(group, call, draw, result[first : first + count])
        first += count
    return result


def added_key_by_key(call: AttentionCall, rows: Tensor | None = None) -> Tensor:
    """Compute attention with the online softmax of blocks of one key, in float32, from the first key to the last and back.

    The members of `honest_outputs` draw the rounding of sums as random walks. A sum that one key dominates rounds small terms the
    same way each time, and loses those below half an ulp.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order, by default all.

    Returns:
        float64 [2, rows, num_q_heads, head_dim_v], on the call's device.
    """
    result = _nothing(call, rows, 2, call.v.shape[2])
    for group in _groups(call, rows):
        k, v = group.k.float(), group.v.float()
        for backwards, into in zip((False, True), result, strict=True):
            outs = []
            for some, seen in group.blocks(numbers_at_once(k.device)):
                scores = call.scale * group.queries(group.q, some).float() @ k[:, : seen.shape[-1]].transpose(1, 2)
                sinks = group.of_heads(call.spec.sinks, some)
                scores = group.modified(scores, seen, some)
                outs.append(group.rows_first(_online(scores, v, backwards, sinks)))
            group.put(outs, into)
    return result


def _online(scores: Tensor, v: Tensor, backwards: bool, sinks: Tensor | None) -> Tensor:
    """Apply softmax over single keys, sinks first: scores [heads, rows, keys], v [heads, len_k, dim] -> [heads, rows, dim]."""
    top = torch.full_like(scores[..., :1], -math.inf) if sinks is None else sinks[..., None].to(scores)
    total = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    sums = v.new_zeros(*scores.shape[:2], v.shape[2])
    keys = range(scores.shape[-1])
    for key in reversed(keys) if backwards else keys:
        new = torch.maximum(top, scores[..., key : key + 1])
        safe = new.nan_to_num(neginf=0.0)
        fade, weight = (top - safe).exp_(), (scores[..., key : key + 1] - safe).exp_()
        total, sums, top = total.mul_(fade).add_(weight), sums.mul_(fade).addcmul_(weight, v[:, key, None]), new
    return sums / total


def sample_rows(call: AttentionCall, at_most: int) -> Tensor:
    """Choose representative queries of a call.

    These are the first and the last of each sequence, those around the borders of blocks of 128 and of 64 tokens (of queries,
    and of keys), and random ones, which are the same each time.

    Args:
        call: the call.
        at_most: most queries, divided evenly among the sequences, with at least one each.

    Returns:
        Packed query rows, int64 [rows], in increasing order, on the call's device; all rows if there are at most `at_most`.
    """
    total, device = call.rows, call.q.device
    if total <= at_most:
        return torch.arange(total, device=device)
    generator = torch.Generator().manual_seed(0)
    share = max(1, at_most // max(1, len(call.lens_q)))
    chosen: list[int] = []
    start = 0
    for new, prefix in zip(call.lens_q, call.prefixes, strict=True):
        borders = [at for size in (128, 64) for at in range(0, prefix + new + 1, size)]
        near = {0: None, new - 1: None}
        for at in torch.tensor(borders)[torch.randperm(len(borders), generator=generator)].tolist():
            near |= dict.fromkeys((at - prefix - 1, at - prefix, at - 1, at))
        fixed = [row for row in near if 0 <= row < new][: (share + 1) // 2]
        known = set(fixed)
        others = [row for row in torch.randperm(new, generator=generator).tolist() if row not in known]
        chosen += sorted(start + row for row in fixed + others[: share - len(fixed)])
        start += new
    return torch.tensor(chosen, dtype=torch.int64, device=device)


def _ways(family: NoiseFamily) -> tuple[_Way, ...]:
    return _WAYS if _depends_on_blocks(family) else _WAYS[:2]


def _depends_on_blocks(family: NoiseFamily) -> bool:
    stored = [quantised for quantised in (family.q, family.k, family.v, family.p) if quantised is not None]
    return (
        any(quantised.per == "block" and FORMATS[quantised.format].scaled for quantised in stored)
        or family.p is not None
    )


def _groups(call: AttentionCall, rows: Tensor | None) -> list[SequenceGroup]:
    """List groups that are small enough to compute several members at a time."""
    return sequence_groups(call, rows, numbers_at_once(call.k.device) // 4)


def _nothing(call: AttentionCall, rows: Tensor | None, members: int, width: int) -> Tensor:
    """Allocate zeros for the results, float64 [members, rows, num_q_heads, width]."""
    asked = call.rows if rows is None else len(rows)
    return torch.zeros(members, asked, call.q.shape[1], width, dtype=torch.float64, device=call.q.device)


@dataclass(frozen=True)
class _Draw:
    """The random source of one way's members, and the dtypes of their computation."""

    generator: torch.Generator
    family: NoiseFamily
    way: _Way
    dtype: torch.dtype
    work: torch.dtype
    largest: dict[str, Tensor]
    mean: Tensor
    stretch: float
    lse: bool
    whole_scores: bool

    @property
    def eps(self) -> float:
        """Machine epsilon of the accumulator."""
        return torch.finfo(torch.float16 if self.family.accumulation == "fp16" else self.work).eps

    @property
    def _cuts_operands(self) -> bool:
        """True if operands lose bits of their dtype: in TF32, which holds 16-bit numbers exactly."""
        return self.family.accumulation == "tf32" and self.dtype == torch.float32

    @property
    def scores_are_coarse(self) -> bool:
        """True if storing Q or K in 8 bits or fewer costs a score at least a thousand times as much as its summation."""
        return self.family.accumulation != "fp16" and any(
            stored is not None and FORMATS[stored.format].scaled for stored in (self.family.q, self.family.k)
        )

    @property
    def at_once(self) -> int:
        """Number of products added before a sum is rounded: for sums in fp16, those of one tensor core instruction."""
        return 16 if self.family.accumulation == "fp16" else 1

    def uniform(self, *shape: int) -> Tensor:
        """Draw a number in [0, 1)."""
        return torch.rand(*shape, generator=self.generator, device=self.generator.device, dtype=self.work)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device, dtype=self.work)

    def phases(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the phases of the roundings of x [..., rows, columns]: one by row and one by column, each in [0, 1)."""
        # The fractions of their sums are uniform, and those of two elements are independent: as good as one draw for each element,
        # and far cheaper.
        return self.uniform(*x.shape[:-1], 1), self.uniform(*x.shape[:-2], 1, x.shape[-1])

    def factors(self, x: Tensor) -> Tensor:
        """Draw factors of (1/4, 1] that broadcast to x [..., rows, columns]: the phases of a floating-point rounding."""
        rows, columns = self.phases(x)
        return (-rows - columns).exp2_()

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Round x to a 16-bit dtype with a random phase."""
        if torch.finfo(dtype).bits >= 32:
            return x
        factors = self.factors(x)
        return (x * factors).to(dtype).to(x.dtype).div_(factors)

    def operand(self, x: Tensor) -> Tensor:
        """Convert x to an operand of a product."""
        # TF32 truncates it to 10 bits of mantissa, as tensor cores do with plain float32, here with a random phase. Kernels that
        # round instead have half of this noise.
        if not self._cuts_operands:
            return x
        factors = self.factors(x)
        return ((x * factors).view(torch.int32) & ~0x1FFF).view(torch.float32) / factors

    def stored(self, x: Tensor, what: str, members: int, lens: Tensor) -> Tensor:
        """Store x [heads, tokens, dim], 0 from `lens` [heads] on, as each member does: [members, heads, tokens, dim]."""
        how: Quantised | None = getattr(self.family, what)
        x = x.to(self.work)
        every = x.expand(members, *x.shape)
        if how is None or not x.numel():  # without keys, a format has nothing to round
            return self.operand(every) if self._cuts_operands else x[None]
        if not FORMATS[how.format].scaled:
            return x[None] if self.dtype == torch.float16 else self.rounded(every, torch.float16)
        largest = self.largest[what]
        if how.smooth:
            inside = torch.arange(x.shape[1], device=x.device)[:, None] < lens[:, None, None]
            by_head = self.mean.repeat(len(x) // len(self.mean), 1)[:, None]
            mean = by_head if self.way.over_batch else x.sum(1, keepdim=True) / lens[:, None, None]
            smoothed = torch.where(inside, x - mean, 0.0)
            every, largest = smoothed.expand(members, *x.shape), smoothed.abs().amax()
        scale = self.scale(every[0], how, largest, self.way.q_block if what == "q" else self.way.k_block)
        rounded = self.quantised((every[0] / scale).expand(every.shape), how).mul_(scale)  # divided once for all
        rounded = rounded if what == "v" or self.stretch == 1.0 else every + self.stretch * (rounded - every)
        return rounded + mean if how.smooth and self.whole_scores else rounded

    def scale(self, x: Tensor, how: Quantised, largest: Tensor, block: int) -> Tensor:
        """Compute the scale of each token of x [heads, tokens, dim], broadcasting to it."""
        if how.per == "none":
            return x.new_ones(1)
        if how.per == "tensor":
            top = largest.expand(1, 1, 1)
        elif how.per == "head":
            top = x.abs().amax((1, 2), keepdim=True)
        else:
            top = x.abs().amax(2, keepdim=True)
            if how.per == "block":
                top = _by_block(top, block, block // 2 * self.way.shifted)
        return torch.where(top == 0, torch.ones_like(top), top) / FORMATS[how.format].largest

    def quantised(self, x: Tensor, how: Quantised) -> Tensor:
        """Round x, already divided by its scale, to its format with a random phase."""
        format = FORMATS[how.format]
        if format.mantissa is None:
            rows, columns = self.phases(x)
            dither = rows + columns
            return (x + dither).round_().sub_(dither)
        factors = self.factors(x)
        return _rounded_to(x * factors, format).div_(factors)


def _by_block(top: Tensor, block: int, shift: int) -> Tensor:
    """Compute the largest of each block of tokens, for each token: [heads, tokens, 1] -> the same shape."""
    tokens = top.shape[1]
    blocks = -(-(tokens + shift) // block)
    padded = torch.nn.functional.pad(top, (0, 0, shift, blocks * block - tokens - shift))
    by_block = padded.view(top.shape[0], blocks, block).amax(2)
    return by_block.repeat_interleave(block, 1)[:, shift : shift + tokens, None]


def _rounded_to(x: Tensor, format: NumberFormat) -> Tensor:
    """Round x to the nearest number of a floating-point format, saturating at its largest."""
    assert format.mantissa is not None
    wide = x.dtype
    x = x.clamp(-format.largest, format.largest).float()
    # The size of x as a power of two, at least that of the least normal number. A sum with 1.5 * 2**(23 - mantissa) times that has
    # the format's spacing. On a CPU, this takes a quarter of the time of a conversion to FP8 and back.
    size = x.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_(min=2.0**format.least)
    coarse = size.mul_(1.5 * 2.0 ** (23 - format.mantissa))
    return x.add_(coarse).sub_(coarse).to(wide)


def _answer(group: SequenceGroup, call: AttentionCall, draw: _Draw, into: Tensor) -> None:
    """Put the members' outputs on a group of sequences into [members, rows, num_q_heads, head_dim_v]."""
    heads, q_heads = group.q.shape[:2]
    scores = heads * q_heads * min(group.rows.shape[1], 64) * group.k.shape[1]
    at_once = max(1, numbers_at_once(group.k.device) // max(scores, group.k.numel(), group.v.numel(), 1))
    for members in torch.split(into, at_once):
        count = len(members)
        q = draw.stored(group.q.flatten(0, 1), "q", count, group.lens_q.repeat_interleave(q_heads))
        q = q.reshape(len(q), heads, q_heads, *q.shape[2:])
        k = draw.stored(group.k, "k", count, group.lens_k)
        v = group.v[None] if draw.lse else draw.stored(group.v, "v", count, group.lens_k)
        group.put(
            [
                group.rows_first(_attend(group, some, seen, (group.queries(q, some), k, v), call, draw, count))
                for some, seen in group.blocks(numbers_at_once(group.k.device) // count)
            ],
            members,
        )


def _attend(
    group: SequenceGroup, some: Tensor, seen: Tensor, stored: tuple[Tensor, Tensor, Tensor], call: AttentionCall, draw: _Draw,
    members: int,
) -> Tensor:  # fmt: skip
    """Compute the attention of each member for some rows, and the keys that they see, [members, kv heads, rows, head_dim_v]."""
    # `some` and `seen` are as `SequenceGroup.blocks` yields them. q, k and v are [members, kv heads, rows or len_k, dim], each of
    # which may have one member for all.
    q, k, v = stored
    keys = seen.shape[-1]
    k, v = k[..., :keys, :], v[..., :keys, :]
    if not keys:  # a part without keys gets one that no query sees
        seen, k, v, keys = pad(seen, (0, 1)), pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), 1
    # Until something is drawn for each member, all of them have the same: it is computed once.
    scores = call.scale * q @ k.transpose(-2, -1)
    if not draw.scores_are_coarse:
        scores = _summed(scores, call.scale * q.norm(dim=-1, keepdim=True), k.norm(dim=-1)[..., None, :], draw, members)
    scores = group.modified(scores, seen, some)
    if call.spec.softcap or call.spec.temperature:
        fast = call.spec.softcap and call.q.dtype.itemsize == 2
        error = _FAST_TANH / 2 if fast else _MODIFIER_ROUNDINGS * torch.finfo(draw.work).eps
        scores = draw.normal(members, *scores.shape[-3:]).mul_(error).add_(1).mul_(scores)
        if call.spec.softcap and not fast:
            error = call.spec.softcap * _CAP_ROUNDINGS * torch.finfo(draw.work).eps
            scores = draw.normal(members, *scores.shape[-3:]).mul_(error).add_(scores)
    top = scores.amax(-1, keepdim=True)
    if (sinks := group.of_heads(call.spec.sinks, some)) is not None:
        top = top.maximum(sinks.to(top.dtype)[..., None])
    if draw.family.p is None:
        exact = scores.sub_(top).exp_()  # a rounding of floating point does not depend on the subtracted maximum
        kept_in = torch.promote_types(draw.dtype, call.k.dtype)  # weights of a merge stay in the float32 of its scores
        weights = draw.operand(draw.rounded(exact.expand(members, -1, -1, -1), kept_in))
        weights = weights if weights.stride(0) else exact  # nothing was drawn
    else:
        tops = _block_tops(scores, top, draw.way)
        weights = (scores - _by_key(tops, draw.way, keys)).exp_()
        raise_to_top = _by_key((tops - top).exp_(), draw.way, keys)
        exact = weights * raise_to_top
        weights = _stored_weights(weights, draw, members).mul_(raise_to_top)
    total = (weights if draw.way.rounded_sum else exact).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.to(top.dtype)[..., None] - top).exp()
    if draw.lse:
        return _log(total, top, group, draw, members)
    if draw.family.merged:
        out = _merged(weights, weights if draw.way.rounded_sum else exact, v, group, draw, members) / total
    else:
        out = ((weights @ v) / total).expand(members, -1, -1, -1)
    if draw.dtype.itemsize > 2 or draw.family.accumulation == "fp16":
        added = (-(-group.lens_k // draw.at_once)).to(out.dtype).sqrt()[:, None, None]
        out = draw.normal(*out.shape).mul_(draw.eps * _SUM_ROUNDINGS * added).add_(1).mul_(out)
    return draw.rounded(out, draw.dtype)


def _summed(scores: Tensor, of_q: Tensor, of_k: Tensor, draw: _Draw, members: int) -> Tensor:
    """Add to scores the errors of their sums and exponentials; `of_q` and `of_k` are the sizes of scaled queries and of keys."""
    if not draw.lse and draw.eps * float(of_q.amax() * of_k.amax()) <= torch.finfo(draw.dtype).eps / 16:
        return scores  # far below the rounding of the output
    errors = scores.abs().mul_(2 * _SCORE_ROUNDINGS * torch.finfo(draw.work).eps)
    errors += _EXP_ROUNDINGS * torch.finfo(draw.work).eps
    errors += (_SCORE_ROUNDINGS * draw.eps / math.sqrt(draw.at_once) * of_q) * of_k
    return draw.normal(members, *scores.shape[1:]).mul_(errors).add_(scores)


def _merged(weights: Tensor, counted: Tensor, v: Tensor, group: SequenceGroup, draw: _Draw, members: int) -> Tensor:
    """Add up weighted values of cached and new keys, each part divided by its sum, rounded and multiplied by it again."""
    # Weights, and how they are counted, are [1 or members, kv heads, rows, keys]. A query that sees only keys of one kind has
    # nothing to merge.
    cached = torch.arange(weights.shape[-1], device=v.device) < (group.lens_k - group.lens_q)[:, None, None]
    parts = cached, ~cached
    totals = [(counted * part).sum(-1, keepdim=True) for part in parts]
    both, sums = (totals[0] > 0) & (totals[1] > 0), v.new_zeros(())
    for part, total in zip(parts, totals, strict=True):
        out = ((weights * part) @ v / total.clamp(min=torch.finfo(total.dtype).tiny)).expand(members, -1, -1, -1)
        sums = sums + torch.where(both, draw.rounded(out, draw.dtype), out) * total
    return sums


def _log(total: Tensor, top: Tensor, group: SequenceGroup, draw: _Draw, members: int) -> Tensor:
    """Compute the log-sum-exp of each member in float32, [members, kv heads, rows, 1], from a sum and the subtracted maximum."""
    added = (-(-group.lens_k // draw.at_once)).to(total.dtype).sqrt()[:, None, None]
    lse = (total.log() + top).expand(members, -1, -1, -1)
    rounded = draw.eps * (_SUM_ROUNDINGS * added + _EXP_ROUNDINGS) + torch.finfo(draw.work).eps * lse.abs().nan_to_num(
        posinf=0.0
    )
    return lse + draw.normal(*lse.shape) * rounded


def _block_tops(scores: Tensor, top: Tensor, way: _Way) -> Tensor:
    """Return the values subtracted from scores [..., rows, keys] before rounding: [..., rows, blocks], or `top` if alike."""
    keys = scores.shape[-1]
    if way.maximum == "row" or keys <= way.k_block:
        return top
    blocks = -(-keys // way.k_block)
    padded = pad(scores, (0, blocks * way.k_block - keys), value=-math.inf)
    tops = padded.reshape(*padded.shape[:-1], blocks, way.k_block).amax(-1)
    if way.maximum == "running":
        tops = (tops.flip(-1).cummax(-1)[0].flip(-1)) if way.backwards else tops.cummax(-1)[0]
    return torch.where(tops.isinf(), top, tops)  # a block whose keys are all masked


def _by_key(by_block: Tensor, way: _Way, keys: int) -> Tensor:
    """Expand [..., blocks] to [..., keys], or to [..., 1] where all keys are alike."""
    return by_block if by_block.shape[-1] == 1 else by_block.repeat_interleave(way.k_block, -1)[..., :keys]


def _stored_weights(weights: Tensor, draw: _Draw, members: int) -> Tensor:
    """Store the weights in [0, 1] as each member does; a format with a scale uses its whole range for 1."""
    how = draw.family.p
    assert how is not None
    if not FORMATS[how.format].scaled:
        return draw.rounded(weights.expand(members, -1, -1, -1), torch.float16)
    top = weights.new_ones(1)
    if how.per == "token":
        top = weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    scale = weights.new_ones(1) if how.per == "none" else top / FORMATS[how.format].largest
    return draw.quantised((weights / scale).expand(members, -1, -1, -1), how).mul_(scale)
