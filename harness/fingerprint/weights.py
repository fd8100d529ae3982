"""Describes parameters by numbers, so that they can be compared without moving them: digests, sums and random projections.

A large parameter is read once, on its device: a sample of its elements is hashed, and all elements enter the projections and sums.
A projection's signs belong to the rows and columns of the whole parameter, so the projections of its parts, in processes or in a
checkpoint, add up to those of the whole.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.harness.evidence.fingerprint import Fingerprint, Weight

if TYPE_CHECKING:
    from torch import Tensor

_PROJECTIONS = 8
_WHOLE = 2**20  # most elements in a parameter that is hashed completely
_SAMPLE = 2**16  # evenly spread elements hashed in a larger parameter
_CHUNK = 2**24  # elements converted to float32 at once: 64 MiB
# Columns summed in float32 before float64: the fewer, the less the result depends on where a matrix is cut.
_COLUMNS = 2048
# Mantissa bits by dtype. Other dtypes are not rounded floats.
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2, "bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}
# The smallest positive number, for dtypes that it matters in: smaller weights are rounded to multiples of it.
_SMALLEST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16, "float16": 2.0**-24}
_SAME = 2.0**-20  # relative distance of float32 sums of the same numbers in a different order
# The same for large parameters with equal samples. On a CPU, projections of up to 28,672 float32 columns were within 6e-7 of the
# float64 result, and a single row of 3 million within 3.3e-6. One element in 2^32 that is off by its own size gives 1.5e-5.
_SAME_SAMPLE = 2.0**-17


# Parameters that engines must keep in float32, by their names. A bias of the router's own product has the model's dtype.
_KEPT = {"router bias": re.compile(r"e_score_correction_bias$"), "decay of a state": re.compile(r"A_log$")}
# Layers of SGLang and vLLM whose parameters every process holds whole.
_COPIED = re.compile(r"Norm$|^ReplicatedLinear$")


def weights_of(model: Any) -> tuple[Weight, ...]:
    """Describe the parameters of a loaded model, or of a process's part of it."""
    described = []
    for name, parameter in model.named_parameters():
        kept = next((why for why, pattern in _KEPT.items() if pattern.search(name)), "")
        layer = type(model.get_submodule(name.rpartition(".")[0]))
        copied = any(_COPIED.search(kind.__name__) for kind in layer.__mro__)
        described.append(describe_weight(name, parameter, kept).model_copy(update={"copied": copied}))
    return tuple(described)


def describe_part(name: str, tensor: Tensor, whole: str, row: int) -> Weight:
    """Describe a stored parameter as a part of a fused one.

    Args:
        whole: path of the fused parameter.
        row: its first row in the fused parameter.
    """
    if not tensor.dim() or (whole, row) == (name, 0):
        return describe_weight(name, tensor)
    return describe_weight(whole, tensor, row=row).model_copy(update={"name": name, "signs": f"{whole} {row}"})


def describe_weight(name: str, tensor: Tensor, kept: str = "", row: int = 0) -> Weight:
    """Describe a parameter, or this process's part of it.

    Args:
        name: its path in the model, which determines the signs of its projections.
        kept: see `Weight`.
        row: the row of these signs with which it begins.
    """
    tensor = tensor.detach()
    sample = _sample(tensor)
    made = Weight(
        name=name, shape=tuple(tensor.shape), dtype=_dtype(tensor), digest=_digest(tensor, sample), kept=kept
    )  # fmt: skip
    if not tensor.numel() or tensor.is_complex():
        return made
    projections, sums = _products(name, tensor, row)
    return made.model_copy(
        update={"projections": projections, "sums": sums, "grid": _grid(sample, _dtype(tensor))}
    )  # fmt: skip


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() <= _WHOLE:
        return flat
    import torch

    places = torch.linspace(0, flat.numel() - 1, _SAMPLE, dtype=torch.float64, device=flat.device).long()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(whole)[places].view(flat.dtype)  # not every device can index 8-bit floats


