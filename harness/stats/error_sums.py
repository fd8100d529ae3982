"""Sums of errors over the elements of each query: a table of errors (`assay.harness.evidence.error_table`) from tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from assay.harness.evidence.error_table import SUMS, ratio

# Most elements to reduce at once: 128 MiB of float64; on a CPU as many as fit in its cache, which takes a third of the time.
_AT_ONCE, _ON_CPU = 2**24, 2**16
_DIFFERENCE, _SIZE, _, _NONFINITE, _, _ALONG, _SQUARE = range(len(SUMS))


def query_sums(outputs: Tensor, expected: Tensor) -> Tensor:
    """Sum the errors of outputs over the last dimension, in float64.

    NaN in `expected` means undefined and is not compared. Infinity in it matches any value that is not finite.

    Args:
        outputs: [..., rows, heads, head_dim].
        expected: [rows, heads, head_dim].

    Returns:
        float64 [..., rows, heads, 7], the columns of `SUMS`.
    """
    at_once = min(_AT_ONCE, _ON_CPU) if outputs.device.type == "cpu" else _AT_ONCE
    each = max(1, at_once // max(1, expected.numel()))
    if outputs.dim() > expected.dim() and len(outputs) > each:
        return torch.cat([query_sums(some, expected) for some in torch.split(outputs, each)])
    rows = max(1, at_once // max(1, expected[:1].numel()))
    if len(expected) > rows:
        parts = zip(torch.split(outputs, rows, -3), torch.split(expected, rows), strict=True)
        return torch.cat([query_sums(some, of_these) for some, of_these in parts], -3)
    a, b = outputs.detach().double(), expected.double()
    off, right = a - b, b.expand_as(a)
    if off.device.type == "cpu" and math.isfinite(float(off.sum())):  # finite numbers only: a fifth of the time
        lost = missing = off.new_zeros(off.shape[:-1])
    else:
        both = a.isfinite() & b.isfinite()
        undefined, nonfinite = b.isnan().expand_as(a), (a.isfinite() != b.isfinite()) & ~b.isnan()
        off, right = torch.where(both, off, 0.0), torch.where(both, b, 0.0)
        lost, missing = nonfinite.sum(-1).double(), undefined.sum(-1).double()
    columns = [off.abs().sum(-1), right.abs().sum(-1), a.shape[-1] - lost - missing, lost, missing]
    return torch.stack([*columns, (off * right).sum(-1), right.square().sum(-1)], -1)


def distance(sums: Tensor) -> Tensor:
    """Return the sum of |output - expected|, [..., 7] -> [...]: infinite if only one of the two is finite."""
    return sums[..., _DIFFERENCE].masked_fill(sums[..., _NONFINITE] > 0, float("inf"))


def relative_l1(sums: Tensor) -> Tensor:
    """Compute the relative L1, [..., 7] -> [...]: infinite if only one of the two is finite, 0 if nothing was compared."""
    return ratio(distance(sums), sums[..., _SIZE])


def slope(sums: Tensor) -> Tensor:
    """Compute the slope of output on expected, [..., 7] -> [...]; NaN if an output is not finite, or all expected are zero."""
    slopes = 1 + sums[..., _ALONG] / sums[..., _SQUARE]
    return slopes.masked_fill(sums[..., _NONFINITE] > 0, float("nan"))
