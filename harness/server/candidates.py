"""Candidates that run inside a server: a kernel of the contract, or another attention backend of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.backend import Backend
from assay.harness.conditions import PHASES
from assay.harness.server.forward_pass import EngineCall
from assay.harness.server.kv_pool import Pages, refuse_unsupported
from assay.harness.server.sglang_backend import unmetered


class Candidate(Protocol):
    """Computes calls of the phases that it names."""

    name: str

    @property
    def noise(self) -> str:
        """Its noise family, as `assay.harness.attention.noise.family` knows it. May raise anything."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that it computes. May raise anything."""

    def run(self, call: EngineCall) -> Tensor:
        """Compute the output, [tokens, num_q_heads * head_dim_v]. May raise anything."""


class KernelCandidate:
    """A kernel of the contract. It runs on packed calls, gathered from the pool after the reference has written K and V to it."""

    def __init__(self, name: str, kernel: Kernel, pages: Pages) -> None:
        self.name, self._kernel, self._pages = name, kernel, pages
        declared = kernels.declaration(kernel)
        self.phases, self.noise = declared.phases, declared.noise

    def run(self, call: EngineCall) -> Tensor:
        refuse_unsupported(call.layer, call.kwargs, self.name)
        packed = packed_call(self._pages, call)
        # K and V are gathered copies; q is the model's own tensor.
        packed = replace(packed, q=packed.q.clone())
        return kernels.run_kernel(self.name, self._kernel, packed).reshape(call.q.shape[0], -1)


class BackendCandidate:
    """An attention backend of SGLang. It reads the same pool and does not write to it."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self._backend = name, backend
        self.phases: tuple[str, ...] = PHASES
        self.noise = Backend.parse(name).noise
        self._prepared: Any = None

    def run(self, call: EngineCall) -> Tensor:
        if self._prepared is not call.batch:
            self._backend.init_forward_metadata(call.batch)
            self._prepared = call.batch
        forward = getattr(self._backend, f"forward_{call.phase}")
        out: Tensor = forward(
            call.q.clone(), call.k, call.v, call.layer, call.batch, save_kv_cache=False, **call.kwargs
        )
        return out


class LazyCandidate:
    """A candidate that is built at its first use. Until then it costs the server nothing."""

    def __init__(self, name: str, build: Callable[[], Candidate]) -> None:
        self.name, self._build = name, build
        self._built: Candidate | None = None
        self._failed = ""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of the candidate. Raises KernelRefused if it cannot be built."""
        return self._candidate().phases

    @property
    def noise(self) -> str:
        """Noise family of the candidate. Raises KernelRefused if it cannot be built."""
        return self._candidate().noise

    def run(self, call: EngineCall) -> Tensor:
        """Compute the candidate's output. Raises KernelRefused if it cannot be built, and whatever the candidate raises."""
        return self._candidate().run(call)

    def _candidate(self) -> Candidate:
        if self._built is None and not self._failed:
            try:
                self._built = self._build()
            except Exception as error:  # its modules may raise anything; building is tried once, not at every call
                self._failed = f"{self.name} cannot be built: {type(error).__name__}: {error}"
                raise KernelRefused(self._failed) from error
        if self._built is None:
            raise KernelRefused(self._failed)
        return self._built


def output_of(candidate: Candidate, call: EngineCall, out: Tensor) -> Tensor:
    """Reshape a candidate's output to that of the reference, `out`.

    Raises:
        KernelRefused: it has another size, dtype or device. Also whatever the candidate raises.
    """
    got = candidate.run(call)
    if isinstance(got, Tensor) and got.shape[:1] == out.shape[:1] and got.numel() == out.numel():
        got = got.reshape(out.shape)
    if fault := kernels.tensor_fault(got, out, tuple(out.shape)):
        raise KernelRefused(f"{candidate.name} returned {fault}, in layer {call.layer.layer_id}")
    return got


def packed_call(pages: Pages, call: EngineCall) -> AttentionCall:
    """Pack an engine call as a call of the kernel contract.

    Raises:
        KernelRefused: the pool's dtype is not that of q.
    """
    lens = call.forward_pass
    return pages.packed_call(call.phase, call.q, call.layer, call.batch, list(lens.new), list(lens.prefix))


def make_candidate(name: str, runner: Any, pages: Pages) -> Candidate:
    """Make the candidate of this name, built at its first use: a published kernel, a ``module:function``, or a backend of SGLang.

    Raises:
        KernelRefused: nothing has this name. Any other failure is raised at the first use.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    backend = Backend.parse(name)
    if backend.is_kernel:
        return LazyCandidate(name, lambda: KernelCandidate(name, backend.kernel(), pages))
    if name not in ATTENTION_BACKENDS:
        known = sorted({*ATTENTION_BACKENDS, *kernels.published()})
        raise KernelRefused(f"unknown candidate {name!r}; expected a module:function or one of {', '.join(known)}")
    # Below the meter: calls of the shadow are not calls that the model used.
    create = unmetered(ATTENTION_BACKENDS[name])
    return LazyCandidate(name, lambda: BackendCandidate(name, create(runner)))
