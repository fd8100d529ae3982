"""Observes the attention layers of a vLLM model: counts, and attaches shadow, substitution, faults and trace.

Each layer's implementation gets another ``forward``. vLLM calls it from an opaque operator, so it runs in compiled models too, and
in every mode of CUDA graphs but FULL. It writes to a tensor that vLLM gives; what replaces an output is written there as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.declaration import Declaration
from assay.harness.engines.inside.attachment import Attachment, attachment_of
from assay.harness.engines.inside.control import FAULTS, KERNEL, RECORD, SHADOW, TRACE
from assay.harness.engines.inside.kernel_tracer import KernelTracer, kernel_tracer
from assay.harness.engines.inside.meter import rows_of
from assay.harness.engines.inside.tracer import decoder_layers
from assay.harness.engines.vllm.arguments import limits_of
from assay.harness.engines.vllm.engine_call import Part, ServedPass, VLLMCall, kind_of, layer_number
from assay.harness.engines.vllm.latents import LatentCall, keys_and_values, makes_keys
from assay.harness.engines.vllm.meter import counter, note_served
from assay.harness.engines.vllm.served_kernel import ServedKernel, make_candidate, served_kernel


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
    kernel = served_kernel(os.environ.get(KERNEL, ""))
    tracer, execute = kernel_tracer(folder), runner.execute_model
    wanted = any(os.environ.get(name) for name in (SHADOW, RECORD, TRACE, FAULTS))
    layers = [layer for layer in runner.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    names = sorted({layer.attn_backend.get_name() for layer in layers})
    reference = kernel.name if kernel else " + ".join(names)
    attachment = _attachment(runner, folder, reference, names) if wanted else None
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
        by_phase = rows_of(name, kernel.name, kernel.kernel, device) if kernel else rows_of(name)
        note_served(layer, by_phase)
        observed.observe(layer, name, counter(folder, by_phase, device))


@dataclass
class _Observed:
    """The observation of one process's model.

    Attributes:
        tracer: traces the kernels of passes.
        attachment: shadow, substitution, faults and trace, or None for a server that only counts.
        kernel: the kernel in the place of vLLM's backends, or None.
        current: the pass that runs, or None between passes of requests: vLLM's own warm-up is not observed.
    """

    tracer: KernelTracer
    attachment: Attachment | None
    kernel: ServedKernel | None
    current: ServedPass | None = None

    @property
    def reads_keys(self) -> bool:
        """True if anything may read K and V."""
        return self.attachment is not None or self.kernel is not None

    def observe(self, layer: Any, backend: str, count: Callable[[int, Sequence[Part]], None]) -> None:
        """Put observations and the kernel around the functions by which a layer's implementation computes attention."""
        made = _Layer(self, layer, layer_number(layer), self.kernel.name if self.kernel else backend, count)
        if hasattr(layer.impl, "forward_mqa"):
            layer.impl.forward_mha = made.latents_extend(layer.impl.forward_mha)
            layer.impl.forward_mqa = made.latents_decode(layer.impl.forward_mqa)
        else:
            layer.impl.forward = made.forward(layer.impl.forward)


