"""Asking a kernel: calls that are made to be read, and a kernel that is asked within a budget."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Kernel, KernelRefused, Mask, cumulative, tensor_of
from assay.harness.attention.declaration import declaration
from assay.harness.attention.kernels import output_fault
from assay.harness.localize.threads import kernel_threads

_Lens = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CallPlan:
    """A call that is made to be read.

    Attributes:
        lens: (new tokens, cached prefix) of each sequence.
        heads: (q heads, kv heads).
        head_dim: of q, k and v.
        dtype: of q, k and v.
        causal: whether the mask is causal.
        layer: the calling layer.
        data: "normal"; "levels": entries of q and K are plus or minus one, and the mean of K over a sequence of more than one key
            is zero, so that symmetric INT8 is exact, with K smoothed or not; "steep": normal, with q times `STEEP`; "values":
            normal, with rows of V of size 0.3 to 30,000; "scores": normal, with rows of K times powers of two up to 4,096.
        seed: of the data.
        value_dim: head_dim of V; 0 for that of q and k.
    """

    lens: _Lens
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    causal: bool = True
    layer: int = 0
    data: str = "normal"
    seed: int = 0
    value_dim: int = 0

    @property
    def phase(self) -> Literal["extend", "decode"]:
        """A call in which each sequence has one new token behind others is decode."""
        return "decode" if all(new == 1 and prefix for new, prefix in self.lens) else "extend"

    @property
    def keys(self) -> int:
        """Keys of all sequences."""
        return sum(new + prefix for new, prefix in self.lens)

    @property
    def size(self) -> int:
        """Cost of reading it: values that are probed, by queries that are computed, and 64 more for what each call costs."""
        return self.keys * self.heads[1] * (64 + sum(new for new, _ in self.lens))

    def make(self, device: str = "cpu") -> AttentionCall:
        """The call."""
        draw = torch.Generator().manual_seed(self.seed)
        new, total = [n for n, _ in self.lens], [n + p for n, p in self.lens]
        (heads, kv_heads), dim = self.heads, self.head_dim
        shape = torch.Size((sum(total), kv_heads, dim))
        if self.data == "levels":
            q = torch.randint(0, 2, (sum(new), heads, dim), generator=draw) * 2.0 - 1
            k = torch.cat([_paired(length, kv_heads, dim, draw) for length in total])
        else:
            q = torch.randn(sum(new), heads, dim, generator=draw)
            k = torch.randn(shape, generator=draw)
            q *= STEEP if self.data == "steep" else 1
        v = torch.randn(*shape[:2], self.value_dim or dim, generator=draw)
        if self.data == "values":
            v *= 10 ** (5 * torch.rand(*shape[:2], 1, generator=draw) - 0.5)
        if self.data == "scores":
            k *= 2 ** torch.randint(0, _POWERS[self.dtype], (*shape[:2], 1), generator=draw)
        q, k, v = (t.to(device, self.dtype) for t in (q, k, v))
        return AttentionCall(
            q, k, v, cumulative(new, device), cumulative(total, device),
            CallSpec(dim**-0.5, Mask(self.causal), self.layer, self.phase),
        )  # fmt: skip


STEEP = 4
"""Factor of q in steep calls: with head_dim 64, scores spread by 4, and those of 100 keys reach down to some 20 below their
maximum, where an exponential may end. The errors of right kernels grow by as much."""
# Share of the calls drawn at random that may have up to 220 new tokens.
_MANY_NEW = 0.15
# Powers of two of scores of all sizes: beyond the largest float16, 65504, but with K within it.
_POWERS = {torch.float32: 16, torch.bfloat16: 16, torch.float16: 13}


def _paired(length: int, heads: int, dim: int, draw: torch.Generator) -> Tensor:
    """Signs in pairs that cancel, in random order, [length, heads, dim]; of an odd number of rows, the first is zero."""
    half = torch.randint(0, 2, (max(1, length // 2), heads, dim), generator=draw) * 2.0 - 1
    if length == 1:
        return half
    both = torch.cat([half, -half])[torch.randperm(2 * len(half), generator=draw)]
    return torch.cat([torch.zeros(length % 2, heads, dim), both])


# Lengths that are always tried: around page and block sizes, with and without a prefix, alone and in batches.
_FIXED: tuple[_Lens, ...] = (
    ((7, 0),), ((40, 0),), ((17, 16),), ((34, 157),), ((5, 64),), ((66, 0),), ((67, 63),), ((129, 0),), ((3, 200),),
    ((12, 33), (7, 0)), ((7, 0), (12, 33)), ((5, 20), (9, 0), (6, 41)), ((40, 10), (3, 100)), ((20, 64), (20, 64)),
    ((1, 3), (30, 0), (2, 17)), ((33, 31), (66, 0)), ((2, 0),), ((130, 70),), ((200, 5),), ((12, 300),), ((1, 0), (6, 1)),
    ((1, 1),), ((1, 15),), ((1, 16),), ((1, 64),), ((1, 130),), ((1, 257),), ((1, 5), (1, 40)), ((1, 40), (1, 5), (1, 90)),
    ((1, 33), (1, 33), (1, 33), (1, 33)), ((1, 127), (1, 128), (1, 129)), ((1, 63), (1, 200)),
)  # fmt: skip
# Lengths of calls without a causal mask.
_NOT_CAUSAL: tuple[_Lens, ...] = (((20, 150),), ((9, 40), (30, 0)), ((70, 60),), ((3, 17),), ((1, 70), (1, 20)))
# Long ones, with few heads.
_LONG: tuple[_Lens, ...] = (((4, 600),), ((600, 0),), ((1, 700),), ((2, 1100),), ((1, 2200),), ((2, 4200),))
# q and kv heads: groups of 2, 4 and 1, one kv head for all, and counts that are no powers of two.
_HEADS = ((4, 2), (8, 2), (4, 4), (4, 1), (6, 3))
# Lengths of calls with steep scores.
_STEEP: tuple[_Lens, ...] = (((40, 200),), ((1, 260),), ((30, 0), (9, 150)))
# Lengths of calls with values and scores of all sizes.
_OF_ALL_SIZES: tuple[_Lens, ...] = (((9, 0),), ((5, 20),), ((1, 40),), ((4, 8), (7, 0)))
# Sizes of pages and blocks.
_EDGES = (1, 2, 8, 16, 32, 64, 128, 192, 256)


def repeated_plans(data: str, dtype: torch.dtype) -> list[CallPlan]:
    """Calls of a few lengths, one after the other: what a kernel does in every so many calls, or from one on, shows in them."""
    of_one = [CallPlan(((6, 9 + n % 5),), dtype=dtype, data=data, seed=3000 + n) for n in range(8)]
    of_two = [CallPlan(((5, 13 + n % 3), (4, 8 + n % 5)), dtype=dtype, data=data, seed=3050 + n) for n in range(8)]
    decode = [
        CallPlan(((1, 19 + n % 3), (1, 7 + n % 4)), dtype=dtype, data=data, layer=n // 4 % 2, seed=3100 + n)
        for n in range(12)
    ]
    # Batches come first: a fault that begins at a call and shows only in batches would else seem to have been there always.
    return [*of_two[:5], *decode[:5], *of_one, *decode[5:], *of_two[5:]]


def fixed_plans(data: str, dtype: torch.dtype, long: bool = True) -> list[CallPlan]:
    """The calls that are always tried."""
    plans = [
        CallPlan(lens, _HEADS[n % 5], 128 if n % 7 == 6 else 64, dtype, n % 11 != 10, n % 4, data, 1000 + n)
        for n, lens in enumerate(_FIXED)
    ]
    plans += [
        CallPlan(lens, _HEADS[n % 3], 64, dtype, False, n % 4, data, 1500 + n) for n, lens in enumerate(_NOT_CAUSAL)
    ]
    if long:
        plans += [CallPlan(lens, (2, 1), 64, dtype, True, n % 4, data, 2000 + n) for n, lens in enumerate(_LONG)]
    plans.append(CallPlan(((20, 13),), (4, 2), 64, dtype, True, 0, data, 2100, value_dim=32))
    plans += [
        CallPlan(lens, _HEADS[n], dim, dtype, True, n, data, 2200 + dim)
        for dim in _DIMS for n, lens in enumerate((((20, 45),), ((1, 90),), ((33, 0), (4, 70))))
    ]  # fmt: skip
    return plans


def steep_plans(dtype: torch.dtype) -> list[CallPlan]:
    """Make calls whose scores spread widely."""
    return [CallPlan(lens, _HEADS[n % 2], 64, dtype, True, n, "steep", 2600 + n) for n, lens in enumerate(_STEEP)]


def extreme_plans() -> list[CallPlan]:
    """Make calls in float32 with values and with scores of all sizes, in which a format of 8 or 16 bits saturates or overflows."""
    return [
        CallPlan(lens, (4, 2), (64, 128)[n % 2], torch.float32, True, n, data, 2700 + n)
        for data in ("values", "scores") for n, lens in enumerate(_OF_ALL_SIZES)
    ]  # fmt: skip


# Keys of a varied call: reading longer ones takes most of the budget.
_MOST_VARIED = 2500
# Head dims that are tried besides 64 and 128: below a tile's 64, and not a multiple of it.
_DIMS = (32, 80, 96)


def plan_of(call: AttentionCall, data: str = "normal") -> CallPlan:
    """Return the plan of a call that is as large."""
    lens = tuple(zip(call.lens_q, call.prefixes, strict=True))
    heads = (call.q.shape[1], call.k.shape[1])
    return CallPlan(
        lens, heads, call.q.shape[2], call.q.dtype, call.causal, call.layer, data, value_dim=call.v.shape[2]
    )


def varied_plans(plan: CallPlan) -> list[CallPlan]:
    """Calls that differ from one in one thing: a length, the sequences, the heads, the layer, or the data alone."""
    new, prefix = plan.lens[0]
    decode = plan.phase == "decode"
    shorter = () if decode else (max(1, new // 2), new - 1, new + 1, 2 * new)
    firsts = [(now, prefix) for now in shorter if now > 0]
    firsts += [
        (new, cached) for cached in (0, prefix // 2, prefix - 1, prefix + 1, 2 * prefix) if cached >= int(decode)
    ]
    lens: list[_Lens] = [(first, *plan.lens[1:]) for first in firsts]
    lens += [plan.lens[:1], plan.lens[::-1], plan.lens * 2, (plan.lens * 7)[:7]]
    plans = [plan, *(replace(plan, lens=changed) for changed in dict.fromkeys(lens))]
    plans += [replace(plan, heads=heads) for heads in _HEADS]
    plans += [replace(plan, layer=plan.layer + 1)]
    few = [varied for varied in dict.fromkeys(plans) if varied.keys <= _MOST_VARIED]
    return [replace(varied, seed=4000 + number) for number, varied in enumerate(few)]


def drawn_plans(data: str, dtype: torch.dtype, seed: int) -> Iterator[CallPlan]:
    """Calls at random, without an end.

    Up to 90 new tokens, in some calls 220, and a prefix of up to 200, so that a call is computed and read in milliseconds; longer
    ones are in `fixed_plans`. Three in ten are decode; of the others' sequences, three in ten have no prefix.
    """
    draw = random.Random(seed)
    number = 0
    while True:
        number += 1
        decode = draw.random() < 0.3
        count = draw.choice((1, 1, 2, 2, 3, 4))
        most = 220 if draw.random() < _MANY_NEW and count < 3 else 90
        lens = tuple((1 if decode else _length(draw, most), max(int(decode), _length(draw, 200))) for _ in range(count))
        if not decode:
            lens = tuple((max(1, new), prefix * (draw.random() < 0.7)) for new, prefix in lens)
        yield CallPlan(
            lens, draw.choice(_HEADS), draw.choice((*(64,) * 6, 128, 128, *_DIMS)), dtype, draw.random() < 0.93,
            draw.randrange(8), data, seed * 100_000 + number,
        )  # fmt: skip


def _length(draw: random.Random, most: int) -> int:
    """A length: anything, or near the edge of a block."""
    if draw.random() < 0.5:
        return min(most, max(0, draw.choice(_EDGES) + draw.choice((-1, 0, 1))))
    return draw.randrange(most)


REFUSED = "refused"
"""The reason of a call that a kernel raised `KernelRefused` for, in `Prober.raised`."""


class BudgetSpentError(Exception):
    """As many calls were made, or as much time was taken, as was allowed."""


@dataclass
class Prober:
    """A kernel that is asked within a budget. It gets copies of all inputs.

    Attributes:
        kernel: the kernel.
        calls_left: calls that it may still get.
        until: when asking ends, on the clock.
        device: where calls are made.
        shapes: (head_dim, head_dim_v) that it is asked for, besides what it declares; None for any. A kernel that was written for
            one head_dim may write beyond its output with another, which ends the process.
        asked: calls that it got.
        raised: calls that it did not answer, by the reason.
        of_kind: calls that it got, by layer and phase.
        clock: seconds; see `budget_clock`.
    """

    kernel: Kernel
    calls_left: int = 4000
    until: float = field(default_factory=lambda: time.monotonic() + 60.0)
    device: str = "cpu"
    shapes: frozenset[tuple[int, int]] | None = None
    asked: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    of_kind: Counter[tuple[int, str]] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    _shapes_seen: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, call: AttentionCall, as_it_lies: bool = False) -> Tensor | None:
        """The output, float64 [total_q, num_q_heads, head_dim_v] on the CPU.

        None if the kernel raised or broke the contract, or does not declare to compute such calls: then it is not asked. It gets
        copies, unless the tensors are to be given `as_it_lies`, in the same place of memory.

        Raises:
            BudgetSpentError: nothing is left of the budget.
        """
        if self.calls_left <= 0:
            raise BudgetSpentError
        self.check_time()
        if not self._may_ask(call):
            return None
        self.calls_left -= 1
        self.asked += 1
        self.of_kind[call.layer, call.phase] += 1
        given = call if as_it_lies else call.clone()
        begun = self.clock()
        try:
            with kernel_threads():
                out = tensor_of(self.kernel(given))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `assay.harness.localize.guard`
            kind = REFUSED if isinstance(error, KernelRefused) else type(error).__name__
            self.raised[kind] = self.raised.get(kind, 0) + 1
            return None
        finally:
            self._leave_out_compilation(call, self.clock() - begun)
        if fault := output_fault(call, out):
            self.raised[fault] = self.raised.get(fault, 0) + 1
            return None
        return out.detach().to("cpu", torch.float64, copy=True)

    def _leave_out_compilation(self, call: AttentionCall, seconds: float) -> None:
        """Give the time of a first call of its shape on a GPU back: a compiler specialises on dtype, heads and head dims."""
        shape = (call.phase, call.q.dtype, call.q.shape[1:], call.k.shape[1:], call.v.shape[1:], call.causal)
        if self.device != "cpu" and shape not in self._shapes_seen:
            self._shapes_seen.add(shape)
            self.until += seconds

    def _may_ask(self, call: AttentionCall) -> bool:
        """Return True if the kernel computes such calls, as far as it is known or declared."""
        declared, dims = declaration(self.kernel), (call.q.shape[2], call.v.shape[2])
        if call.phase not in declared.phases or declared.excludes(call):
            return False
        stated = declared.head_dims is not None and dims[0] == dims[1]  # and `excludes` did not name it
        return stated or self.shapes is None or dims in self.shapes

    def nearest_shape(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """The (head_dim, head_dim_v) of a call: those that are wanted, or the nearest ones that the kernel may be asked for."""
        stated = {(dim, dim) for dim in declaration(self.kernel).head_dims or ()}
        known = stated | (self.shapes or frozenset())
        wanted = (head_dim, value_dim or head_dim)
        if not known:
            return wanted
        return min(known, key=lambda dims: (abs(dims[0] - wanted[0]) + abs(dims[1] - wanted[1]), dims))

    def check_time(self) -> None:
        """Stop if the time is over.

        Raises:
            BudgetSpentError: it is.
        """
        if self.clock() > self.until:
            raise BudgetSpentError
