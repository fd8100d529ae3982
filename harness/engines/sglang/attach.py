"""Attaches shadow, layer substitution, faults and trace to SGLang's attention backends.

Attaching wraps a backend's ``forward_extend`` and ``forward_decode``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.engines.inside.attachment import Attachment, ControlReader, attachment_of
from assay.harness.engines.inside.graph_counts import capturing
from assay.harness.engines.inside.observed_call import Phase
from assay.harness.engines.inside.tracer import decoder_layers
from assay.harness.engines.sglang.arguments import limits_of
from assay.harness.engines.sglang.engine_call import SGLangCall
from assay.harness.engines.sglang.graph_passes import graphs_of, served_batch, watch_graphs
from assay.harness.engines.sglang.kv_pool import Pages
from assay.harness.engines.sglang.served_kernel import make_candidate


@cache
def _attachment(runner: Any, folder: Path) -> Attachment:
    """Return the one attachment of a server process."""
    import sglang
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    arguments, reader = runner.server_args, ControlReader(folder)
    watch_graphs(lambda: reader.latest().control.observes)
    limits = limits_of(vars(arguments), 0).model_copy(
        update={
            "context_tokens": int(runner.model_config.context_len),
            "batch": getattr(runner, "max_running_requests", None),
            "graphs": graphs_of(arguments) if str(runner.device).startswith("cuda") else {},
        }
    )
    made = attachment_of(
        folder,
        "sglang",
        sglang.__version__,
        runner.device,
        str(arguments.model_path),
        str(arguments.attention_backend),
        (int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())),
        lambda name: make_candidate(name, runner),
        limits,
    )
    made.watch(decoder_layers(runner.model, lambda module: hasattr(module, "tp_q_head_num")))
    return made


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
