"""Running a kernel on calls, and what was seen: own error by cell, and whether the same call twice gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.kernels import declaration
from assay.harness.attention.oracle import oracle
from assay.harness.compare.tensors import Errors, errors
from assay.harness.errors import AssayError
from assay.harness.localize.bounds import bound_of, least_bound
from assay.harness.localize.call_conditions import SequenceShape, sequence_shapes
from assay.harness.localize.cells import CallCells, cells_of, deviation

_INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Observation:
    """What a kernel made of one call.

    Attributes:
        call: the call, as it was before the kernel ran.
        out: the kernel's output, [total_q, num_q_heads, head_dim_v].
        cells: the cells of the call.
        own: own error against the oracle, relative L1, float64 [cells, num_q_heads], on the CPU.
        scheme: quantisation that the kernel declares; empty for none.
        repeated: whether the call was run again, twice in a row; if not, the next four say nothing.
        repeat: largest relative L1, over cells and heads, between the outputs of two runs in a row.
        late: the same, between this output and one after all other calls.
        repeats_differ: whether any bit differed between the two runs in a row.
        late_differs: whether any bit differed in the late one.
        mutated: names of the inputs that the kernel wrote to.
    """

    call: AttentionCall
    out: Tensor
    cells: CallCells
    own: Tensor
    scheme: str = ""
    repeated: bool = False
    repeat: float = 0.0
    late: float = 0.0
    repeats_differ: bool = False
    late_differs: bool = False
    mutated: tuple[str, ...] = ()

    @cached_property
    def bound(self) -> float:
        """Largest own error that noise explains; simulated when it is first asked for."""
        return bound_of(self.call, self.scheme)

    @cached_property
    def failing(self) -> Tensor:
        """Cells and heads whose own error is out of bounds, bool [cells, num_q_heads]."""
        if float(self.own.max()) <= least_bound(self.call, self.scheme):
            return torch.zeros_like(self.own, dtype=torch.bool)  # within any bound: nothing has to be simulated
        return self.own > self.bound

    @cached_property
    def errors(self) -> Errors:
        """Own errors of the whole call."""
        return errors(self.out, oracle(self.call))

    @cached_property
    def sequence_shapes(self) -> list[SequenceShape]:
        """The situation of each sequence."""
        return sequence_shapes(self.call)


@dataclass(frozen=True)
class Examination:
    """What a kernel made of several calls.

    Attributes:
        observations: one for each call that it computed.
        delegated: calls of phases that it does not declare: not run.
        refused: calls that it refused, with its words.
    """

    observations: tuple[Observation, ...]
    delegated: tuple[AttentionCall, ...] = ()
    refused: tuple[tuple[AttentionCall, str], ...] = ()

    @property
    def repeated(self) -> int:
        """Calls that were run again, on which nondeterminism and state were looked for."""
        return sum(o.repeated for o in self.observations)


def observe(call: AttentionCall, out: Tensor, scheme: str = "") -> Observation:
    """Hold an output, computed here or recorded, against the oracle.

    Args:
        call: the call.
        out: [total_q, num_q_heads, head_dim_v].
        scheme: quantisation that the kernel declares, as `Declaration.noise`.

    Raises:
        AssayError: the output does not have the shape that the call asks for.
        ValueError: the call holds no query, or its truth is not finite.
    """
    expected = (*call.q.shape[:2], call.v.shape[2])
    if out.shape != expected:
        raise AssayError(
            f"the kernel gave an output of shape {list(out.shape)}",
            f"{list(expected)}",
            "mend the kernel's output shape",
        )
    if not out.numel():
        raise ValueError("nothing to compare: the call holds no query; expected at least one")
    truth, cells = oracle(call), cells_of(call)
    if not bool(truth.isfinite().all()):
        raise ValueError("the truth is not finite, so nothing can be compared with it; check the inputs of the call")
    return Observation(call, out, cells, deviation(out, truth, cells).relative_l1, scheme)


def examine(kernel: Kernel, calls: Sequence[AttentionCall]) -> Examination:
    """Run a kernel on each call once, and then on each twice more in a row.

    Raises:
        AssayError: no call could be run (none given, all delegated or refused), which is never a pass; or an output has a
            wrong shape.
    """
    seen = look(kernel, calls)
    require_any(seen)
    return replace(seen, observations=tuple(run_again(kernel, o) for o in seen.observations))


def look(kernel: Kernel, calls: Sequence[AttentionCall]) -> Examination:
    """Run a kernel on each call once, on its own copy of the inputs: one that writes to them is found, and harms nothing else.

    Raises:
        AssayError: an output has a wrong shape.
    """
    declared = declaration(kernel)
    delegated = tuple(call for call in calls if call.phase not in declared.phases)
    seen: list[Observation] = []
    refused: list[tuple[AttentionCall, str]] = []
    for call in (call for call in calls if call.phase in declared.phases):
        given = _copy(call)
        try:
            out = kernel(given)
        except KernelRefused as error:
            refused.append((call, str(error)))
            continue
        kept = torch.stack([_same(getattr(given, name), getattr(call, name)) for name in _INPUTS]).tolist()
        mutated = tuple(name for name, same in zip(_INPUTS, kept, strict=True) if not same)
        # The output may be a view of an input or of a buffer that the next call overwrites.
        seen.append(replace(observe(call, out.clone(), declared.noise), mutated=mutated))
    return Examination(tuple(seen), delegated, tuple(refused))


def require_any(seen: Examination) -> None:
    """Refuse an examination of nothing.

    Raises:
        AssayError: no call was computed, which is never a pass.
    """
    if not seen.observations:
        refused, delegated = len(seen.refused), len(seen.delegated)
        raise AssayError(
            f"the kernel computed none of {refused + delegated} calls ({delegated} delegated, {refused} refused)",
            "at least one call of a phase that the kernel declares",
            seen.refused[0][1] if seen.refused else "give calls of its phases",
        )


def run_again(kernel: Kernel, seen: Observation) -> Observation:
    """Run an observed call twice more in a row, best after all others: whether it gives what it gave, and the same twice."""
    late = kernel(_copy(seen.call)).clone()
    off, differs = _spread(seen, seen.out, late)
    apart, differ = _spread(seen, late, kernel(_copy(seen.call)))
    return replace(seen, repeated=True, late=off, late_differs=differs, repeat=apart, repeats_differ=differ)


def _copy(call: AttentionCall) -> AttentionCall:
    return replace(call, **{name: getattr(call, name).clone() for name in _INPUTS})


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Whether both hold the same values, bool []; NaN is the same as NaN."""
    return ((a == b) | ((a != a) & (b != b))).all()


def _spread(seen: Observation, first: Tensor, other: Tensor) -> tuple[float, bool]:
    if bool(_same(first, other)):
        return 0.0, False
    expected = torch.where(first.isfinite(), first.double(), float("inf"))
    return float(deviation(other, expected, seen.cells).relative_l1.max()), True
