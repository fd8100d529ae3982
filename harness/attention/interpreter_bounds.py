"""Makes Triton's interpreter detect each access outside of a kernel's tensors.

In the interpreter, a load beyond a tensor reads arbitrary memory, and a store beyond it corrupts the allocator's memory, so that
the process crashes in a later call. Here, such a store is skipped, and such a load reads the memory around a guarded tensor
(`assay.harness.localize.guarded_memory`) or zeros. Both are recorded with the tensor, the distance and the line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_NEEDED = ("GridExecutor", "InterpreterBuilder", "TensorHandle", "TensorDescriptor", "_get_np_dtype")
# Prefix of the modules that change the interpreter, to skip their frames above a kernel's.
_INTERPRETER = __name__.removesuffix("bounds")
# Most accesses to record in one call: a kernel makes the same mistake in each program.
_MAX_SEEN = 16


@dataclass(frozen=True)
class _Overrun:
    """An access outside of the tensors of a launch.

    Attributes:
        does: "reads" or "writes".
        argument: the nearest tensor, by the name of the kernel's parameter.
        elements: the distance beyond that tensor in its elements; negative if it is before the first one.
        line: file, line and function of the kernel.
    """

    does: Literal["reads", "writes"]
    argument: str
    elements: int
    line: str

    @property
    def words(self) -> str:
        """Describe the access, for example "writes 32 elements beyond the end of out_ptr (mine.py, line 40, in _attend)"."""
        count = abs(self.elements)
        side = "beyond the end" if self.elements > 0 else "before the start"
        return f"{self.does} {count:,} element{'s' * (count != 1)} {side} of {self.argument} ({self.line})"


class _Memory:
    """The memory that the kernel of a launch may access, and its accesses outside of that.

    Attributes:
        inside: of a storage that is larger than its tensor: first byte -> first byte and end of the tensor.
        overruns: accesses outside, since somebody last looked.
    """

    def __init__(self) -> None:
        self.inside: dict[int, tuple[int, int]] = {}
        self.overruns: list[_Overrun] = []
        self._names: list[tuple[str, int]] = []
        self._starts: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._ends: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._mapped: list[tuple[int, int]] = []

    @contextmanager
    def watching(self) -> Iterator[list[_Overrun]]:
        """Record accesses outside of a launch's tensors in the list, inside the context."""
        before, self.overruns = self.overruns, []
        try:
            yield self.overruns
        finally:
            self.overruns = before

    def launch(self, tensors: list[tuple[str, Any]]) -> None:
        """Begin a kernel that was given these tensors, as (parameter, tensor)."""
        tensors_at: dict[tuple[int, int], tuple[str, int]] = {}
        self._mapped = []
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            whole = (start, start + storage.nbytes())
            self._mapped.append(whole)
            tensors_at.setdefault(self.inside.get(start, whole), (name, tensor.element_size()))
        spans = sorted(tensors_at)
        self._names = [tensors_at[span] for span in spans]
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._ends = np.array([end for _, end in spans], np.uint64)

    def checked(
        self, does: Literal["reads", "writes"], at: NDArray[np.uint64], mask: NDArray[np.bool_], size: int
    ) -> NDArray[np.bool_]:
        """Return the mask of an access, without addresses outside of the accessible memory.

        Args:
            does: "reads" or "writes".
            at: addresses.
            mask: flags of the accessed ones.
            size: bytes of an element.
        """
        some = at[mask]
        if not some.size or not len(self._starts):
            return mask
        low, high = some.min(), some.max()
        span = int(np.searchsorted(self._starts, low, "right")) - 1
        if span >= 0 and high + size <= self._ends[span]:
            return mask
        spans = np.searchsorted(self._starts, at, "right").astype(np.int64) - 1
        outside = mask & ((spans < 0) | (at + np.uint64(size) > self._ends[spans]))
        if not outside.any():
            return mask
        self._note(does, at[outside], size)
        lost = outside if does == "writes" else outside & ~self._is_mapped(at, size)
        return mask & ~lost

    def _is_mapped(self, at: NDArray[np.uint64], size: int) -> NDArray[np.bool_]:
        mapped = np.zeros(at.shape, np.bool_)
        for start, end in self._mapped:
            mapped |= (at >= np.uint64(start)) & (at + np.uint64(size) <= np.uint64(end))
        return mapped

    def _note(self, does: Literal["reads", "writes"], at: NDArray[np.uint64], size: int) -> None:
        if len(self.overruns) >= _MAX_SEEN:
            return
        far: tuple[int, int, int] | None = None  # distance to the nearest tensor, its number, elements beyond it
        for address in {int(at.min()), int(at.max())}:
            for number, (start, end) in enumerate(zip(self._starts.tolist(), self._ends.tolist(), strict=True)):
                beyond = address + size - end if address + size > end else address - start
                if far is None or abs(beyond) < far[0]:
                    far = (abs(beyond), number, beyond)
        assert far is not None
        # The farthest address of the access, from the tensor to which the nearest one belongs.
        start, end = int(self._starts[far[1]]), int(self._ends[far[1]])
        bytes_ = int(at.max()) + size - end if far[2] > 0 else int(at.min()) - start
        name, element = self._names[far[1]]
        elements = -(-abs(bytes_) // element) * (1 if bytes_ > 0 else -1)
        self.overruns.append(_Overrun(does, name, elements, _line()))


memory = _Memory()
"""Of this process: the interpreter runs one kernel at a time."""


def check_bounds(interpreter: Any) -> None:
    """Make the interpreter check loads and stores. An unknown interpreter stays unchanged and checks nothing."""
    if not all(hasattr(interpreter, name) for name in _NEEDED):
        return
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, init = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst

    def within(does: Literal["reads", "writes"], pointers: Any, mask: Any) -> Any:
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        data = mask.data if mask.data.shape == pointers.data.shape else np.broadcast_to(mask.data, pointers.data.shape)
        kept = memory.checked(does, pointers.data, data.astype(np.bool_, copy=False), size)
        return mask if kept is data else interpreter.TensorHandle(kept, interpreter.tl.int1)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any, **more: Any) -> Any:
        return load(self, ptrs, within("reads", ptrs, mask), other, *options, **more)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *options: Any, **more: Any) -> Any:
        return store(self, ptrs, value, within("writes", ptrs, mask), *options, **more)

    def init_args(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = init(self, args_dev, kwargs)
        given = [*zip(self.arg_names, args, strict=False), *named.items()]
        memory.launch([(name, tensor) for name, argument in given for tensor in _tensors(interpreter, argument)])
        return args, named

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    executor._init_args_hst = init_args


def _tensors(interpreter: Any, argument: Any) -> Iterator[Any]:
    """Yield the tensors of an argument: itself, of a tuple, or the base of a descriptor."""
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(interpreter, part)
    elif isinstance(argument, interpreter.TensorDescriptor):
        yield from _tensors(interpreter, argument.base)
    elif hasattr(argument, "data_ptr") and hasattr(tensor := getattr(argument, "base", argument), "untyped_storage"):
        yield tensor


def _line() -> str:
    """Return file, line and function of the innermost frame outside of Triton and the modules that change its interpreter."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_INTERPRETER) and module.partition(".")[0] not in ("triton", "numpy"):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
