"""A dump of tensors, whoever wrote it: which tensors it holds, where in the model each was taken, and how to map one.

Recognised by content: SGLang's dumper and its ``--debug-tensor-dump-output-folder`` (0.5.23), the dumps of ``SGLANG_KERNEL_API_*``
(0.5.23) and of FlashInfer's level 10 (0.6.18, ``flashinfer/api_logging.py``), and plain safetensors, .pt, .npz or .npy files such
as hooks on a Hugging Face model save.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.tensors.names import Place, pairing_key, place_of, tags_of
from assay.harness.ingest.tensors.numpy_files import arrays, load_array
from assay.harness.ingest.tensors.tensor_files import NoTensor, Unreadable, leaves, load_torch, safetensors_entries
from assay.harness.reading import reading

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".npy")
_PASS = re.compile(r"Pass(\d+)$")
_RANK = re.compile(r"(TP\d+_PP\d+)_Rank\d+_pid\d+$")
_CALL = re.compile(r"\d{8}_\d{6}_\d+_pid\d+_(?P<function>.+)_call(?P<number>\d+)$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a dump.

    Attributes:
        key: the same for the same tensor of another dump.
        place: where in the model it was taken.
        path: its file.
        map: gives the tensor, mapped, not copied.
        bytes: size of its data; None if only opening the file tells.
    """

    key: str
    place: Place
    path: Path
    map: Callable[[], Tensor]
    bytes: int | None = None


@dataclass(frozen=True)
class Dump:
    """All tensors of a dump, in depth order.

    Attributes:
        path: as given.
        format: id, such as "sglang-dumper".
        tensors: in the order in which they were computed where the dump keeps it, else by pass, layer and boundary.
        refused: why a file was not read, for each that was not.
    """

    path: Path
    format: str
    tensors: tuple[StoredTensor, ...]
    refused: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of its tensor files."""
        return sum(path.stat().st_size for path in {tensor.path for tensor in self.tensors})


TITLES = {
    "sglang-dumper": "SGLang dumper",
    "sglang-passes": "SGLang --debug-tensor-dump-output-folder",
    "kernel-api": "kernel API dump (SGLANG_KERNEL_API_* or FlashInfer level 10)",
    "tensors": "tensor files",
}


def tensor_files(path: Path) -> list[Path]:
    """Return the tensor files of a dump, sorted by name."""
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    return sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())


def format_of(files: Iterable[Path]) -> str:
    """Infer the format of a dump from the names of its files; empty if there are none."""
    first = next(iter(files), None)
    if first is None:
        return ""
    if tags_of(first.stem):
        return "sglang-dumper"
    if _PASS.match(first.stem) and _RANK.match(first.parent.name):
        return "sglang-passes"
    return "kernel-api" if _CALL.match(first.parent.name) and first.stem in ("inputs", "outputs") else "tensors"


def open_dump(path: Path) -> Dump:
    """List the tensors of a dump; only headers are read, except of .pt files with more than one tensor.

    Raises:
        UsageError: there is nothing at `path`, or no tensor file.
        Unreadable: not one of its files can be read.
    """
    files = tensor_files(path) if path.exists() else []
    if not files:
        missing = f"{path} has no tensor file." if path.exists() else f"There is no {path}."
        raise UsageError(
            missing, f"a file or folder with {', '.join(_SUFFIXES)}", "check the path; was the dump switched on?"
        )
    kind = format_of(files)
    found_tensors: list[StoredTensor] = []
    refused: list[str] = []
    for file in files:
        try:
            with reading(file, "tensor file"):
                found_tensors += _READERS[kind](file, path)
        except EvidenceError as error:
            refused.append(error.found)
            last = error
    if not found_tensors and not refused:
        raise Unreadable(f"{path} holds no tensor.", "a dump with tensors", "dump again; was the dump switched on?")
    if not found_tensors:
        raise last
    if kind == "tensors":
        found_tensors.sort(key=lambda item: item.place.depth)
    if kind == "sglang-dumper":
        found_tensors.sort(
            key=lambda tensor: (
                tensor.place.rank,
                tensor.place.step,
                int(tags_of(tensor.path.stem).get("dump_index", 0)),
            )
        )
    return Dump(path, kind, tuple(_distinct(found_tensors)), tuple(refused))


def _distinct(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Number the tensors that have the same key: what a pass dumps several times under one name."""
    seen: Counter[str] = Counter()
    for tensor in tensors:
        seen[tensor.key] += 1
        yield tensor if seen[tensor.key] == 1 else replace(tensor, key=f"{tensor.key} #{seen[tensor.key]}")


