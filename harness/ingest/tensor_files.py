"""Reads named tensors from a file or a folder of safetensors, PyTorch or NumPy files. Nothing in a file is executed.

PyTorch files are opened with ``torch.load(weights_only=True)``, which allows only tensors in plain containers, and NumPy files
without pickle. NumPy lacks bfloat16: `ml_dtypes` saves it as two bytes without a type (``V2``), which is refused.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.result import Fact, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensor_layout import depth_of, place_of
from assay.harness.reading import reading, regular_file
from assay.harness.text import ranges

_NAMED = (".safetensors", ".pt", ".pth", ".npz", ".npy")
_SUFFIXES = (*_NAMED, ".bin")
_PROSE = (".log", ".md", ".txt")
_NUMPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_TITLE = "tensor files"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a dump.

    Attributes:
        key: its file's path within the folder, then its name; the same for the same tensor in another dump.
        series: its key without the pass number; the same in all passes of a dump.
        path: its file.
        map: returns the tensor, memory-mapped if the format allows it.
        step: number of the forward pass, or 0 if passes are not counted.
        layer: see `place_of`, also for the next two.
        boundary: such as "attention".
        name: the name without its layer, such as "self_attn.attn.output".
    """

    key: str
    series: str
    path: Path
    map: Callable[[], Tensor]
    step: int
    layer: int | None
    boundary: str
    name: str

    @property
    def depth(self) -> tuple[int, ...]:
        """Sort key: pass, layer, boundary."""
        return self.step, *depth_of(self.layer, self.boundary)


def _tensor_files(path: Path) -> list[Path]:
    """Return the tensor files of a dump, sorted by name."""
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    return sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())


def other_files(path: Path) -> dict[str, Path]:
    """Return a folder's files that assay does not read, by name, except hidden files and text for people."""
    return {
        str(file.relative_to(path)): file
        for file in sorted(path.rglob("*") if path.is_dir() else ())
        if file.is_file() and file.suffix not in (*_SUFFIXES, *_PROSE) and not file.name.startswith(".")
    }


def _recognises(source: SourceFile) -> bool:
    """Recognise a folder with a tensor file, or a file by its first bytes or its suffix, so that damaged files are reported."""
    if source.path.is_dir() or source.path.suffix in _NAMED:
        return bool(_tensor_files(source.path))
    length = int.from_bytes(source.head[:8], "little")
    safetensors = length < 100 << 20 and source.head[8:9] == b"{" and b'"data_offsets"' in source.head
    zipped = source.head.startswith(_ZIP) and (b"data.pkl" in source.head or _NUMPY in source.head)
    return safetensors or zipped or source.head.startswith(_NUMPY)


def open_dump(path: Path) -> tuple[FileRead, list[StoredTensor]]:
    """List the tensors in a file or folder, in depth order: pass, layer, boundary. Only .pt files are loaded.

    Returns:
        A record whose notes name the files that could not be read, and the tensors.

    Raises:
        UsageError: `path` does not exist, or has no tensor file.
        EvidenceError: it holds no tensor, or none of its files can be read.
    """
    files = _tensor_files(path) if path.exists() else []
    if not files:
        missing = f"{path} has no tensor file." if path.exists() else f"{path} does not exist."
        raise UsageError(missing, f"a file or folder with {', '.join(_SUFFIXES)}", "check the path")
    tensors: list[StoredTensor] = []
    refused: list[EvidenceError] = []
    for file in files:
        inside = "" if path == file else f"{file.relative_to(path)}/"
        # A folder of passes has one file for each: pass_3.safetensors.
        numbered = re.search(r"(\d+)$", file.stem) if inside else None
        series = inside.removesuffix("/").removesuffix(file.suffix).rstrip("0123456789")
        try:
            with reading(file, "tensor file"):
                for name, mapped in _entries(file):
                    step, place = int(numbered[1]) if numbered else 0, place_of(name)
                    tensors.append(StoredTensor(f"{inside}{name}", f"{series}/{name}", file, mapped, step, *place))
        except EvidenceError as error:
            refused.append(error)
    if not tensors:
        raise (refused or [EvidenceError(f"{path} holds no tensor.", "a file with tensors", "save them again")])[-1]
    read = FileRead(
        path=str(path), format=READER.id, title=_TITLE, bytes=sum(file.stat().st_size for file in files), sha256="",
        unit="tensor", lines=len(tensors) + len(refused), read=len(tensors), unread=len(refused),
        notes=tuple(error.found for error in refused),
    )  # fmt: skip
    return read, sorted(tensors, key=lambda tensor: tensor.depth)


