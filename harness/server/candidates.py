"""What can run beside a server's own backend: a kernel of the contract, or an attention backend of SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.conditions import PHASES
from assay.harness.server.paging import Pages, compute, refuse
from assay.harness.server.passes import EngineCall


class Candidate(Protocol):
    """It computes the phases that it names, and is not asked for others."""

    name: str

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that it computes. May raise anything."""

    def run(self, call: EngineCall) -> Tensor:
        """The output, [tokens, num_q_heads * head_dim_v]. May raise anything."""


class KernelCandidate:
    """A kernel of the contract, on packed calls resolved from the pool after the reference wrote K and V to it."""

    def __init__(self, name: str, kernel: Kernel, pages: Pages) -> None:
        self.name, self._kernel, self._pages = name, kernel, pages
        self.phases = kernels.declaration(kernel).phases

    def run(self, call: EngineCall) -> Tensor:
        refuse(call.layer, self.name)
        packed = resolve(self._pages, call)
        # K and V are gathered copies; q is the model's own.
        packed = replace(packed, q=packed.q.clone())
        return compute(self.name, self._kernel, packed).reshape(call.q.shape[0], -1)


class BackendCandidate:
    """An attention backend of SGLang's, on the same pool, which it does not write to."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name, self._backend = name, backend
        self.phases: tuple[str, ...] = PHASES
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


def resolve(pages: Pages, call: EngineCall) -> AttentionCall:
    """The packed call of a situation."""
    return pages.resolve(call.phase, call.q, call.layer, call.batch, list(call.now.new), list(call.now.prefix))


class LazyCandidate:
    """A candidate that is built when it is first needed: until then it costs the server nothing."""

    def __init__(self, name: str, build: Callable[[], Candidate]) -> None:
        self.name, self._build = name, build
        self._built: Candidate | None = None
        self._failed = ""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of the candidate. Raises KernelRefused if it cannot be built."""
        return self._candidate().phases

    def run(self, call: EngineCall) -> Tensor:
        """The candidate's output. Raises KernelRefused if it cannot be built, and what the candidate raises."""
        return self._candidate().run(call)

    def _candidate(self) -> Candidate:
        if self._built is None and not self._failed:
            try:
                self._built = self._build()
            except Exception as error:  # whatever its modules raise; it is tried once, not at every call
                self._failed = f"{self.name} cannot be built: {type(error).__name__}: {error}"
                raise KernelRefused(self._failed) from error
        if self._built is None:
            raise KernelRefused(self._failed)
        return self._built


def make_candidate(name: str, runner: Any, pages: Pages) -> Candidate:
    """The candidate with this name, built at its first use: a published kernel, a ``module:function``, or a backend of SGLang's.

    Raises:
        KernelRefused: nothing has this name. What else may go wrong is raised at the first use.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if kernels.is_path(name) or name in kernels.published():
        return LazyCandidate(name, lambda: KernelCandidate(name, kernels.load(name), pages))
    if name not in ATTENTION_BACKENDS:
        known = sorted({*ATTENTION_BACKENDS, *kernels.published()})
        raise KernelRefused(f"{name!r} is no candidate; expected a module:function or one of {', '.join(known)}")
    # Below the meter: what runs beside the server's own backend does not serve by itself.
    create = getattr(ATTENTION_BACKENDS[name], "assay_unmetered", ATTENTION_BACKENDS[name])
    return LazyCandidate(name, lambda: BackendCandidate(name, create(runner)))
