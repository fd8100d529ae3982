"""Numbers by which parameters are compared without being moved: digests, sums, and projections that tell rounding from others.

A large parameter is read on its device, once: a sample of its elements is hashed, and all of them go into the projections and sums.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from assay.harness.evidence.fingerprint import Fingerprint, Weight

if TYPE_CHECKING:
    from torch import Tensor

PROJECTIONS = 8
_WHOLE = 2**20
"""Elements up to which a parameter is hashed whole."""
_SAMPLE = 2**16
"""Elements of a larger one that are hashed, evenly spread."""
_CHUNK = 2**24
"""Elements that are converted to float32 at once: 64 MiB."""
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2, "bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}
"""Bits of the mantissa, by dtype. Others are not rounded floats."""
_SMALLEST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16, "float16": 2.0**-24}
"""The smallest number above zero, of dtypes in which weights may be smaller: those are rounded to multiples of it."""
_SAME = 2.0**-20
"""Relative distance of sums in float32 of the same numbers in another order."""
_SAME_SAMPLE = 2.0**-17
"""The same for large parameters whose samples are equal. On a CPU, projections of up to 28,672 float32 columns were within 6e-7 of
those in float64, and of one row of 3 million within 3.3e-6. One element of 2^32 that is off by its own size is 1.5e-5."""


def describe_weight(name: str, tensor: Tensor, kept: str = "") -> Weight:
    """Describe a parameter, or this process's part of it.

    Args:
        name: its path in the model, which decides the signs of its projections.
        tensor: on any device.
        kept: see `Weight`.
    """
    tensor = tensor.detach()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    flat = tensor.reshape(-1)
    sample = flat
    if flat.numel() > _WHOLE:
        import torch

        places = torch.linspace(0, flat.numel() - 1, _SAMPLE, dtype=torch.float64, device=flat.device).long()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        sample = flat.view(whole)[places].view(flat.dtype)  # not every device picks elements of 8-bit floats
    digest = hashlib.sha256(f"{dtype} {shape} ".encode() + _bytes(sample)).hexdigest()[:16]
    if not flat.numel() or tensor.is_complex():
        return Weight(name=name, shape=shape, dtype=dtype, digest=digest, kept=kept)
    projections, sums = _products(name, tensor)
    return Weight(
        name=name,
        shape=shape,
        dtype=dtype,
        digest=digest,
        projections=projections,
        sums=sums,
        grid=_grid(sample, dtype),
        kept=kept,
    )


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _products(name: str, tensor: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute u'Wv for random signs u and v, and sums of w, |w|, w^2 and w^4 over all elements, in one reading."""
    import torch

    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    left, right = (_signs(name, side, size).to(tensor.device) for side, size in zip("uv", rows.shape, strict=True))
    at_once = max(1, _CHUNK // rows.shape[1])
    products = torch.zeros(PROJECTIONS, dtype=torch.float64, device=tensor.device)
    sums = torch.zeros(4, dtype=torch.float64, device=tensor.device)
    for start in range(0, rows.shape[0], at_once):
        part = rows[start : start + at_once].to(torch.float32)
        signs = left[start : start + at_once]
        # A product with a matrix might be computed in TF32, which rounds as another dtype does; that with a vector is not.
        by_row = torch.stack([torch.mv(part, column) for column in right.unbind(1)], 1)
        products += (by_row * signs).sum(0, dtype=torch.float64)
        squares = part * part
        for index, values in enumerate((part, part.abs(), squares, squares * squares)):
            sums[index] += values.sum(dtype=torch.float64)
    return tuple(products.tolist()), (float(tensor.numel()), *sums.tolist())


def _signs(name: str, side: str, size: int) -> Tensor:
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{side} {name}".encode()).digest()[:7], "big")
    drawn = torch.randint(0, 2, (size, PROJECTIONS), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.float32) * 2 - 1


def _grid(sample: Tensor, dtype: str) -> str:
    """Return the narrowest float that holds all elements of a sample exactly; the dtype itself for what is no float."""
    import torch

    if dtype not in _MANTISSA:
        return dtype
    for narrower in sorted(_MANTISSA, key=lambda dtype_: _MANTISSA[dtype_]):
        if _MANTISSA[narrower] >= _MANTISSA[dtype]:
            break
        rounded = sample.to(getattr(torch, narrower)).to(sample.dtype)
        if bool((rounded == sample).all()):
            return narrower
    return dtype


def joined(of_ranks: Sequence[Fingerprint]) -> Fingerprint:
    """Join what the processes of a server observed, in the order of ranks: the first tells what all have alike.

    Of parameters, what each holds whole is kept, and sums of parts are added up. Projections depend on where an element lies in the
    whole, so those of parts are dropped. Position ids are those of the first that computed a request: with data-parallel attention
    the others compute none.
    """
    first = of_ranks[0]
    positions = next((made.positions for made in of_ranks if made.positions), first.positions)
    if len(of_ranks) == 1:
        return first
    by_name: dict[str, list[Weight]] = {}
    for weight in (weight for made in of_ranks for weight in made.weights or ()):
        by_name.setdefault(weight.name, []).append(weight)
    weights = tuple(_merged(parts) for parts in by_name.values())
    return first.model_copy(update={"positions": positions, "weights": None if first.weights is None else weights})


def _merged(parts: Sequence[Weight]) -> Weight:
    first = parts[0]
    if all(same_bytes(first, part) for part in parts):
        return first
    sums = tuple(map(sum, zip(*(part.sums for part in parts), strict=True)))
    digest = hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest()[:16]
    return first.model_copy(update={"sums": sums, "projections": (), "digest": digest, "ranks": len(parts)})


def distance(left: Weight, right: Weight) -> float | None:
    """Estimate the relative distance of two parameters, ``|A - B| / |A|`` in the Frobenius norm; None if they cannot be compared.

    By projections where both have the whole parameter in one shape: for random signs the mean square of ``u'(A - B)v`` is
    ``|A - B|^2``. By sums otherwise, which see less: it is then the largest relative difference of a sum. Engines pad the rows of
    embeddings with zeros, which move no projection: matrices that have the same numbers then have no distance, others none that
    says anything.
    """
    if not left.sums or not right.sums:
        return None
    if left.sums[0] != right.sums[0] and _repeated(left, right):
        return 0.0
    if left.projections and right.projections and left.shape[1:] == right.shape[1:]:
        norm = math.sqrt(max(left.sums[3], right.sums[3]))
        mean = sum((a - b) ** 2 for a, b in zip(left.projections, right.projections, strict=True)) / PROJECTIONS
        far = math.sqrt(mean) / norm if norm else 0.0
        return far if left.shape == right.shape or (len(left.shape) == 2 and same_numbers(far)) else None
    if left.sums[0] != right.sums[0]:
        return None
    # The sum itself may cancel: it is compared with the sum of magnitudes. Powers change by a multiple of what elements do.
    scales = (left.sums[0], left.sums[2], left.sums[2], 2 * left.sums[3], 4 * left.sums[4])
    return max(
        abs(a - b) / scale if scale else float(a != b)
        for a, b, scale in zip(left.sums, right.sums, scales, strict=True)
    )


def _repeated(left: Weight, right: Weight) -> bool:
    """Return True if one of two parameters is the other one several times, by its sums.

    Shards that are equal, as of a bias of zeros or of experts that are copies, look as if each process had the whole.
    """
    short, long = sorted((left, right), key=lambda weight: weight.sums[0])
    if not short.sums[0] or long.sums[0] % short.sums[0]:
        return False
    (mean, *sizes), (other, *others) = (
        [total / weight.sums[0] for total in weight.sums[1:]] for weight in (short, long)
    )
    # The sum itself may cancel: it is compared with the sum of magnitudes.
    return math.isclose(mean, other, rel_tol=0.0, abs_tol=_SAME * sizes[0]) and all(
        math.isclose(a, b, rel_tol=_SAME) for a, b in zip(sizes, others, strict=True)
    )


def same_bytes(left: Weight, right: Weight) -> bool:
    """Return True if two parameters have the same digest and, where that is one of a sample, the same projections and sums."""
    if left.digest != right.digest:
        return False
    written = [repr((weight.sums, weight.projections)) for weight in (left, right)]  # as text, NaN is the same as NaN
    if math.prod(left.shape) <= _WHOLE or written[0] == written[1]:
        return True
    far = distance(left, right)
    return far is not None and far <= _SAME_SAMPLE


def same_numbers(far: float) -> bool:
    """Return True if a distance is that of the same numbers, added in another order."""
    return far <= _SAME


def rounded_to(left: Weight, right: Weight, far: float) -> str:
    """Return the dtype that one of two parameters was rounded to, if their distance is no more than that; empty if it is more.

    Rounding to nearest moves an element by at most ``2^-(m+1)`` of itself, m being the bits of the mantissa. Elements of a matrix
    fill binades: in the norm it moves by .4 of that, which eight projections do not estimate as 2.6 times as much. Those of a
    vector may all lie where it moves by the whole, as norms around 1 do: it has twice the bound.
    """
    grids = {weight.grid if weight.grid in _MANTISSA else weight.dtype for weight in (left, right)}
    if left.dtype == right.dtype and len(grids) == 1:
        return ""
    coarse = min((grid for grid in grids if grid in _MANTISSA), key=lambda weight: _MANTISSA[weight], default="")
    if not coarse:
        return ""
    bound = 2.0 ** -(_MANTISSA[coarse] + (len(left.shape) > 1))
    smallest = max(_SMALLEST.get(dtype, 0.0) for dtype in (left.dtype, right.dtype, *grids))
    mean = max(left.sums[2], right.sums[2]) / left.sums[0]
    return coarse if far <= bound + smallest / 2 / mean else ""
