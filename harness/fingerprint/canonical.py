"""Names of parameters that engines and checkpoints share: parts that an engine fuses are added up under the fused name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from assay.harness.evidence.fingerprint import Weight

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|gate_up_proj|w1|w3)\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight"), ".experts.w2_weight"),
)
_SHELLS = re.compile(r"^(language_model\.|model\.language_model\.)")


def by_canonical_name(left: Sequence[Weight], right: Sequence[Weight]) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Return parameters of two sides by name; where only one side fuses them, fused on both, with sums alone."""
    ours, theirs = ({weight.name: weight for weight in side} for side in (left, right))
    if ours.keys() == theirs.keys():
        return ours, theirs
    fused = [_fused(side) for side in (left, right)]
    return fused[0], fused[1]


def canonical_name(name: str) -> str:
    """Return the name that engines and checkpoints share: without the shells of a model, and the fused one of a part."""
    name = _SHELLS.sub("model.", name).replace("model.model.", "model.")
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name


def is_whole(name: str) -> bool:
    """Return True if a name is not that of a part that some engine fuses."""
    return not any(pattern.search(name) for pattern, _ in _FUSED)


def grouped(weights: Iterable[Weight]) -> dict[str, list[Weight]]:
    """Return the parameters that are one by their canonical name."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(canonical_name(weight.name), []).append(weight)
    return groups


def _fused(weights: Sequence[Weight]) -> dict[str, Weight]:
    return {name: added_up(name, parts) for name, parts in grouped(weights).items()}


def added_up(name: str, parts: Sequence[Weight]) -> Weight:
    """Return the parameter that an engine makes of parts, with sums alone; a single part as it is."""
    if len(parts) == 1 and parts[0].name == name:
        return parts[0]
    sums = tuple(map(sum, zip(*(part.sums for part in parts), strict=True))) if all(part.sums for part in parts) else ()
    digest = "+".join(part.digest for part in parts)
    return parts[0].model_copy(
        update={
            "name": name,
            "sums": sums,
            "projections": (),
            "digest": digest,
            "shape": (int(sums[0]),) if sums else (),
        }
    )