def _from_dumper(file: Path, root: Path) -> Iterator[StoredTensor]:
    tags = tags_of(file.stem)
    if not tags:
        yield from _from_file(file, root)
        return
    name = tags.get("name", "").removeprefix("non_intrusive__")
    layer = int(tags["layer_id"]) if tags.get("layer_id", "").isdigit() else None
    rank = "" if tags.get("rank", "0") == "0" else f"rank {tags['rank']}"
    place = place_of(name, int(tags["step"]), rank, layer)
    yield StoredTensor(pairing_key(tags), place, file, lambda: _dumped_value(file), file.stat().st_size)


def _dumped_value(file: Path) -> Tensor:
    """Read the tensor of one file of SGLang's dumper, which holds ``{"value": ..., "meta": {...}}``.

    Raises:
        Unreadable: it is damaged.
        NoTensor: its value is no tensor.
    """
    held = load_torch(file)
    value = held.get("value") if isinstance(held, dict) else None
    if not isinstance(value, Tensor):
        raise NoTensor(f"{file} holds no tensor but {type(value).__name__}.", "a tensor", "dump it again")
    return value


def _from_passes(file: Path, root: Path) -> Iterator[StoredTensor]:
    counted = _PASS.match(file.stem)
    number = int(counted.group(1)) if counted else 0
    rank = _RANK.match(file.parent.name)
    where = rank.group(1) if rank else ""
    for name, tensor in leaves(load_torch(file)):
        place = place_of(name, number, "" if where == "TP0_PP0" else where)
        yield StoredTensor(f"{where}/{number}/{name}", place, file, _held(file, name), tensor.nbytes)


def _from_call(file: Path, root: Path) -> Iterator[StoredTensor]:
    call = _CALL.match(file.parent.name)
    prefix = f"{call['function']}/{int(call['number'])}/" if call else ""
    for tensor in _from_file(file, root):
        step = int(call["number"]) if call else 0
        name = f"{call['function']}.{file.stem}.{tensor.key.rpartition('/')[2]}" if call else tensor.key
        yield replace(tensor, key=f"{prefix}{file.stem}/{tensor.key.rpartition('/')[2]}", place=place_of(name, step))


def _from_file(file: Path, root: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of any tensor file. A folder of several files pairs them by their paths within it."""
    inside = "" if root == file else f"{file.relative_to(root)}/"
    number = re.search(r"(\d+)$", file.stem)
    step = int(number.group(1)) if inside and number else 0
    if file.suffix == ".safetensors":
        for name, (size, mapped) in safetensors_entries(file).items():
            yield StoredTensor(f"{inside}{name}", place_of(name, step), file, mapped, size)
        return
    if file.suffix in (".npz", ".npy"):
        for name, size in arrays(file):
            yield StoredTensor(f"{inside}{name}", place_of(name, step), file, partial(load_array, file, name), size)
        return
    for name, tensor in leaves(load_torch(file)):
        yield StoredTensor(f"{inside}{name}", place_of(name, step), file, _held(file, name), tensor.nbytes)


def _held(file: Path, name: str) -> Callable[[], Tensor]:
    return lambda: _held_in(file)[name]


@lru_cache(maxsize=4)
def _held_in(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a .pt file, mapped. The last few files stay open: their tensors are asked for one after the other."""
    return dict(leaves(load_torch(file)))


_READERS: dict[str, Callable[[Path, Path], Iterator[StoredTensor]]] = {
    "sglang-dumper": _from_dumper,
    "sglang-passes": _from_passes,
    "kernel-api": _from_call,
    "tensors": _from_file,
}
