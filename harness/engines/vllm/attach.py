"""Observes the attention layers of a vLLM model: counts, and attaches shadow, substitution, faults and trace.

Each layer's implementation gets another ``forward``. vLLM calls it from an opaque operator, so it runs in compiled models too, and
in every mode of CUDA graphs but FULL. It writes to a tensor that vLLM gives; what replaces an output is written there as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.harness.attention.declaration import Declaration
from assay.harness.attention.noise import BESIDE_FP8
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.attachment import Attachment
from assay.harness.engines.inside.control import FAULTS, KERNEL, MODEL_HASH, RECORD, SHADOW, TRACE
from assay.harness.engines.inside.faults import Faults, FaultyCandidate
from assay.harness.engines.inside.kernel_tracer import KernelTracer, kernel_tracer
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.tracer import Tracer
from assay.harness.engines.vllm.engine_call import Part, ServedPass, VLLMCall, kind_of, layer_number
from assay.harness.engines.vllm.meter import Served, counter
from assay.harness.engines.vllm.served_kernel import ServedKernel, make_candidate, served_kernel
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.faults import SENSITIVITY
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.pack import Source, rank_folder
from assay.harness.evidence.run_file import nonce_of_process


def observe_runner(runner: Any, folder: Path) -> None:
    """Observe the passes and the attention layers of a runner whose model is loaded, from now on.

    A kernel that the environment names (``ASSAY_KERNEL``) computes the outputs from now on.

    Args:
        runner: vLLM's GPUModelRunner (V1), also on a CPU.
        folder: the server's folder (``ASSAY_EVIDENCE``).

    Raises:
        KernelRefused: the kernel, or the candidate that ``ASSAY_SHADOW`` names, does not exist.
        UsageError: the pack's folder holds something else.
    """
    device = str(runner.device)
    kernel = served_kernel(os.environ.get(KERNEL, ""), device.partition(":")[0])
    tracer, execute = kernel_tracer(folder), runner.execute_model
    wanted = any(os.environ.get(name) for name in (SHADOW, RECORD, TRACE, FAULTS))
    layers = [layer for layer in runner.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    names = sorted({layer.attn_backend.get_name() for layer in layers})
    reference = kernel.name if kernel else " + ".join(names)
    attachment = _attachment(runner, folder, reference) if wanted else None
    tracer.served_by(reference, kernel.declared if kernel else Declaration())
    observed = _Observed(tracer, attachment, kernel)

    def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        observed.current = ServedPass(runner, scheduled)
        try:
            return tracer.run(lambda: execute(scheduled, *args, **kwargs), lambda: kind_of(runner, scheduled))
        finally:
            observed.current = None

    runner.execute_model = watched
    for layer in layers:
        name = layer.attn_backend.get_name()
        by_phase = kernel.by_phase(name) if kernel else dict.fromkeys(PHASES, Served(name, name))
        layer.impl.forward = observed.forward(layer, name, counter(folder, by_phase, device))


class _Observed:
    """The observation of one process's model.

    Attributes:
        current: the pass that runs, or None between passes of requests: vLLM's own warm-up is not observed.
    """

    def __init__(self, tracer: KernelTracer, attachment: Attachment | None, kernel: ServedKernel | None) -> None:
        self._tracer, self._attachment, self._kernel = tracer, attachment, kernel
        self.current: ServedPass | None = None

    def forward(self, layer: Any, backend: str, count: Callable[[int, tuple[Part, ...]], None]) -> Callable[..., Any]:
        """Return the ``forward`` of a layer's implementation, with observations and the kernel around the original one."""
        plain, number = layer.impl.forward, layer_number(layer)
        declared = self._kernel.declared.phases if self._kernel else ()
        name = self._kernel.name if self._kernel else backend

        def forward(
            attention: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: Any, output: Tensor, **scales: Any
        ) -> Any:
            current = self.current
            if metadata is None or current is None:
                return plain(attention, q, k, v, cache, metadata, output=output, **scales)
            parts = current.parts
            calls = [
                VLLMCall(part.phase, current, part, layer, q, k, v, metadata, cache, is_last_part=part is parts[-1])
                for part in parts
            ]
            with self._tracer.attention() if self._tracer.on else nullcontext():
                if any(part.phase not in declared for part in parts):
                    plain(attention, q, k, v, cache, metadata, output=output, **scales)
                for call in calls:
                    if self._kernel is not None and call.phase in declared:
                        _write(output, call.part, self._kernel.run(call))
            count(number, parts)
            for call in calls if self._attachment is not None else ():
                reference = output[call.part.rows].flatten(1)
                used = self._attachment.output(call, reference, name)  # type: ignore[union-attr]
                if used is not reference:
                    _write(output, call.part, used)
            return output

        return forward


def _write(output: Tensor, part: Part, computed: Tensor) -> None:
    """Write the rows of a part into vLLM's output, [tokens, q heads, head_dim]."""
    output[part.rows] = computed.view(-1, *output.shape[1:])


def _limits(runner: Any) -> EngineLimits:
    """Return the engine's limits, as vLLM resolved its arguments."""
    config = runner.vllm_config
    scheduler = config.scheduler_config
    return EngineLimits(
        chunk_tokens=int(scheduler.max_num_batched_tokens) if scheduler.enable_chunked_prefill else None,
        context_tokens=int(config.model_config.max_model_len),
        page_tokens=int(config.cache_config.block_size),
        batch=int(scheduler.max_num_seqs),
        prefix_cache=bool(config.cache_config.enable_prefix_caching),
    )


def _attachment(runner: Any, folder: Path, reference: str) -> Attachment:
    """Make the attachment of a worker process, as the environment requests (`assay.harness.engines.inside.control`)."""
    import vllm
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks, new_writer = int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size()), None
    candidate = os.environ.get(SHADOW, "")
    if record_bytes := int(os.environ.get(RECORD) or 0):
        source = Source(
            engine=f"vLLM {vllm.__version__} on {runner.device}",
            model=str(runner.model_config.model),
            model_hash=os.environ.get(MODEL_HASH, ""),
            reference=reference,
            candidate=candidate,
            run=nonce_of_process(),
        )
        new_writer = partial(PackWriter, rank_folder(folder / PACK_FOLDER, rank), source, record_bytes // ranks)
    built = make_candidate(candidate) if candidate else None
    faults = Faults(folder)
    shadow = Shadow(folder, built, new_writer, rank, ranks, native_noise=_native_noise(runner), limits=_limits(runner))
    faulty = FaultyCandidate(built, faults) if built else None
    attachment = Attachment(
        folder,
        shadow,
        built,
        Tracer(folder, int(os.environ.get(TRACE) or 0), rank, ranks),
        faults,
        Shadow(folder / SENSITIVITY, faulty, None, rank, ranks, native_noise=_native_noise(runner)),
    )  # fmt: skip
    attachment.attached_to(reference)
    return attachment


def _native_noise(runner: Any) -> Callable[[Any, str, bool], str]:
    """Return a function that names the noise family of vLLM's own backends, given names, phase and whether pages have 8 bits.

    On a CPU they compute with q and weights as given: with FP8 pages their outputs were within 6e-6 of those of float64 on the
    dequantised K and V (vLLM 0.32.0, float32). On a GPU q and weights are stored in 8 bits too.
    """
    on_cpu = str(runner.device) == "cpu"
    return lambda names, phase, stored: BESIDE_FP8 if stored and not on_cpu else ""
