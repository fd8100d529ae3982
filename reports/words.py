"""Sentences about what was judged: a report has numbers and ids, and here they are put into words, in one place for each claim."""

from __future__ import annotations

from assay.harness.evidence.executed import pass_title, some_kernels
from assay.harness.judge.report import CallSummary, PassKernels


def counted_calls(call: CallSummary) -> str:
    """Say how often a kernel was called in a phase: "decode: torch_native 1,020 calls, delegated"."""
    kinds = {"in CUDA graphs": call.calls_in_graphs, "compiled": call.calls_compiled}
    delegated = ", delegated" if call.delegated_by else ""
    ways = "".join(f", {calls:,} of them {kind}" for kind, calls in kinds.items() if calls)
    return f"{call.phase}: {call.kernel} {call.calls:,} calls{delegated}{ways}"


def traced_kernels(traced: PassKernels) -> str:
    """Say what ran in a pass: "candidate, extend without a cached prefix: _attn_fwd (4), quant_per_block_int8_kernel (8)"."""
    own = [kernel for kernel in traced.kernels if kernel.of and kernel.attention is not False]
    others = len(traced.kernels) - len(own)
    named = some_kernels(f"{kernel.name} ({kernel.launches})" for kernel in own) or "none that is known by name"
    rest = f"; {others} others" if others else ""
    return f"{traced.role}, {pass_title(traced.phase, traced.cached_prefix)}: {named}{rest}"
