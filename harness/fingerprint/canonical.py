"""Parameter names shared by engines and checkpoints: the parts that an engine fuses are summed under the fused name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from assay.harness.evidence.fingerprint import Weight
from assay.harness.fingerprint.weights import added, extent

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|gate_up_proj|w1|w3)\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight"), ".experts.w2_weight"),
)
# Parts in the order of fusion.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("gate_up_proj",),
    ("down_proj",),
    ("w2",),
)
_NAMES = "|".join(part for parts in _TOGETHER for part in parts)
_PART = re.compile(rf"^(?P<of>.*?(?:\.experts\.(?P<expert>\d+))?)\.(?P<part>{_NAMES})\.(?P<kind>[^.]+)$")
_SHELLS = re.compile(r"^(language_model\.|model\.language_model\.)")


def by_canonical_name(left: Sequence[Weight], right: Sequence[Weight]) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Return two sides' parameters by name. If only one side fuses them, fuse them on both; only their sums remain."""
    ours, theirs = ({weight.name: weight for weight in side} for side in (left, right))
    if ours.keys() == theirs.keys():
        return ours, theirs
    fused = [_fused(side) for side in (left, right)]
    return fused[0], fused[1]


def canonical_name(name: str) -> str:
    """Return the name that engines and checkpoints share: without wrapper modules, and with the fused name for a part."""
    name = _without_shells(name)
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name


def _without_shells(name: str) -> str:
    return _SHELLS.sub("model.", name).replace("model.model.", "model.")


def place_in_fused(name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[str, int] | None:
    """Return the fused parameter that a parameter belongs to, and its first row there, or None if a part before it is missing.

    A parameter that is never fused, or the only part present, is returned itself with row 0. Experts follow one another, as engines
    stack them.

    Args:
        name: the name of a checkpoint's parameter.
    """
    match = None if is_whole(name) else _PART.match(name)
    if match is None:
        return _without_shells(name), 0
    together = next(parts for parts in _TOGETHER if match["part"] in parts)
    names = [f"{match['of']}.{part}.{match['kind']}" for part in together]
    there = [each for each in names if each in shapes]
    if match["expert"] is None and len(there) == 1:
        return _without_shells(name), 0
    before = names[: together.index(match["part"])]
    needed = names if match["expert"] else before
    if any(each not in there for each in needed):
        return None
    row = int(match["expert"] or 0) * sum(_rows(shapes[each]) for each in names if match["expert"])
    return canonical_name(name), row + sum(_rows(shapes[each]) for each in before)


def _rows(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def is_whole(name: str) -> bool:
    """Return True unless some engine fuses the named parameter."""
    return not any(pattern.search(name) for pattern, _ in _FUSED)


def grouped(weights: Iterable[Weight]) -> dict[str, list[Weight]]:
    """Group parameters by their canonical name."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(canonical_name(weight.name), []).append(weight)
    return groups


def _fused(weights: Sequence[Weight]) -> dict[str, Weight]:
    return {name: added_up(name, parts) for name, parts in grouped(weights).items()}


def added_up(name: str, parts: Sequence[Weight]) -> Weight:
    """Return the parameter fused from parts, with projections only if the parts share its signs. A single part stays as it is."""
    if len(parts) == 1 and parts[0].name == name and not parts[0].signs:
        return parts[0]
    sums = added([part.sums for part in parts])
    signed = bool(sums) and all((part.signs or f"{part.name} 0").rpartition(" ")[0] == name for part in parts)
    shapes = [extent(part) for part in parts]
    return parts[0].model_copy(
        update={
            "name": name,
            "sums": sums,
            "projections": added([part.projections for part in parts]) if signed else (),
            "signs": "",
            "digest": "+".join(part.digest for part in parts),
            "shape": (sum(shape[0] for shape in shapes), *shapes[0][1:]) if signed else (int(sums[0]),) if sums else (),
        }
    )
