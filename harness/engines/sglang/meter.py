"""Meters SGLang's attention backends: counts their calls, records prefill batches, and traces the kernels of passes.

Metering wraps a backend's ``forward_extend`` and ``forward_decode``, and a ModelRunner's ``forward``.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from assay.harness.attention.declaration import Declaration
from assay.harness.conditions import has_cached_prefix
from assay.harness.engines.inside.graph_counts import capturing
from assay.harness.engines.inside.kernel_tracer import kernel_tracer
from assay.harness.engines.inside.meter import Meter, admissions, replays, rows_of
from assay.harness.engines.sglang.graph_passes import served_batch, watch_graphs
from assay.harness.engines.sglang.kv_pool import layer_number


def meter(backend: Any, name: str, folder: Path, device: str) -> Any:
    """Count every attention call of an SGLang backend object, by its name, from now on, and return the object.

    ``serve_kernel`` sets `backend.assay_rows`: who computes each phase.
    """
    rows = getattr(backend, "assay_rows", None) or rows_of(name)
    tracer, noted = kernel_tracer(folder), admissions(folder)

    def counted(phase: str, forward: Any) -> Any:
        calls = Meter(folder, rows[phase], device)

        def call(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
                calls.count_compiled(layer_number(layer))
                return out
            with tracer.attention() if tracer.on else nullcontext():
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
            batch = served_batch(forward_batch)
            if phase == "decode":
                calls.count(layer_number(layer), True)
            elif batch.rids or capturing():
                calls.count(layer_number(layer), has_cached_prefix(batch.extend_prefix_lens_cpu or ()))
                # A pass that verifies drafts has no lengths: it is not prefill.
                if not capturing() and batch.extend_seq_lens_cpu is not None:
                    noted.note(layer_number(layer), batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu)
            return out  # a prefill without a request is SGLang's own, before it captures graphs

        return call

    backend.forward_extend = counted("extend", backend.forward_extend)
    backend.forward_decode = counted("decode", backend.forward_decode)
    return backend


def watch(runner: Any, name: str, backend: Any, folder: Path) -> None:
    """Trace the passes of an SGLang ModelRunner from now on, while the control names a profile; and write its fingerprint.

    Watching it twice traces nothing twice. ``serve_kernel`` sets `backend.assay_declared`, the kernel's declaration.
    """
    from assay.harness.engines.sglang.fingerprint import FingerprintWriter

    watch_graphs(count=replays(folder))
    tracer, writer = kernel_tracer(folder), FingerprintWriter(runner, folder)
    tracer.served_by(name, getattr(backend, "assay_declared", Declaration()))
    forward = runner.forward
    if getattr(forward, "assay_watched", False):
        return

    def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = tracer.run(lambda: forward(forward_batch, *args, **kwargs), lambda: _kind_of(forward_batch))
        writer.after(forward_batch)
        return out

    watched.__dict__["assay_watched"] = True
    runner.forward = watched


def _kind_of(batch: Any) -> tuple[str, bool] | None:
    # Batches without a request are SGLang's own: warm-up and capture of CUDA graphs.
    if not getattr(batch, "rids", None):
        return None
    if batch.forward_mode.is_decode():
        return "decode", True
    return ("extend", has_cached_prefix(batch.extend_prefix_lens_cpu or ())) if batch.forward_mode.is_extend() else None