def _entries(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name of each tensor in a file, and a function that maps it."""
    if file.suffix == ".safetensors":
        for name in _opened_safetensors(file).keys():  # noqa: SIM118 - a handle cannot be iterated
            yield name, partial(_opened_safetensors(file).get_tensor, name)
    elif file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as members:
            for name in members.files:
                yield name, partial(_array, file, name)
    elif file.suffix == ".npy":
        _array(file)
        yield "tensor", partial(_array, file)
    else:
        for name in _loaded_torch(file):
            yield name, partial(lambda name: _loaded_torch(file)[name], name)


@lru_cache(maxsize=4)
def _opened_safetensors(file: Path) -> Any:
    """Open a file. The last few files stay open, since their tensors are requested one after the other."""
    regular_file(file)
    return safe_open(file, framework="pt")


def _array(file: Path, name: str = "") -> Tensor:
    """Load an array as a tensor, memory-mapped if it has a separate file."""
    if name:
        with np.load(file, allow_pickle=False) as members:
            array = members[name]
    else:
        array = np.load(file, mmap_mode="c", allow_pickle=False)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(native).reshape(native.shape))


@lru_cache(maxsize=4)
def _loaded_torch(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a PyTorch file, memory-mapped if it is a zip file, as PyTorch 1.6 and later write."""
    try:
        leaves = list(_leaves(torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))))
    except pickle.UnpicklingError as error:
        why = str(error).split("\n")[0][:200]
        do = "save tensors in plain dicts and lists, or as safetensors; assay runs no code from a file"
        raise EvidenceError(f"{file} holds more than tensors in plain containers: {why}", "tensors only", do) from None
    held: dict[str, Tensor] = {}
    for name, tensor in leaves:
        if name in held:
            raise EvidenceError(
                f"{file} holds two tensors named {name}.", "a name for each", "rename one, and save again"
            )
        # A meta, sparse or expanded tensor represents more numbers than the file holds.
        if tensor.layout != torch.strided or tensor.is_meta or tensor.nbytes > file.stat().st_size:
            says = f"{name} in {file} is not a dense tensor."
            raise EvidenceError(says, "all of its numbers in the file", "save .contiguous()")
        # A quantized tensor's integers alone lack its scale.
        held[name] = tensor.dequantize() if tensor.is_quantized else tensor
    return held


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield tensors and numbers in nested dicts, lists and tuples with dotted names: ``{"a": [x, y]}`` yields "a.0" and "a.1"."""
    if isinstance(value, Tensor):
        yield name or "tensor", value
    elif isinstance(value, bool | int | float | complex):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            value = float(value)
        yield name or "number", torch.tensor(value)
    elif isinstance(value, dict | list | tuple):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(member, f"{name}.{key}" if name else str(key))


def _read(source: SourceFile) -> FileDocument:
    """List a file's tensors for ``assay ingest``."""
    file, tensors = open_dump(source.path)
    layers = {tensor.layer for tensor in tensors if tensor.layer is not None}
    passes = {tensor.step for tensor in tensors}
    says = f"{len(tensors):,} tensors, {file.bytes / 1e6:,.1f} MB, {len(passes):,} passes"
    facts = (
        Fact(id="tensors", title="Tensors", text=says),
        Fact(id="layers", title="Layers", text=ranges(layers)),
        Fact(id="next", title="What to do with it", text="assay compare A B finds the first difference of two dumps"),
    )
    counts = Counter(tensor.boundary for tensor in tensors)
    rows = tuple((boundary, f"{count:,}") for boundary, count in counts.most_common())
    table = FactTable(id="boundaries", title="Tensors by boundary", columns=("boundary", "tensors"), rows=rows)
    return FileDocument(file=file, facts=facts, tables=(table,))


READER = FormatReader("tensors", _TITLE, _recognises, _read)