def _digest(tensor: Tensor, sample: Tensor) -> str:
    return hashlib.sha256(f"{_dtype(tensor)} {tuple(tensor.shape)} ".encode() + _bytes(sample)).hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _products(name: str, tensor: Tensor, row: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute u'Wv for random signs u and v, and the sums of w, |w|, w^2 and w^4 over all elements, in one pass.

    The signs are those of rows from `row` on; a vector's elements are its rows.
    """
    import torch

    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    height, width = rows.shape
    first = (row, 0) if tensor.dim() > 1 else (0, row)
    left, right = (
        _signs(name, side, at, many).to(tensor.device)
        for side, at, many in zip("uv", first, (height, width), strict=True)
    )
    at_once = max(1, _CHUNK // rows.shape[1])
    products = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=tensor.device)
    sums = torch.zeros(4, dtype=torch.float64, device=tensor.device)
    for start in range(0, rows.shape[0], at_once):
        part = rows[start : start + at_once].to(torch.float32)
        signs = left[start : start + at_once]
        # A product with a matrix might use TF32, which rounds like a narrower dtype. A product with a vector does not.
        for columns, of_columns in zip(torch.split(part, _COLUMNS, 1), torch.split(right, _COLUMNS), strict=True):
            by_row = torch.stack([torch.mv(columns, column) for column in of_columns.unbind(1)], 1)
            products += (by_row * signs).sum(0, dtype=torch.float64)
        squares = part * part
        for index, values in enumerate((part, part.abs(), squares, squares * squares)):
            sums[index] += values.sum(dtype=torch.float64)
    return tuple(products.tolist()), (float(tensor.numel()), *sums.tolist())


def _signs(name: str, side: str, first: int, number: int) -> Tensor:
    """Draw signs for indices from `first` on. An index's signs do not depend on the number of indices."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{side} {name}".encode()).digest()[:7], "big")
    drawn = torch.randint(0, 2, (first + number, _PROJECTIONS), generator=torch.Generator().manual_seed(seed))
    return drawn[first:].to(torch.float32) * 2 - 1


def added(of_parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Add up the sums or projections of parts, or return () if a part has none."""
    return tuple(map(sum, zip(*of_parts, strict=True))) if all(of_parts) else ()


def _grid(sample: Tensor, dtype: str) -> str:
    """Return the narrowest float dtype that represents a sample exactly, or the dtype itself if it is not a float."""
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


def distance(left: Weight, right: Weight) -> float | None:
    """Estimate the relative distance of two parameters, ``|A - B| / |A|`` in the Frobenius norm, or None if not comparable.

    It uses projections if both sides have them for the whole parameter or for each process's part: with random signs, the mean
    square of ``u'(A - B)v`` is ``|A - B|^2``. Otherwise it uses sums, see `distance_in_any_order`. Engines pad embeddings with rows
    of zeros, which do not change projections: equal matrices then have distance 0, and others do not get one.
    """
    if not left.sums or not right.sums:
        return None
    if left.sums[0] != right.sums[0] and _repeated(left, right):
        return 0.0
    norm = math.sqrt(max(left.sums[3], right.sums[3]))
    if by_rank(left, right):
        # The parts share signs, so the squares of their differences add up.
        squares = sum(_square(*pair) for pair in zip(left.held, right.held, strict=True))
        return math.sqrt(squares) / norm if norm else 0.0
    shapes = [extent(weight) for weight in (left, right)]
    if by_projections(left, right) and shapes[0][1:] == shapes[1][1:]:
        far = math.sqrt(_square(left, right)) / norm if norm else 0.0
        return far if shapes[0] == shapes[1] or (len(shapes[0]) == 2 and same_numbers(far)) else None
    return distance_in_any_order(left, right)


def _square(left: Weight, right: Weight) -> float:
    return sum((a - b) ** 2 for a, b in zip(left.projections, right.projections, strict=True)) / _PROJECTIONS


def by_rank(left: Weight, right: Weight) -> bool:
    """Return True if two parameters are split across processes in the same way, so that each part has a counterpart."""
    return (
        bool(left.held)
        and [part.shape for part in left.held] == [part.shape for part in right.held]
        and all(by_projections(*pair) for pair in zip(left.held, right.held, strict=True))
    )


def by_projections(left: Weight, right: Weight) -> bool:
    """Return True if both have projections, with the same signs."""
    signs = [weight.signs or f"{weight.name} 0" for weight in (left, right)]
    return bool(left.projections and right.projections) and signs[0] == signs[1]


def extent(weight: Weight) -> tuple[int, ...]:
    """Return the rows and columns of a whole parameter, or the length of a vector."""
    shape = weight.shape
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape


def distance_in_any_order(left: Weight, right: Weight) -> float | None:
    """Return the largest relative difference of two parameters' sums, or None if their numbers of elements differ.

    Different weights have different sums, and the sums of rounded weights differ at most as much as the weights. Permuting rows or
    appending rows of zeros does not change the sums. Rows of zeros are accepted only if nothing else differs.
    """
    if not left.sums or not right.sums:
        return None
    # The sum may cancel, so its scale is the sum of magnitudes. Powers change by a multiple of the elements' change.
    scales = (left.sums[2], left.sums[2], 2 * left.sums[3], 4 * left.sums[4])
    far = max(
        abs(a - b) / scale if scale else float(a != b)
        for a, b, scale in zip(left.sums[1:], right.sums[1:], scales, strict=True)
    )
    shapes = [extent(weight) for weight in (left, right)]
    padded = len(shapes[0]) == len(shapes[1]) > 1 and shapes[0][1:] == shapes[1][1:] and same_numbers(far)
    return far if left.sums[0] == right.sums[0] or padded else None


def _repeated(left: Weight, right: Weight) -> bool:
    """Return True if, judging by sums, one parameter is the other one repeated several times.

    Equal shards, as of a bias of zeros or of identical experts, look as if each process had the whole parameter.
    """
    short, long = sorted((left, right), key=lambda weight: weight.sums[0])
    if not short.sums[0] or long.sums[0] % short.sums[0]:
        return False
    (mean, *sizes), (other, *others) = (
        [total / weight.sums[0] for total in weight.sums[1:]] for weight in (short, long)
    )
    # The sum may cancel, so its scale is the sum of magnitudes.
    return math.isclose(mean, other, rel_tol=0.0, abs_tol=_SAME * sizes[0]) and all(
        math.isclose(a, b, rel_tol=_SAME) for a, b in zip(sizes, others, strict=True)
    )


def same_bytes(left: Weight, right: Weight) -> bool:
    """Return True if two parameters have the same digest and, if it covers only a sample, the same projections and sums."""
    if left.digest != right.digest:
        return False
    # As text, NaN equals NaN.
    written = [repr((weight.sums, weight.projections)) for weight in (left, right)]
    if math.prod(left.shape) <= _WHOLE or written[0] == written[1]:
        return True
    far = distance(left, right)
    return far is not None and far <= _SAME_SAMPLE


def same_numbers(far: float) -> bool:
    """Return True if the order of summation explains a distance."""
    return far <= _SAME


def rounded_to(left: Weight, right: Weight, far: float) -> str:
    """Return the dtype that one of two parameters was rounded to, or "" if rounding does not explain their distance.

    Rounding to nearest moves an element by at most ``2^-(m+1)`` of itself, for m mantissa bits. A matrix's elements are spread over
    their binades, so its norm moves by 0.4 of that; eight projections do not overestimate this 2.6-fold. A vector's elements, such
    as norms around 1, may all move by the maximum, so a vector gets twice the bound.
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


def joined(of_ranks: Sequence[Fingerprint]) -> Fingerprint:
    """Join the observations of a server's processes, in rank order. The first process stands for whatever all share.

    Parameters that are the same in every process are whole in each. For the others, the sums of the parts are added up, and each
    process's part is kept. Position ids come from the first process that computed a request: with data-parallel attention, others
    may not.
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
    if first.copied:
        return first.model_copy(update={"copies_differ": True})
    update = {
        "digest": hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest()[:16],
        "sums": added([part.sums for part in parts]),
        "projections": (),
        "held": tuple(parts) if all(part.projections for part in parts) else (),
        "ranks": len(parts),
    }
    return first.model_copy(update=update)
