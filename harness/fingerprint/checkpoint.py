"""The weights of a checkpoint as they are stored, described as those of a server are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import Weight
from assay.harness.fingerprint.weights import describe_weight, distance, rounded_to, same_numbers

LARGEST = 8 << 30
"""Bytes of a checkpoint that is read; of a larger one, a server is asked, which has it on its device."""


def checkpoint_weights(model: Path) -> tuple[Weight, ...]:
    """Describe the parameters of a model's safetensors files.

    Raises:
        EvidenceError: there are none, they cannot be read, or are larger than `LARGEST`.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    if not files or size > LARGEST:
        absent = "there are no safetensors files" if not files else f"the checkpoint has {size / 2**30:.1f} GiB"
        raise EvidenceError(
            f"{absent}", f"safetensors files of at most {LARGEST / 2**30:g} GiB", "fingerprint a server instead"
        )
    weights = []
    for path in files:
        try:
            with safe_open(path, "pt") as opened:
                weights += [describe_weight(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise EvidenceError(f"{path.name}: {error}", "a whole safetensors file", "download it again") from None
    return tuple(weights)


def beside_checkpoint(loaded: Sequence[Weight], stored: Sequence[Weight]) -> tuple[Weight, ...]:
    """Mark the parameters whose values are not those that the checkpoint has under the same name, in the same shape.

    What an engine fuses, splits or packs has no such name, and is not marked; neither is what was only rounded.
    """
    by_name = {weight.name: weight for weight in stored}
    return tuple(_marked(weight, by_name.get(weight.name)) for weight in loaded)


def _marked(weight: Weight, stored: Weight | None) -> Weight:
    if stored is None or not weight.projections or stored.shape != weight.shape:
        return weight
    far = distance(stored, weight)
    if far is None or same_numbers(far) or rounded_to(stored, weight, far):
        return weight
    return weight.model_copy(update={"unlike_checkpoint": far})
