"""Which kernels ran inside a server: what its processes saw in the forward passes that the harness had them trace.

Each process writes one file, ``kernels/<pid>.json`` in its server's folder, and replaces it after every traced pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from assay.harness.evidence.nonce import check_run
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

FOLDER = "kernels"
"""Folder of these files, in a server's folder."""
SCHEMA: Literal["assay.kernels/1"] = "assay.kernels/1"

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


class KernelClaim(Record):
    """What the served kernel declares about what it launches; empty for a backend of the engine.

    Attributes:
        noise: the declared quantisation; empty for none.
        package: the declared distribution; empty for none.
        kernels: the declared names: regular expressions.
        in_package: names of the Triton functions that the package's imported modules define.
    """

    noise: str = ""
    package: str = ""
    kernels: tuple[str, ...] = ()
    in_package: tuple[str, ...] = ()


class KernelTrace(Record):
    """What one process saw.

    Attributes:
        run: nonce of the run.
        backend: name of the attention backend that was served.
        claim: what its kernel declares.
        passes: the traced passes, in order.
    """

    schema_id: Literal["assay.kernels/1"] = SCHEMA
    run: str = ""
    backend: str
    claim: KernelClaim
    passes: tuple[TracedPass, ...]


def write_kernels(folder: Path, trace: KernelTrace) -> None:
    """Write what this process saw.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        trace: all passes that it has traced.

    Raises:
        EvidenceError: the file cannot be written.
    """
    write_whole(folder / FOLDER / f"{os.getpid()}.json", trace.model_dump_json(), durable=False)


def read_kernels(folder: Path, run: str = "") -> list[KernelTrace]:
    """What each process of a server saw, in order of their ids; empty if none traced a pass.

    Args:
        folder: the server's folder.
        run: the nonce that each file must carry; empty to accept any.

    Raises:
        EvidenceError: a file is damaged, or belongs to another run.
    """
    traces = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        trace = read_json(path, KernelTrace, "run again with a new --out")
        check_run(path, trace.run, run)
        traces.append(trace)
    return traces


def passes_of(traces: Iterable[KernelTrace], phase: str) -> Sequence[TracedPass]:
    """The traced passes of a phase, of all processes."""
    return [one for trace in traces for one in trace.passes if one.phase == phase]
