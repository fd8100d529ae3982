"""Names of parameters that engines and checkpoints share: parts that an engine fuses are added up under the fused name."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def _fused(weights: Sequence[Weight]) -> dict[str, Weight]:
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        name = _SHELLS.sub("model.", weight.name).replace("model.model.", "model.")
        for pattern, fused in _FUSED:
            name = pattern.sub(fused, name)
        groups.setdefault(name, []).append(weight)
    return {name: _joined(name, parts) for name, parts in groups.items()}


def _joined(name: str, parts: Sequence[Weight]) -> Weight:
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
