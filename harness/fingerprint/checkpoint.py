"""Describes a checkpoint's stored weights in the same way as a server's weights."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import Weight
from assay.harness.fingerprint.canonical import added_up, canonical_name, grouped, is_whole, place_in_fused
from assay.harness.fingerprint.weights import (
    describe_part,
    describe_weight,
    distance,
    distance_in_any_order,
    extent,
    rounded_to,
    same_numbers,
)
from assay.harness.reading import reading, whole_file

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 8 << 30
"""Size in bytes of the largest checkpoint that is read. For a larger one, fingerprint a server, which holds it on its device."""
# Dtypes whose numbers an engine keeps. Quantised or packed weights have other dtypes.
_FLOATS = {"float32", "bfloat16", "float16"}
_LAYER = re.compile(r"\.(?:layers|blocks|h)\.\d+\.")
# Names of the embedding, the last norm and the head, which lie outside the layers.
_ENDS = re.compile(r"(?:^|\.)(?:embed_tokens|norm|lm_head)\.weight$")


def checkpoint_weights(model: Path) -> tuple[Weight, ...]:
    """Describe the parameters in a model's safetensors or PyTorch files, each as a part of the parameter that engines fuse.

    Raises:
        EvidenceError: there are no files, or they are unreadable, larger than `LARGEST`, or do not match their index.
    """
    files = _files(model)
    size = sum(path.stat().st_size for path in files)
    if not files or size > LARGEST:
        absent = (
            f"{model} has no safetensors or .bin files" if not files else f"the checkpoint has {size / 2**30:.1f} GiB"
        )
        raise EvidenceError(
            f"{absent}", f"files of weights of at most {LARGEST / 2**30:g} GiB", "fingerprint a server instead"
        )
    shapes: dict[str, Sequence[int]] = {}
    for path, names in files.items():
        shapes |= {name: shape for name, shape, _ in _tensors(path, names)}
    return tuple(
        _described_part(name, read(), shapes)
        for path, names in files.items()
        for name, _, read in _tensors(path, names)
    )


def stored_rows(model: Path, name: str, rows: int) -> Tensor | None:
    """Read the first rows of a parameter, or None if the checkpoint does not have it in safetensors files.

    Raises:
        EvidenceError: the files are unreadable or do not match their index.
    """
    from safetensors import safe_open

    for path, names in _files(model).items():
        if path.suffix == ".safetensors" and (names is None or name in names):
            with reading(path, "file of weights"), safe_open(path, "pt") as opened:
                if name in opened.keys():  # noqa: SIM118
                    part: Tensor = opened.get_slice(name)[:rows]
                    return part
    return None


def _files(model: Path) -> dict[Path, Set[str] | None]:
    """Return the files that engines read, each with the parameters that the index lists for it, or None without an index.

    Raises:
        EvidenceError: the index names a missing file, or leaves out ``model.safetensors``, which some engines prefer.
    """
    kind = "safetensors" if any(model.glob("*.safetensors")) else "bin"
    index = next(iter(sorted(model.glob(f"*.{kind}.index.json"))), None)
    if index is None:
        pattern = "*.safetensors" if kind == "safetensors" else "pytorch_model*.bin"
        return dict.fromkeys(sorted(model.glob(pattern)))
    with reading(index, "index of a checkpoint"):
        places: dict[str, str] = json.loads(whole_file(index))["weight_map"]
        files: dict[Path, Set[str] | None] = {
            model / file: {name for name, place in places.items() if place == file}
            for file in sorted({*places.values()})
        }
    lost = [path.name for path in files if not path.is_file()]
    if lost or (
        kind == "safetensors" and (model / "model.safetensors").is_file() and model / "model.safetensors" not in files
    ):
        says = (
            f"{index.name} names {lost[0]}, which does not exist"
            if lost
            else f"{index.name} does not name model.safetensors"
        )
        raise EvidenceError(says, "the files of a single checkpoint", "remove files left over from another checkpoint")
    return files


def _tensors(path: Path, names: Set[str] | None) -> Iterator[tuple[str, Sequence[int], Callable[[], Tensor]]]:
    """Yield a file's parameters (only those in `names`, if given): the name, the shape, and a function that reads it."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".bin":
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            yield from (
                (name, held[name].shape, partial(held.get, name)) for name in held if names is None or name in names
            )
            return
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if names is None or name in names:
                    yield name, opened.get_slice(name).get_shape(), partial(opened.get_tensor, name)
    except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError, AttributeError) as error:
        raise EvidenceError(f"{path.name}: {error}", "a whole file of weights", "download it again") from None


