"""Blocks of output dims that a kernel computes otherwise than the others: which dims, and what the kernel does in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.readout.dims import DIM_TERMS, dim_table, dims_where
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import Condition, Literal, Term, mine
from assay.harness.readout.operators import Effect
from assay.harness.readout.probing import Prober
from assay.harness.readout.queries import Flags, Queries
from assay.harness.readout.reading import Numbers
from assay.harness.readout.samples import Sample

_PARTS = 8
"""Most calls for one of a block's own: 16 of 128 dims. To read fewer dims apart would take most of a budget."""
_WRONG = 3.0
"""Error of one element from which on it is wrong, relative to the mean size of its output, as a multiple of what is wrong for a
whole output: the largest of normal errors is about as many times their mean."""
_SHARE = 0.2
"""Share of the wrong outputs, relative to the dim that is wrong most often, in which each dim of a block is wrong."""
_TERMS = (*DIM_TERMS, Term("half", cost=0.2, words=True))


@dataclass(frozen=True)
class DimBlock:
    """A block of output dims.

    Attributes:
        rule: on the dims; see `dims.dim_table`.
    """

    rule: Condition

    def dims(self, count: int) -> Ints:
        """The dims of the block, of this many, int64 ascending."""
        found: Ints = np.flatnonzero(self.rule.holds(_table(count)))
        return found

    @property
    def words(self) -> str:
        """The block in words: "output dims 32 to 63"."""
        said = " and ".join(_where(literal) for literal in self.rule.literals)
        return f"output dims {'but those ' * self.rule.negated}{said}"


@dataclass(frozen=True)
class InDims(Effect):
    """An effect that shows in a block of output dims; the others are right.

    Attributes:
        block: the dims.
        effect: what happens there.
    """

    block: DimBlock
    effect: Effect
    cost: float = field(default=2.0, compare=False)

    def outputs(self, queries: Queries) -> Numbers:
        found = queries.right.copy()
        dims = self.block.dims(found.shape[-1])
        found[..., dims] = self.effect.outputs(queries)[..., dims]
        return found


def block_apart(samples: Sequence[Sample]) -> DimBlock | None:
    """The block of output dims that is wrong wherever a kernel is, while the others are right; None if there is no such block.

    A block that is zero is left to `dims.lost_dims`, which says so without asking the kernel.
    """
    seen: dict[int, list[Flags]] = {}
    zero, never = True, set[int]()
    for sample in samples:
        given, right = (x.reshape(len(sample.bad), -1)[sample.bad] for x in (sample.actual, sample.queries.right))
        if not len(given):
            never.add(right.shape[1])
            continue
        size = np.abs(right).mean(-1, keepdims=True)
        wrong = ~(np.abs(given - right) <= _WRONG * sample.error * size)
        zero = zero and bool((given[wrong] == 0).all())
        seen.setdefault(given.shape[1], []).append(wrong)
    if zero:
        return None
    shares = {count: np.concatenate(flags).mean(0) for count, flags in seen.items()}
    blocks = {count: share > _SHARE * share.max() for count, share in shares.items()}
    if any((share[~blocks[count]] > 0).any() or blocks[count].mean() < 1 / _PARTS for count, share in shares.items()):
        return None
    tables = [_table(count) for count in blocks]
    table = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
    rules = mine(table, np.concatenate(list(blocks.values())), _TERMS)
    found = [DimBlock(rule) for rule in rules if not rule.always]
    # A head_dim in which nothing is wrong has no dims of the block, or was not asked for where the block is wrong.
    without = [one for one in found if not any(len(one.dims(count)) for count in never - set(seen))]
    return next(iter([*without, *found]), None)


@dataclass
class BlockProber(Prober):
    """A kernel as if all of its output dims were computed as those of a block are.

    Each call is several of the kernel's: the values of other dims take the place of those of the block, one part after the other.
    An effect that changes no dim for another is the same for both. A call whose head_dim_v has no dim of the block has no answer.

    Attributes:
        whole: the kernel, whose budget is used.
        block: the dims.
    """

    whole: Prober = field(kw_only=True)
    block: DimBlock = field(kw_only=True)

    def __call__(self, call: AttentionCall, as_it_lies: bool = False) -> Tensor | None:
        self.check_time()
        count = call.v.shape[2]
        block = torch.from_numpy(self.block.dims(count)).to(call.v.device)
        if not len(block):
            return None
        out = torch.zeros(*call.q.shape[:2], count, dtype=torch.float64)
        for start in range(0, count, len(block)):
            dims = slice(start, min(start + len(block), count))
            place = block[: dims.stop - start]
            v = call.v.clone()
            v[..., place] = call.v[..., dims]
            given = self.whole(replace(call, v=v), as_it_lies)
            if given is None:
                return None
            out[..., dims] = given[..., place.cpu()]
        self.asked += 1
        self.of_kind[call.layer, call.phase] += 1
        self.history = self.history.after(call, out)
        return out


def _table(count: int) -> dict[str, Ints]:
    return {**dim_table(count), "half": 2 * np.arange(count) // count}


def _where(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    if term.name == "half":
        return f"in the {'second' if (op == '==') == (value == 1) else 'first'} half"
    if term.block > 1 and op == "==":
        return f"{value * term.block} to {(value + 1) * term.block - 1}"
    return dims_where(literal)
