"""Attaches shadow, layer substitution, faults and trace to SGLang's attention backends.

Attaching wraps a backend's ``forward_extend`` and ``forward_decode``.
"""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.engines.inside.attachment import Attachment, ControlReader
from assay.harness.engines.inside.control import MODEL_HASH, RECORD, SHADOW, TRACE
from assay.harness.engines.inside.faults import Faults, FaultyCandidate
from assay.harness.engines.inside.graph_counts import capturing
from assay.harness.engines.inside.observed_call import Phase
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.tracer import Tracer
from assay.harness.engines.sglang.catalog import native_noise
from assay.harness.engines.sglang.engine_call import SGLangCall
from assay.harness.engines.sglang.graph_passes import graphs_of, served_batch, watch_graphs
from assay.harness.engines.sglang.kv_pool import Pages
from assay.harness.engines.sglang.served_kernel import make_candidate
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.faults import SENSITIVITY
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.manifest import engine_label
from assay.harness.evidence.pack import Source, rank_folder
from assay.harness.evidence.run_file import nonce_of_process


def _limits(runner: Any) -> EngineLimits:
    """Return the engine's limits, as SGLang resolved its arguments."""
    arguments = runner.server_args
    chunk = getattr(arguments, "chunked_prefill_size", None) or -1
    return EngineLimits(
        chunk_tokens=chunk if chunk > 0 else None,
        context_tokens=int(runner.model_config.context_len),
        page_tokens=int(getattr(arguments, "page_size", None) or 1),
        batch=getattr(runner, "max_running_requests", None),
        prefix_cache=not getattr(arguments, "disable_radix_cache", False),
        mixed=bool(getattr(arguments, "enable_mixed_chunk", False)),
        graphs=graphs_of(arguments) if str(runner.device).startswith("cuda") else {},
    )


@cache
def _attachment(runner: Any, folder: Path) -> Attachment:
    """Return the one attachment of a server process."""
    import sglang
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    rank, ranks, new_writer = int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size()), None
    candidate = os.environ.get(SHADOW, "")
    if record_bytes := int(os.environ.get(RECORD) or 0):
        source = Source(
            engine=engine_label("sglang", sglang.__version__, runner.device),
            model=str(runner.server_args.model_path),
            model_hash=os.environ.get(MODEL_HASH, ""),
            reference=str(runner.server_args.attention_backend),
            candidate=candidate,
            run=nonce_of_process(),
        )
        new_writer = partial(PackWriter, rank_folder(folder / PACK_FOLDER, rank), source, record_bytes // ranks)
    built = make_candidate(candidate, runner) if candidate else None
    faults = Faults(folder)
    shadow = Shadow(folder, built, new_writer, rank, ranks, native_noise=native_noise, limits=_limits(runner))
    reader = ControlReader(folder)
    watch_graphs(lambda: reader.latest().control.observes)
    faulty = FaultyCandidate(built, faults) if built else None
    return Attachment(
        folder,
        shadow,
        built,
        Tracer(folder, int(os.environ.get(TRACE) or 0), rank, ranks),
        faults,
        Shadow(folder / SENSITIVITY, faulty, None, rank, ranks, native_noise=native_noise),
    )  # fmt: skip


def attach(backend: Any, name: str, runner: Any, folder: Path) -> Any:
    """Attach to an SGLang backend object as the environment requests (`assay.harness.engines.inside.control`), and return it.

    Args:
        backend: the reference. The model uses its outputs unless the control says otherwise.
        folder: the server's folder (``ASSAY_EVIDENCE``).

    Raises:
        KernelRefused: no candidate has the name that ``ASSAY_SHADOW`` gives.
        UsageError: the pack's folder holds something else.
    """
    if getattr(runner, "is_draft_worker", False):
        return backend  # the kernel contract does not cover the calls of a speculative draft model
    return _observe(backend, name, _attachment(runner, folder), _pages(runner))


def _observe(backend: Any, name: str, attachment: Attachment, pages: Pages) -> Any:
    """Give every call of a backend object to the attachment from now on, and return the object."""
    attachment.attached_to(name)

    def attached(phase: Phase, forward: Any) -> Any:
        def call(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            # Compiled or captured: Python runs now and never again, so nothing is observed.
            if torch.compiler.is_compiling() or capturing():
                return forward(q, k, v, layer, forward_batch, *args, **kwargs)
            if q.dim() == 4:  # Gemma 3 gives [1, tokens, heads, head_dim]
                used = call(q.flatten(0, 1).flatten(1), k, v, layer, forward_batch, *args, **kwargs)
                return used.view(*q.shape[:-1], -1) if isinstance(used, Tensor) else used
            extra = {key: value for key, value in kwargs.items() if key != "save_kv_cache"}
            batch, given = served_batch(forward_batch), (k, v)
            if attachment.observes(batch) and pages.stores_fewer_bits(layer, k):
                given = k.clone(), v.clone()  # a backend may divide them by their scales in place
            out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
            return attachment.output(SGLangCall(phase, q, *given, layer, batch, extra, pages), out, name)

        return call

    backend.forward_extend = attached("extend", backend.forward_extend)
    backend.forward_decode = attached("decode", backend.forward_decode)
    return backend


@cache
def _pages(runner: Any) -> Pages:
    """The one view of a runner's KV pool: prefill and decode share its paging."""
    return Pages(runner)
