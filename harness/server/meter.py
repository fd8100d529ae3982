"""Counts attention calls inside a server by backend, kernel, phase and layer, and notes each prefill batch.

Metering wraps a backend's ``forward_extend`` and ``forward_decode``. A delegated call is counted once, under the backend that
computes it, with the name of the backend that delegated it.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from assay.harness.conditions import has_cached_prefix
from assay.harness.evidence.counters import ADMISSIONS, FOLDER, Admission, CounterFile, CounterRow
from assay.harness.evidence.nonce import nonce_of_process
from assay.harness.server.graph_counts import GraphCounts, capturing, compilable, count_call
from assay.harness.server.kernel_tracer import kernel_tracer


@cache
def _counters(folder: Path) -> CounterFile:
    return CounterFile(folder / FOLDER, str(os.getpid()), nonce_of_process())


@cache
def _graph_counts(folder: Path) -> GraphCounts:
    return GraphCounts(_counters(folder))


class Admissions:
    """Notes every prefill batch once, at its lowest layer: request ids, and new tokens and cached prefix of each request."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ADMISSIONS).open("ab", buffering=0)  # processes share it: a line must be one write
        self._layer: int | None = None
        self._run = nonce_of_process()

    def note(self, layer: int, batch: Any) -> None:
        """Note the batch if this is its first layer."""
        if self._layer is None or layer < self._layer:
            self._layer = layer
        if layer != self._layer:
            return
        lengths = {"new": batch.extend_seq_lens_cpu, "prefix": batch.extend_prefix_lens_cpu}
        admission = Admission(
            run=self._run,
            process=os.getpid(),
            rids=tuple(batch.rids or ()),
            **{name: tuple(int(n) for n in values) for name, values in lengths.items()},
        )
        self._file.write(admission.model_dump_json().encode() + b"\n")


@cache
def _admissions(folder: Path) -> Admissions:
    return Admissions(folder)


def meter(backend: Any, name: str, folder: Path, device: str) -> Any:
    """Count every attention call of an SGLang backend object from now on, and return the object.

    ``serve_kernel`` sets `backend.assay_titles`, `backend.assay_delegates` and `backend.assay_interpreted`: the kernel's title, the
    delegated phases, and whether Triton's interpreter runs it. For SGLang's own backends the kernel's title is the backend's name.

    Args:
        backend: the backend object.
        name: the engine's name for it.
        folder: the server's folder (``ASSAY_EVIDENCE``).
        device: torch device on which it computes.
    """
    counters, graphs, admissions = _counters(folder), _graph_counts(folder), _admissions(folder)
    tracer = kernel_tracer(folder)
    titles: dict[str, str] = getattr(backend, "assay_titles", {"extend": name, "decode": name})
    delegates: dict[str, str] = getattr(backend, "assay_delegates", {})
    interpreted: bool = getattr(backend, "assay_interpreted", False)

    tally = torch.zeros(1, dtype=torch.int64, device=device)
    if tally.is_cuda:
        graphs.prepare(tally.device)

    def counted(phase: str, forward: Any) -> Any:
        rows: dict[tuple[bool, bool, bool], int] = {}

        def row(cached: bool, captured: bool, compiled: bool) -> int:
            key = cached, captured, compiled
            if key not in rows:
                to = delegates.get(phase, "")
                kind = CounterRow(
                    backend=to or name,
                    kernel=titles[phase],
                    phase=phase,
                    cached_prefix=cached,
                    delegated_by=name if to else "",
                    captured=captured,
                    compiled=compiled,
                    interpreted=interpreted and not to,
                )
                rows[key] = counters.row(kind)
            return rows[key]

        def count(layer: int, cached: bool, compiled: bool) -> None:
            if capturing():
                graphs.capture(row(phase == "decode", True, compiled), layer)
            else:
                counters.add(row(cached, False, compiled), layer)

        index = compilable(lambda layer: count(layer, phase == "decode", True))

        def call(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
                count_call(tally, index, layer.layer_id)
                return out
            with tracer.attention() if tracer.on else nullcontext():
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
            cached = phase == "decode" or has_cached_prefix(forward_batch.extend_prefix_lens_cpu or ())
            count(layer.layer_id, cached, False)
            if phase == "extend" and not capturing():
                admissions.note(layer.layer_id, forward_batch)
            return out

        return call

    backend.forward_extend = counted("extend", backend.forward_extend)
    backend.forward_decode = counted("decode", backend.forward_decode)
    return backend