def _described_part(name: str, tensor: Tensor, shapes: Mapping[str, Sequence[int]]) -> Weight:
    """Describe a checkpoint's parameter.

    Args:
        shapes: the shapes of all parameters in the checkpoint, by name.
    """
    place = place_in_fused(name, shapes)
    return describe_weight(name, tensor) if place is None else describe_part(name, tensor, *place)


def beside_checkpoint(loaded: Sequence[Weight], stored: Sequence[Weight]) -> tuple[Weight, ...]:
    """Mark parameters whose values differ from the checkpoint's, and parameters that it lacks, wholly or in part.

    Parameters that the engine only rounded, reordered or quantised are not marked, nor are those with another name in the
    checkpoint: a tensor counts as missing if other layers have it.
    """
    by_name = {weight.name: weight for weight in stored}
    groups = grouped(by_name.values())
    parts = {weight.name: _parts(weight.name, by_name, groups) for weight in loaded}
    judged = [weight for weight in loaded if weight.dtype in _FLOATS and weight.name.endswith(("weight", "bias"))]
    lacking = {*_lacked_by_layers(judged, parts), *_lacked_at_the_ends(judged, parts, by_name)}
    return tuple(
        weight.model_copy(update={"not_in_checkpoint": True})
        if weight.name in lacking
        else _marked(weight, parts[weight.name])
        for weight in loaded
    )


def _parts(name: str, by_name: Mapping[str, Weight], groups: Mapping[str, list[Weight]]) -> list[Weight]:
    """Return a parameter's counterpart in the checkpoint: itself, or the parts that make it up."""
    if name in by_name:
        return [by_name[name]]
    return groups.get(canonical_name(name), []) if is_whole(name) else []


def _lacked_by_layers(judged: Sequence[Weight], parts: Mapping[str, Sequence[Weight]]) -> Iterator[str]:
    """Yield the parameters that a few layers lack and the others have."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for weight in judged:
        if _LAYER.search(weight.name):
            alike.setdefault((_LAYER.sub(".", weight.name), weight.shape), []).append(weight.name)
    for names in alike.values():
        have = {name: {_LAYER.sub(".", part.name) for part in parts[name]} for name in names}
        whole = set().union(*have.values())
        lacking = [name for name in names if have[name] != whole]
        # Layers of another kind may lack their own K or V, but there are more of them.
        yield from lacking if len(lacking) < len(names) and len(lacking) <= max(1, len(names) // 4) else ()


def _lacked_at_the_ends(
    judged: Sequence[Weight], parts: Mapping[str, Sequence[Weight]], by_name: Mapping[str, Weight]
) -> Iterator[str]:
    """Yield parameters before or after the layers that are missing, neither present under another name nor tied."""
    read = {part.name for of in parts.values() for part in of}
    if any(name not in read and not _LAYER.search(name) for name in by_name):
        return
    there = {(weight.digest, weight.sums) for weight in judged if parts[weight.name]}
    for weight in judged:
        if _ENDS.search(weight.name) and not parts[weight.name] and (weight.digest, weight.sums) not in there:
            yield weight.name


def _marked(weight: Weight, parts: Sequence[Weight]) -> Weight:
    if not parts or {weight.dtype, *(part.dtype for part in parts)} - _FLOATS:
        return weight
    stored = added_up(weight.name, parts)
    if extent(stored) != extent(weight):
        stored = stored.model_copy(update={"projections": ()})
    far = distance(stored, weight)
    if far is None or same_numbers(far) or rounded_to(stored, weight, far):
        return weight
    in_any_order = distance_in_any_order(stored, weight)
    if in_any_order is not None and same_numbers(in_any_order):
        return weight  # the engine's own layout
    return weight.model_copy(update={"unlike_checkpoint": far})
