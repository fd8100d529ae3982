"""Serves a kernel of the contract as an SGLang attention backend.

An SGLang backend, the delegate, is built unchanged. For the phases that the kernel declares, its forward methods are replaced: they
write K and V to the pool, resolve the paging into one packed `AttentionCall`, and run the kernel. Everything else (metadata, the
other phase) stays with the delegate; reports call that "delegated". If a layer asks for something that the kernel does not declare,
or that the contract cannot express (cross attention, speculative trees), it raises: no other kernel computes it silently.

`make_candidate` makes a candidate of the shadow, by name: a kernel of the contract, or another attention backend of SGLang.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import Kernel, KernelRefused
from assay.harness.attention.declaration import declaration
from assay.harness.attention.kernels import run_kernel
from assay.harness.backend import Backend
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.candidates import Candidate, Computes, KernelCandidate, LazyCandidate
from assay.harness.engines.inside.meter import rows_of
from assay.harness.engines.inside.observed_call import ObservedCall
from assay.harness.engines.sglang.engine_call import SGLangCall
from assay.harness.engines.sglang.kv_pool import Pages, joined_rope, lengths, spec_of


def serve_kernel(name: str, kernel: Kernel, runner: Any, delegate: str) -> Any:
    """Make an SGLang attention backend that runs `kernel` in the phases that it declares, and `delegate` in the others.

    The default delegate is the device's default backend.

    Raises:
        KernelRefused: the model needs something that the contract cannot express, or the delegate is unknown.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    delegate = delegate or ("torch_native" if str(runner.device) == "cpu" else "triton")
    if delegate not in ATTENTION_BACKENDS or delegate == name:
        raise KernelRefused(
            f"{name} cannot delegate to {delegate!r}; expected one of {', '.join(sorted(ATTENTION_BACKENDS))}"
        )
    backend = _unmetered(ATTENTION_BACKENDS[delegate])(runner)
    declared = declaration(kernel)
    pages = Pages(runner)
    for phase in declared.phases:
        setattr(backend, f"forward_{phase}", _forward(phase, name, kernel, pages))
    backend.assay_declared, backend.assay_rows = declared, rows_of(delegate, name, kernel, str(runner.device))
    return backend


def _unmetered(create: Any) -> Any:
    """Return the factory without meter and attachment, so that a delegated call is counted once."""
    return getattr(create, "assay_unmetered", create)


def _forward(phase: Any, name: str, kernel: Kernel, pages: Pages) -> Any:
    """Make the method of an SGLang backend that computes a phase with a kernel."""

    def forward(
        q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Tensor:  # fmt: skip
        """Run with SGLang's signature: q [tokens, heads * head_dim]; k and v [tokens, kv heads, head_dim].

        Returns the shape of q.
        """
        new, prefix = lengths(phase, forward_batch, name)
        spec = spec_of(layer, arguments, phase, name)
        q, k = joined_rope(q, k, layer, arguments)
        if save_kv_cache and k is not None and v is not None:
            pages.write(layer, forward_batch, k, v)
        call = pages.packed_call(spec, q, layer, forward_batch, new, prefix, (k, v))
        return run_kernel(name, kernel, call).reshape(q.shape[0], -1)

    return forward


class _BackendCandidate:
    """An attention backend of SGLang. It reads the same pool and does not write to it."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self._backend = name, backend
        self.computes = Computes(PHASES, Backend.parse(name).noise, reads_given=True)
        self._prepared: Any = None

    def run(self, call: ObservedCall) -> Tensor:
        assert isinstance(call, SGLangCall)
        if self._prepared is not call.batch:
            self._backend.init_forward_metadata(call.batch)
            self._prepared = call.batch
        forward = getattr(self._backend, f"forward_{call.phase}")
        out: Tensor = forward(
            call.q.clone(), call.k, call.v, call.radix_attention, call.batch, save_kv_cache=False, **call.arguments
        )
        return out


def make_candidate(name: str, runner: Any) -> Candidate:
    """Return the candidate of this name, built at its first use: a published kernel, a ``module:function``, or a backend of SGLang.

    Raises:
        KernelRefused: nothing has this name. Any other failure is raised at the first use.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    backend = Backend.parse(name)
    if backend.is_kernel:
        return LazyCandidate(name, lambda: KernelCandidate(name, backend.kernel()))
    if name not in ATTENTION_BACKENDS:
        known = sorted({*ATTENTION_BACKENDS, *kernels.published()})
        raise KernelRefused(f"unknown candidate {name!r}; expected a module:function or one of {', '.join(known)}")
    # Below the meter: calls of the shadow are not calls that the model used.
    create = _unmetered(ATTENTION_BACKENDS[name])
    return LazyCandidate(name, lambda: _BackendCandidate(name, create(runner)))
