"""Kernels with a known fault, for benchmarks: named as ``faulty:one_layer`` from this folder."""

from __future__ import annotations

from harness.attention.faults import fault
from harness.timing import torch_sdpa

LAYER = 13
one_layer = fault("causal mask top-left", torch_sdpa, layers=[LAYER])
"""PyTorch's attention, but for a causal mask that is top-left in one layer."""