@dataclass(frozen=True)
class _Layer:
    """A layer that is observed.

    Attributes:
        observed: the observation of the model.
        layer: vLLM's layer.
        number: its number.
        name: name of the backend or of the kernel that computes it.
        count: counts a call of its parts.
    """

    observed: _Observed
    layer: Any
    number: int
    name: str
    count: Callable[[int, Sequence[Part]], None]

    def forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` of an implementation that reads K and V from pages; `plain` is the original."""

        def forward(
            attention: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: Any, output: Tensor, **scales: Any
        ) -> Any:
            current = self.observed.current
            if metadata is None or current is None:
                return plain(attention, q, k, v, cache, metadata, output=output, **scales)

            def again() -> Tensor:
                out = torch.empty_like(output)
                plain(attention, q, k, v, cache, metadata, output=out, **scales)
                return out

            parts = current.parts
            calls = [
                VLLMCall(part.phase, current, part, self.layer, q, k, v, metadata, cache, again, part is parts[-1])
                for part in parts
            ]
            self._compute(calls, output, lambda: plain(attention, q, k, v, cache, metadata, output=output, **scales))
            return output

        return forward

    def latents_extend(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Return ``forward_mha`` of an implementation of latent attention; `plain` is the original."""

        def forward_mha(
            q: Tensor,
            latents: Tensor,
            k_pe: Tensor,
            cache: Tensor,
            metadata: Any,
            scale: Any,
            output: Tensor,
            **more: Any,
        ) -> None:
            current, decodes = self.observed.current, metadata.num_decodes
            if current is None:
                return plain(q, latents, k_pe, cache, metadata, scale, output=output, **more)
            part = current.between(decodes, current.sequences, "extend")
            read = self.observed.reads_keys and makes_keys(self.layer.impl)
            k, v = keys_and_values(self.layer.impl, latents, k_pe) if read else (None, None)

            def again() -> Tensor:
                out = torch.empty_like(output)
                plain(q, latents, k_pe, cache, metadata, scale, output=out, **more)
                return out.view(len(q), q.shape[1], -1)

            call = LatentCall("extend", current, part, self.layer, q, k, v, metadata, cache, again, decodes == 0)
            view = output.view(len(q), q.shape[1], -1)
            return self._compute(
                [call], view, lambda: plain(q, latents, k_pe, cache, metadata, scale, output=output, **more)
            )

        return forward_mha

    def latents_decode(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_mqa`` of an implementation of latent attention; `plain` is the original."""

        def forward_mqa(q: Any, cache: Tensor, metadata: Any, attention: Any) -> tuple[Tensor, Tensor | None]:
            current = self.observed.current
            if current is None:
                return plain(q, cache, metadata, attention)  # type: ignore[no-any-return]
            joined = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
            part = current.between(0, metadata.num_decodes, "decode")

            def again() -> Tensor:
                computed: Tensor = plain(q, cache, metadata, attention)[0]
                return computed

            call = LatentCall("decode", current, part, self.layer, joined, None, None, metadata, cache, again)
            out = joined.new_empty(*joined.shape[:2], self.layer.impl.kv_lora_rank)
            lse: list[Tensor | None] = []

            def compute() -> None:
                computed, log_sums = plain(q, cache, metadata, attention)
                out.copy_(computed)
                lse.append(log_sums)

            self._compute([call], out, compute)
            return out, next(iter(lse), None)

        return forward_mqa

    def _compute(self, calls: Sequence[VLLMCall], output: Tensor, plain: Callable[[], Any]) -> None:
        """Compute the parts of a call, count them, and pass them to what is attached.

        Args:
            calls: the parts.
            output: [tokens, q heads, head_dim], to which vLLM's own function, `plain`, writes all of them.
        """
        tracer, kernel, attachment = self.observed.tracer, self.observed.kernel, self.observed.attachment
        declared = kernel.declared.phases if kernel else ()
        with tracer.attention() if tracer.on else nullcontext():
            if any(call.phase not in declared for call in calls):
                plain()
            for call in calls:
                if kernel is not None and call.phase in declared:
                    _write(output, call, kernel.run(call))
        self.count(self.number, [call.part for call in calls])
        if attachment is None:
            return
        for call in calls:
            reference = output[call.rows].flatten(1)
            used = attachment.output(call, reference, self.name)
            if used is not reference:
                _write(output, call, used)


def _write(output: Tensor, call: VLLMCall, computed: Tensor) -> None:
    """Write the rows of a part into vLLM's output, [tokens, q heads, head_dim]."""
    output[call.rows] = computed.view(-1, *output.shape[1:])


def _attachment(runner: Any, folder: Path, reference: str, backends: Sequence[str]) -> Attachment:
    """Make the attachment of a worker process.

    Args:
        reference: name of the backend or of the kernel that serves.
        backends: names of vLLM's own backends in the model.
    """
    import vllm
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    config = runner.vllm_config
    sections = ("cache_config", "model_config", "scheduler_config")
    limits = limits_of({name: vars(getattr(config, name)) for name in sections}, 0)
    made = attachment_of(
        folder,
        "vllm",
        vllm.__version__,
        str(runner.device),
        str(runner.model_config.model),
        reference,
        (int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())),
        lambda name: make_candidate(name, backends),
        limits.model_copy(update={"batch": int(config.scheduler_config.max_num_seqs)}),
    )
    made.attached_to(reference)
    made.watch(decoder_layers(runner.model, lambda module: hasattr(module, "impl")))
    return made
