"""A candidate of a server by its name: a kernel of the contract, or another attention backend of SGLang."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import KernelRefused
from assay.harness.backend import Backend
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.candidates import Candidate, Computes, KernelCandidate, LazyCandidate
from assay.harness.engines.inside.observed_call import ObservedCall
from assay.harness.engines.sglang.engine_call import SGLangCall
from assay.harness.engines.sglang.served_kernel import unmetered


class _BackendCandidate:
    """An attention backend of SGLang. It reads the same pool and does not write to it."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self._backend = name, backend
        self.computes = Computes(PHASES, Backend.parse(name).noise, reads_given=True)
        self._prepared: Any = None

    def run(self, call: ObservedCall) -> Tensor:
        made: SGLangCall = call.native
        if self._prepared is not made.batch:
            self._backend.init_forward_metadata(made.batch)
            self._prepared = made.batch
        forward = getattr(self._backend, f"forward_{call.phase}")
        out: Tensor = forward(
            made.q.clone(), made.k, made.v, made.radix_attention, made.batch, save_kv_cache=False, **made.arguments
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
    create = unmetered(ATTENTION_BACKENDS[name])
    return LazyCandidate(name, lambda: _BackendCandidate(name, create(runner)))
