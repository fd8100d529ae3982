"""Lists the kernels that run in a forward pass, while the control names a profile: the proof that a kernel ran.

One pass of each kind is traced under a label: extend without a cached prefix, extend with one, and decode. ``torch.profiler`` shows
the kernels on a GPU, including those of replayed CUDA graphs, and PyTorch's operators. Triton's interpreter launches nothing that a
profiler sees, so its launches are recorded where it makes them. While no profile is requested, a pass costs one ``stat``.
"""

from __future__ import annotations

import bisect
import importlib.metadata
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from assay.harness.attention.declaration import Declaration
from assay.harness.engines.inside.attachment import ControlReader
from assay.harness.engines.inside.graph_counts import capturing
from assay.harness.evidence.executed import (
    KERNEL_TRACES,
    ExecutedKernel,
    KernelKind,
    KernelTrace,
    TracedPass,
)
from assay.harness.evidence.run_file import nonce_of_process

# Name of the profiler's range around an attention call.
_ATTENTION = "assay::attention"
# Copies and fills, which the profiler lists among the kernels.
_NOT_KERNELS = re.compile(r"^Mem(cpy|set) ")
# Names of calls of the CUDA runtime and driver.
_LAUNCH = re.compile(r"^cu(da)?[A-Z]")
_OPERATOR = "::"


# A kernel, to count its launches by: kind, name, module, and whether attention launched it.
_Seen = tuple[KernelKind, str, str, bool | None]


class KernelTracer:
    """Traces the passes of one process.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = ControlReader(folder)
        self._backend = ""
        self._declared = Declaration()
        self._label = ""
        self._traced: set[tuple[str, bool]] = set()
        self._passes: list[TracedPass] = []
        self._in_attention = False
        self.on = False
        """Whether the current pass is traced."""

    def served_by(self, backend: str, declared: Declaration) -> None:
        """Record the attention backend of the passes, and the declaration of its kernel."""
        self._backend, self._declared = backend, declared

    def run(self, forward: Callable[[], Any], kind: Callable[[], tuple[str, bool] | None]) -> Any:
        """Run a pass, and trace it if the control names a profile that has no pass of its kind yet.

        Args:
            kind: returns its phase, and whether it has a cached prefix, or None for a pass of neither phase or without requests.
        """
        label = self._reader.latest().control.profile
        if label != self._label:
            self._label, self._traced = label, set()
        of = None if not label or capturing() else kind()
        if of is None or of in self._traced:
            return forward()
        out, kernels = self._trace(forward)
        self._keep(of, kernels)
        return out

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Mark the range of an attention call in a pass that is traced."""
        self._in_attention = True
        try:
            with record_function(_ATTENTION):
                yield
        finally:
            self._in_attention = False

    def _trace(self, run: Callable[[], Any]) -> tuple[Any, Counter[_Seen]]:
        interpreted: Counter[_Seen] = Counter()

        def launched(function: Any) -> None:
            interpreted["triton", function.__name__, function.__module__, self._in_attention] += 1

        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.on = True
        try:
            with _interpreter_launches(launched), profile(activities=activities) as profiler:
                out = run()
                if on_gpu:
                    torch.cuda.synchronize()
        finally:
            self.on = False
        return out, interpreted + _kernels_in(profiler.profiler.kineto_results.events())

    def _keep(self, kind: tuple[str, bool], kernels: Counter[_Seen]) -> None:
        self._traced.add(kind)
        listed = tuple(
            ExecutedKernel(kind=of, name=name, module=module, attention=attention, launches=launches)
            for (of, name, module, attention), launches in sorted(kernels.items(), key=_order)
        )
        self._passes.append(TracedPass(phase=kind[0], cached_prefix=kind[1], kernels=listed))
        trace = KernelTrace(
            run=nonce_of_process(),
            backend=self._backend,
            noise=str(self._declared.noise),
            package=self._declared.package,
            kernels=self._declared.kernels,
            in_package=_triton_functions(self._declared.package),
            passes=tuple(self._passes),
        )
        KERNEL_TRACES.write(self._folder, trace)


@cache
def kernel_tracer(folder: Path) -> KernelTracer:
    """Return the one tracer of a server process."""
    return KernelTracer(folder)


def _order(item: tuple[_Seen, int]) -> tuple[Any, ...]:
    """Return a sort key: kernels launched by attention first, then by launches."""
    (kind, name, _, attention), launches = item
    return attention is False, kind, -launches, name


def _kernels_in(events: Sequence[Any]) -> Counter[_Seen]:
    """Count launches by kernel, in the events of a profile.

    Kernels on a device are listed wherever they were launched. PyTorch's operators are listed only inside attention calls.
    """
    on_host = [event for event in events if event.device_type() == DeviceType.CPU]
    ranges = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_host if event.name() == _ATTENTION
    )
    starts = [start for start, _ in ranges]

    def in_attention(moment: int) -> bool:
        at = bisect.bisect_right(starts, moment) - 1
        return at >= 0 and moment <= ranges[at][1]

    launched_at = {event.correlation_id(): event.start_ns() for event in on_host if _LAUNCH.match(event.name())}
    seen: Counter[_Seen] = Counter()
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CPU:
            if _OPERATOR in name and name != _ATTENTION and in_attention(event.start_ns()):
                seen["operator", name, "", True] += 1
        elif not event.is_user_annotation() and not _NOT_KERNELS.match(name):
            moment = launched_at.get(event.correlation_id())
            known = bool(ranges) and moment is not None
            seen["device", name, "", in_attention(moment) if known and moment is not None else None] += 1
    return seen


@contextmanager
def _interpreter_launches(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with the Python function of every kernel that Triton's interpreter runs, within the context."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    launch = interpreter.GridExecutor.__call__

    def noted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        note(executor.fn)
        return launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch


def _triton_functions(package: str) -> tuple[str, ...]:
    """Return the names of the Triton functions that the imported modules of a distribution define; none for an empty name."""
    if not package or "triton" not in sys.modules:
        return ()
    from triton.runtime.jit import KernelInterface

    roots = {root for root, of in importlib.metadata.packages_distributions().items() if package in of} or {package}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in roots]
    functions = [
        value for module in modules for value in list(vars(module).values()) if isinstance(value, KernelInterface)
    ]
    return tuple(sorted({_inner(function).__name__ for function in functions}))


def _inner(function: Any) -> Any:
    """Return the Python function inside a Triton function, which an autotuner may wrap."""
    while hasattr(function, "fn"):
        function = function.fn
    return function
