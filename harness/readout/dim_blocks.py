"""Blocks of output dims that a kernel computes otherwise than the others: which dims, and what the kernel does in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Asked, Numbers
from assay.harness.readout.dims import DIM_TERMS, dim_table, dims_where
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import Condition, Literal, Term, mine
from assay.harness.readout.operators import Effect
from assay.harness.readout.probing import Prober
from assay.harness.readout.queries import Flags, Queries
from assay.harness.readout.samples import Sample

_PARTS = 8
"""Most calls for one of a block's own: 16 of 128 dims. To read fewer dims apart would take most of a budget."""
_WRONG = 3.0
"""Error of one element from which on it is wrong, relative to the mean size of its output, as a multiple of what is wrong for a
whole output: the largest of normal errors is about as many times their mean."""
_ASKED = 3
"""Calls of each head_dim_v that are asked for to tell dims apart."""
_MOST = 3
"""Most groups of dims: what moves or mixes dims has more, and is no matter of blocks."""
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
        return np.where(self.dims(queries.right.shape[-1]), self.effect.outputs(queries), queries.right)

    def dims(self, count: int) -> Flags:
        return self.block.rule.holds(_table(count))


def blocks_apart(ask: Asked, samples: Sequence[Sample]) -> list[DimBlock]:
    """The blocks of output dims in which a kernel is wrong, each in its own way; empty if it computes all dims alike.

    Values that are the same in all dims come out the same in all dims that are computed alike. Blocks that are zero are left to
    `dims.lost_dims`, which says so without asking the kernel.

    Args:
        ask: the kernel. It is asked for the smallest wrong calls again, with such values.
        samples: what was seen.
    """
    answers: dict[int, list[tuple[Numbers, Numbers]]] = {}
    for sample in sorted((one for one in samples if one.bad.any()), key=lambda one: one.plan.size):
        call, right = sample.queries.call, sample.queries.right[..., :1]
        of_dim = answers.setdefault(call.v.shape[2], [])
        if (
            len(of_dim) < _ASKED
            and (out := ask(replace(call, v=call.v[..., :1].expand_as(call.v).clone()))) is not None
        ):
            size = _WRONG * sample.error * np.abs(sample.queries.right).mean(-1, keepdims=True)
            finite = np.isfinite(given := out.numpy()[sample.queries.rows]).all(-1)
            of_dim.append(((given / size)[finite], (right / size)[finite]))
    never = {sample.queries.call.v.shape[2] for sample in samples} - set(answers)
    groups: dict[int, list[Flags]] = {}
    wrong, zero = set[int](), True
    for count, found in answers.items():
        given, right = (np.concatenate([one[n] for one in found] or [np.zeros((0, count))]) for n in (0, 1))
        groups[count] = _alike(given)
        for number, dims in enumerate(groups[count]):
            if (np.abs(given[:, dims] - right[:, :1]) > 1).any():
                wrong.add(number)
                zero = zero and not given[:, dims].any()
    number_of = max(map(len, groups.values()), default=0)
    if not 1 < number_of <= _MOST or zero:
        return []
    tables = [_table(count) for count in groups]
    table = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
    blocks: list[DimBlock] = []
    for number in sorted(wrong):
        inside = [dims[number] if number < len(dims) else np.zeros(count, bool) for count, dims in groups.items()]
        small = min(dims.mean() for dims in inside if dims.any()) < 1 / _PARTS
        rules = [] if small else mine(table, np.concatenate(inside), _TERMS)
        some = [DimBlock(rule) for rule in rules if not rule.always]
        # A head_dim in which nothing is wrong has no dims of the block, or was not asked for where the block is wrong.
        without = [one for one in some if not any(len(one.dims(count)) for count in never)]
        if not some:
            return []
        blocks.append((without or some)[0])
    return blocks


def _alike(given: Numbers) -> list[Flags]:
    """Groups of dims whose numbers are within 1 of each other, bool [dims] each, in the order of their first dim."""
    found: list[Flags] = []
    left = np.ones(given.shape[1], bool)
    while left.any():
        found.append(left & (np.abs(given - given[:, [left.argmax()]]) <= 1).all(0))
        left &= ~found[-1]
    return found


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
