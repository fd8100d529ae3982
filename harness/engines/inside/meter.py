"""Counts attention calls inside a server by backend, kernel, phase and layer, and records each prefill batch.

A delegated call is counted once, under the backend that computes it, with the name of the backend that delegated it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from assay.harness.attention.call import Kernel
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.kernels import title
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.graph_counts import GraphCounts, capturing, compilable, count_call
from assay.harness.evidence.counters import (
    ADMISSIONS,
    FOLDER,
    REPLAYS,
    TABLE_LAYERS,
    Admission,
    CounterFile,
    CounterRow,
)
from assay.harness.evidence.run_file import nonce_of_process


@cache
def _counters(folder: Path) -> CounterFile:
    return CounterFile(folder / FOLDER, str(os.getpid()), nonce_of_process())


@cache
def _graph_counts(folder: Path) -> GraphCounts:
    return GraphCounts(_counters(folder))


class _Admissions:
    """Records every prefill batch once, at its lowest layer: request ids, and new tokens and cached prefix of each request."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ADMISSIONS).open("ab", buffering=0)  # processes share it: a line must be one write
        self._layer: int | None = None
        self._run = nonce_of_process()

    def note(self, layer: int, requests: Sequence[str], new: Sequence[int], prefix: Sequence[int]) -> None:
        """Record a batch if this is its first layer: request ids, and new and cached tokens of each."""
        if self._layer is None or layer < self._layer:
            self._layer = layer
        if layer != self._layer:
            return
        admission = Admission(
            run=self._run,
            process=os.getpid(),
            rids=tuple(requests),
            new=tuple(int(n) for n in new),
            prefix=tuple(int(n) for n in prefix),
        )
        self._file.write(admission.model_dump_json().encode() + b"\n")


@cache
def admissions(folder: Path) -> _Admissions:
    """Return the one list of a process."""
    return _Admissions(folder)


@cache
def replays(folder: Path) -> Callable[[str, int], None]:
    """Return a function that counts a pass of this process served by a CUDA graph, by its phase and its number of requests."""
    file = CounterFile(folder / REPLAYS, str(os.getpid()), nonce_of_process())
    rows = {
        phase: file.row(CounterRow(backend="", kernel="CUDA graph", phase=phase, cached_prefix=False, captured=True))
        for phase in ("prefill", "decode")
    }
    return lambda phase, requests: file.add(rows[phase], min(requests, TABLE_LAYERS - 1))


def rows_of(backend: str, name: str = "", kernel: Kernel | None = None, device: str = "cpu") -> dict[str, CounterRow]:
    """Return who computes each phase, as a counter names it: a backend, or in the phases that it declares a kernel in its place.

    Args:
        name: the kernel's name.
        device: torch device type of the model.
    """
    declared = declaration(kernel) if kernel else Declaration(())
    # A kernel without a package counts as plain PyTorch, which the interpreter does not touch.
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and bool(declared.package)
    rows = {
        phase: CounterRow(backend=backend, kernel=backend, phase=phase, cached_prefix=False, delegated_by=name)
        for phase in PHASES
    }
    if kernel is None:
        return rows
    own = {"backend": name, "kernel": title(name, kernel, interpreted), "delegated_by": "", "interpreted": interpreted}
    return rows | {phase: rows[phase].model_copy(update=own) for phase in declared.phases}


class Meter:
    """Counts the calls of one phase of a backend.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        kind: key of a counter: backend, kernel and phase, the delegating backend, and whether it is interpreted; prefix and graphs
            are not set.
        device: torch device on which it computes.
    """

    def __init__(self, folder: Path, kind: CounterRow, device: str) -> None:
        self._counters, self._graphs = _counters(folder), _graph_counts(folder)
        self._kind = kind
        self._rows: dict[tuple[bool, bool, bool], int] = {}
        self._tally = torch.zeros(1, dtype=torch.int64, device=device)
        if self._tally.is_cuda:
            self._graphs.prepare(self._tally.device)
        self._compiled = compilable(lambda layer: self.count(layer, kind.phase == "decode", True))

    def count(self, layer: int, cached: bool, compiled: bool = False) -> None:
        """Count a call, or, in a capture, the calls that it will become."""
        if capturing():
            self._graphs.capture(self._row(self._kind.phase == "decode", True, compiled), layer)
        else:
            self._counters.add(self._row(cached, False, compiled), layer)

    def count_compiled(self, layer: int) -> None:
        """Count a call of code that ``torch.compile`` compiles."""
        count_call(self._tally, self._compiled, layer)

    def _row(self, cached: bool, captured: bool, compiled: bool) -> int:
        key = cached, captured, compiled
        if key not in self._rows:
            update = {"cached_prefix": cached, "captured": captured, "compiled": compiled}
            self._rows[key] = self._counters.row(self._kind.model_copy(update=update))
        return self._rows[key]
