"""The kernels that ran inside a server, as its processes saw them in traced forward passes.

Each process writes one file, ``kernels/<pid>.json`` in its server's folder, and replaces it after every traced pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.schema import Record

FOLDER = "kernels"
"""Folder of these files, in a server's folder."""

KernelKind = Literal["device", "triton", "operator"]
"""A GPU kernel, a Triton function that the interpreter ran, or a PyTorch operator."""


class ExecutedKernel(Record):
    """A kernel that ran in a pass.

    Attributes:
        kind: see `KernelKind`.
        name: its name in the profiler, or an interpreted Triton function's ``__name__``.
        module: the module of an interpreted Triton function, otherwise empty.
        attention: whether an attention call launched it, or None if unknown, as in a replayed CUDA graph.
        launches: number of launches in the pass.
    """

    kind: KernelKind
    name: str
    module: str = ""
    attention: bool | None = None
    launches: int


class TracedPass(Record):
    """A forward pass with its kernels.

    Attributes:
        phase: "extend" or "decode".
        cached_prefix: whether any sequence had a cached prefix. Always True in decode.
        kernels: the kernels that ran in it.
    """

    phase: str
    cached_prefix: bool
    kernels: tuple[ExecutedKernel, ...]


class KernelTrace(RunRecord):
    """The trace of one process.

    Attributes:
        backend: name of the served attention backend.
        noise: the quantisation that its kernel declares, or empty; for a backend of the engine, the next two are empty too.
        package: the distribution that it declares.
        kernels: the names of its kernels, as it declares them: regular expressions.
        in_package: names of the Triton functions defined in the package's imported modules.
        passes: the traced passes, in order.
    """

    backend: str
    noise: str = ""
    package: str = ""
    kernels: tuple[str, ...] = ()
    in_package: tuple[str, ...] = ()
    passes: tuple[TracedPass, ...]


KERNEL_TRACES = RunFile(f"{FOLDER}/*.json", KernelTrace, RUN_AGAIN, durable=False)


def passes_of(traces: Iterable[KernelTrace], phase: str) -> Sequence[TracedPass]:
    """Return the traced passes of a phase from all processes."""
    return [pass_ for trace in traces for pass_ in trace.passes if pass_.phase == phase]
