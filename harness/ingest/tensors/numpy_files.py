"""Arrays of NumPy, opened without pickle: ``.npy`` is one array, ``.npz`` a zip file of them (as of NumPy 2.3).

NumPy has no bfloat16: `ml_dtypes` saves one as two bytes without a type (``V2``), which could be anything, so it is refused.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from assay.harness.ingest.tensors.tensor_files import Unreadable

MAGIC = b"\x93NUMPY"
"""First bytes of a ``.npy`` file, and of each member of a ``.npz`` file."""
_HEADER = 1 << 16
"""Bytes of an array's header that are read at most; NumPy writes about 128."""


def arrays(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names of a file's arrays with the bytes of each; a ``.npy`` file has one, "tensor". Only headers are read.

    Raises:
        Unreadable: the file is damaged, or an array is of a type that no tensor has.
    """
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                yield "tensor", _size(file, path.stat().st_size)
            return
        with zipfile.ZipFile(path) as members:
            for member in members.infolist():
                with members.open(member) as file:
                    yield member.filename.removesuffix(".npy"), _size(file, member.file_size)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def load_array(path: Path, name: str) -> Tensor:
    """Load one array as a tensor, mapped where it is a file of its own.

    Raises:
        Unreadable: it is damaged.
    """
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="c", allow_pickle=False)
        else:
            with np.load(path, allow_pickle=False) as members:
                array = members[name]
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise _unreadable(path, error) from None
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(native).reshape(native.shape))


def _size(file: IO[bytes], whole: int) -> int:
    """Compute the bytes of the array whose header is next in a file of `whole` bytes.

    Raises:
        ValueError: the header is damaged, the file is shorter than it states, or no tensor has the type.
    """
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format is not known")
    shape, _, dtype = read(file, max_header_size=_HEADER)
    if dtype.kind not in "fiub" or dtype.name == "float128" or dtype.itemsize > 8:
        raise ValueError(f"an array has dtype {dtype}, which no tensor has")
    size = math.prod(shape) * dtype.itemsize
    left = whole - file.tell()
    if size > left:
        raise ValueError(f"an array of shape {shape} needs {size:,} bytes, and there are {left:,}")
    return size


def _unreadable(path: Path, error: Exception) -> Unreadable:
    lines = str(error).splitlines() or [type(error).__name__]
    return Unreadable(
        f"{path} is no whole NumPy file: {lines[0][:200]}.", "np.save or np.savez of numbers", "save it again"
    )
