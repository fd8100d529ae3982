"""Serves a kernel of the contract as an SGLang attention backend.

An SGLang backend, the delegate, is built unchanged. For the phases that the kernel declares, its forward methods are replaced: they
write K and V to the pool, resolve the paging into one packed `AttentionCall`, and run the kernel. Everything else (metadata, the
other phase) stays with the delegate; reports call that "delegated". What the kernel does not declare of what a layer asks for, and
what the contract cannot express (cross attention, speculative trees), raises: nothing is silently computed by another kernel.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from torch import Tensor

from assay.harness.attention.call import Kernel, KernelRefused
from assay.harness.attention.kernels import declaration, run_kernel, title
from assay.harness.engines.sglang.kv_pool import Pages, joined_rope, lengths, spec_of


def serve_kernel(name: str, kernel: Kernel, runner: Any, delegate: str) -> Any:
    """Make an SGLang attention backend that runs `kernel` in the phases that it declares, and `delegate` in the others.

    Without the name of a delegate, it is the default of the device.

    Raises:
        KernelRefused: the model needs something that the contract cannot express, or the delegate is unknown.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    delegate = delegate or ("torch_native" if str(runner.device) == "cpu" else "triton")
    if delegate not in ATTENTION_BACKENDS or delegate == name:
        raise KernelRefused(
            f"{name} cannot delegate to {delegate!r}; expected one of {', '.join(sorted(ATTENTION_BACKENDS))}"
        )
    backend = unmetered(ATTENTION_BACKENDS[delegate])(runner)
    declared = declaration(kernel)
    served = _ServedKernel(name, kernel, runner)
    for phase in declared.phases:
        setattr(backend, f"forward_{phase}", getattr(served, f"forward_{phase}"))
    # Without a package it is taken for plain PyTorch, which the interpreter does not touch.
    on_cpu = os.environ.get("TRITON_INTERPRET") == "1" and str(runner.device) == "cpu"
    backend.assay_declared = declared
    backend.assay_interpreted = on_cpu and bool(declared.package)
    own = title(name, kernel, backend.assay_interpreted)
    backend.assay_titles = {phase: own if phase in declared.phases else delegate for phase in ("extend", "decode")}
    backend.assay_delegates = {phase: delegate for phase in ("extend", "decode") if phase not in declared.phases}
    return backend


def unmetered(create: Any) -> Any:
    """Return the factory without meter and attachment, so that a delegated call is counted once."""
    return getattr(create, "assay_unmetered", create)


class _ServedKernel:
    """The two forward methods of an SGLang backend, implemented by a kernel."""

    def __init__(self, name: str, kernel: Kernel, runner: Any) -> None:
        self._name = name
        self._kernel = kernel
        self._pages = Pages(runner)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Run with SGLang's signature: q [tokens, heads * head_dim]; k and v [tokens, kv heads, head_dim].

        Returns the shape of q.
        """
        return self._run("extend", q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Run as `forward_extend` does, with one new token per sequence."""
        return self._run("decode", q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _run(
        self, phase: Literal["extend", "decode"], q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool,
        arguments: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        new, prefix = lengths(phase, batch, self._name)
        spec = spec_of(layer, arguments, phase, self._name)
        q, k = joined_rope(q, k, layer, arguments)
        if save and k is not None and v is not None:
            self._pages.write(layer, batch, k, v)
        call = self._pages.packed_call(spec, q, layer, batch, new, prefix, (k, v))
        return run_kernel(self._name, self._kernel, call).reshape(q.shape[0], -1)
