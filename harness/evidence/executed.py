"""The kernels that ran inside a server, as its processes saw them in the forward passes that the harness had them trace.

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
"""A kernel on a GPU, a Triton function that the interpreter ran, or an operator of PyTorch."""


class ExecutedKernel(Record):
    """A kernel that ran in a pass.

    Attributes:
        kind: see `KernelKind`.
        name: as the profiler shows it; of an interpreted Triton function its ``__name__``.
        module: of an interpreted Triton function; empty for the others.
        attention: whether an attention call launched it; None where that is unknown, as in a replayed CUDA graph.
        launches: how often it was launched in the pass.
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
        kernels: what ran in it.
    """

    phase: str
    cached_prefix: bool
    kernels: tuple[ExecutedKernel, ...]


class KernelTrace(RunRecord):
    """The trace of one process.

    Attributes:
        backend: name of the attention backend that was served.
        noise: the quantisation that its kernel declares; empty for none, as are the next two for a backend of the engine.
        package: the distribution that it declares.
        kernels: the names of what it launches, as it declares them: regular expressions.
        in_package: names of the Triton functions that the package's imported modules define.
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
    """Return the traced passes of a phase, of all processes."""
    return [pass_ for trace in traces for pass_ in trace.passes if pass_.phase == phase]
