"""The least work of an attention call (operations, bytes), and the least time that a device's limits allow for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.harness.attention.call import AttentionCall


@dataclass(frozen=True)
class _Work:
    """The work of a correct kernel on a call.

    Attributes:
        qk_flops: for the scores: 2 per multiply-add, visible (query, key) pairs only.
        pv_flops: for the weighted values.
        bytes: q, k and v read once, the output written once.
    """

    qk_flops: int
    pv_flops: int
    bytes: int

    @property
    def flops(self) -> int:
        """Operations of both products."""
        return self.qk_flops + self.pv_flops


def work_of(call: AttentionCall) -> _Work:
    """Count the work of a call under the correct mask."""
    heads = call.q.shape[1]
    spans = (call.spec.mask.span(np.arange(q), q, k) for q, k in zip(call.lens_q, call.lens_k, strict=True))
    pairs = sum(int((stop - first).clip(0).sum()) for first, stop in spans)
    out = call.q.shape[0] * heads * call.v.shape[2] * call.q.element_size()
    size = sum(t.numel() * t.element_size() for t in (call.q, call.k, call.v)) + out
    return _Work(2 * pairs * heads * call.q.shape[2], 2 * pairs * heads * call.v.shape[2], size)


_LIMITS: dict[str, tuple[dict[str, float], float]] = {
    "H200": ({"torch.bfloat16": 989.5e12, "torch.float16": 989.5e12, "torch.float32": 67e12, "int8": 1979e12}, 4.8e12)
}
"""Dense operations per second by type of number, and bytes per second, by part of the device's name.

NVIDIA's H200 data sheet (SXM): BF16/FP16 1,979 and INT8 3,958 trillion operations per second, both with sparsity, so half of that
dense; FP32 67 (no tensor cores); 4.8 TB/s. Other devices have no stated limit.
"""


def limit_s(call: AttentionCall, device: str, scheme: str = "") -> float | None:
    """Compute the least seconds that the device allows for a call's arithmetic and memory; None for an unknown device or dtype.

    Args:
        call: the call.
        device: the device's name.
        scheme: quantisation that the kernel declares; with "int8_qk", scores count as int8 operations.
    """
    flops, bandwidth = next((limits for part, limits in _LIMITS.items() if part in device), ({}, 0.0))
    if str(call.q.dtype) not in flops:
        return None
    work, plain = work_of(call), flops[str(call.q.dtype)]
    scores = flops["int8"] if scheme == "int8_qk" else plain
    return max(work.qk_flops / scores + work.pv_flops / plain, work.bytes / bandwidth)
