"""Tensor files, opened without running anything: safetensors, and PyTorch's format without pickled objects.

safetensors: an 8-byte little-endian length, a JSON header, then the tensors' bytes (as of safetensors 0.5). PyTorch files are
opened with ``torch.load(weights_only=True)``, which admits tensors and plain containers only, and are mapped, not copied, where
they are zip files (all that PyTorch 1.6 or later writes).
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.reading import reading, regular_file

_MAX_HEADER = 100 << 20
"""Bytes: the largest header that the safetensors library itself accepts."""
_REPEATED = 1 << 28
"""Bytes up to which a tensor may repeat fewer that are stored, as one that was expanded does."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DO = (
    "dump again as safetensors, or with torch.save of tensors in plain dicts and lists; assay runs no code from a file"
)


class Unreadable(EvidenceError):
    """A tensor file that is damaged, or that only code could read. It is never executed."""


class NoTensor(Unreadable):
    """A value that is no tensor, such as a list of request ids."""


def safetensors_entries(path: Path) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """List the tensors of a safetensors file, in the order of its header, without reading their data.

    Returns the bytes of each, and what maps it: its data are read when they are used, and writing to it changes no file.

    Raises:
        Unreadable: the header is damaged, or the file is shorter than the header states.
        EvidenceError: it is no regular file.
    """
    size = regular_file(path).st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
        entries = dict(_entries(path, header, 8 + length, size))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Unreadable(
            f"{path} is not a whole safetensors file: {error}.", "a file that was written completely", "dump again"
        ) from None
    return entries


def _entries(
    path: Path, header: dict[str, Any], start: int, size: int
) -> Iterator[tuple[str, tuple[int, Callable[[], Tensor]]]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name} has dtype {entry['dtype']}")
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        first, last = entry["data_offsets"]
        if (
            last - first != math.prod(shape) * dtype.itemsize
            or first < 0
            or start + last > size
            or min(shape, default=0) < 0
        ):
            raise ValueError(
                f"tensor {name} has {last - first:,} bytes where its shape and dtype need another number, or lies outside"
            )
        yield name, (last - first, partial(_mapped, path, dtype, shape, start + first))


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """Map a tensor whose bytes lie at an offset of a file."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = torch.from_numpy(np.memmap(path, np.uint8, "c", offset, (count * dtype.itemsize,)))
    if offset % dtype.itemsize:  # such a file is legal; a view needs alignment
        data = data.clone()
    return data.view(dtype).view(shape)


def load_torch(path: Path) -> Any:
    """Load a PyTorch file: tensors, mapped where possible, in plain containers.

    Raises:
        Unreadable: the file is damaged, or holds objects that only code could restore.
    """
    with reading(path, "PyTorch file"):
        held = _load_torch(path)
        for name, tensor in leaves(held):
            _require_data(path, name, tensor)
        return held


def _require_data(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of which not every element lies in the file: reading one ends the process, or needs any amount of memory."""
    kind = str(tensor.layout).removeprefix("torch.") if tensor.layout != torch.strided else tensor.device.type
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else kind
    if kind != "cpu":
        raise Unreadable(f"{path}: {name} is a {kind} tensor.", "dense tensors with their data", _DO)
    if tensor.nbytes > max(tensor.untyped_storage().nbytes(), _REPEATED):
        raise Unreadable(
            f"{path}: {name} of shape {list(tensor.shape)} repeats {tensor.untyped_storage().nbytes():,} bytes.",
            "tensors with all of their elements",
            "save a contiguous copy",
        )


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        why = str(error).split("\n")[0][:200]
        raise Unreadable(f"{path} holds more than tensors in plain containers: {why}", "tensors only", _DO) from None
    except (RuntimeError, ValueError, EOFError, KeyError, AssertionError, OSError) as error:
        raise Unreadable(
            f"{path} is damaged or no PyTorch file: {str(error).splitlines()[0][:200]}", "a whole file", "dump again"
        ) from None


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with dotted names: ``{"a": [x, y]}`` has "a.0" and "a.1"."""
    if isinstance(value, Tensor):
        yield name or "tensor", value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from leaves(member, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield from leaves(member, f"{name}.{number}" if name else str(number))
