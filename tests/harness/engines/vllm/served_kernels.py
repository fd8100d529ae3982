"""Kernels that tests serve in a real vLLM."""

from __future__ import annotations

from torch import Tensor

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import FEATURES, AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import oracle


@declares(features=tuple(feature for feature in FEATURES if feature != "lse"))
def right(call: AttentionCall) -> Tensor:
    """Compute the truth."""
    return oracle(call).to(call.q.dtype)


def top_left(call: AttentionCall) -> Tensor:
    """Compute with the causal mask of the seed case."""
    return fault("mask-top-left")(call).to(call.q.dtype)


@declares(phases=("decode",))
def decode_only(call: AttentionCall) -> Tensor:
    """Compute the truth in decode, and nothing else."""
    assert call.phase == "decode"
    assert set(call.lens_q) == {1}
    return oracle(call).to(call.q.dtype)
