"""Candidates that run inside a server: a kernel of the contract here, or another backend of the engine in its adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import Kernel, KernelRefused
from assay.harness.attention.declaration import declaration
from assay.harness.engines.inside.observed_call import ObservedCall


@dataclass(frozen=True)
class Computes:
    """The phases and the noise of a candidate.

    Attributes:
        phases: the phases.
        noise: its noise family, as `assay.harness.attention.noise.family` knows it.
        reads_given: whether it has K and V of new tokens as the layer gave them, if a cache stores fewer bits.
    """

    phases: tuple[str, ...]
    noise: str
    reads_given: bool = False


class Candidate(Protocol):
    """Computes calls of the phases that it names."""

    name: str

    @property
    def computes(self) -> Computes:
        """Its phases and its noise. May raise anything."""

    def run(self, call: ObservedCall) -> Tensor:
        """Return the output, [tokens, num_q_heads * head_dim_v]. May raise anything."""


class KernelCandidate:
    """A kernel of the contract. It runs on packed calls, gathered from the pool after the reference has written K and V to it."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        self.name, self._kernel = name, kernel
        declared = declaration(kernel)
        self.computes = Computes(declared.phases, declared.noise)

    def run(self, call: ObservedCall) -> Tensor:
        """Run it. May raise anything."""
        packed = call.pack(self.name)
        # K and V are gathered copies; q is the model's own tensor.
        packed = replace(packed, q=packed.q.clone())
        return kernels.run_kernel(self.name, self._kernel, packed).reshape(packed.q.shape[0], -1)


class LazyCandidate:
    """A candidate that is built at its first use. Until then it costs the server nothing."""

    def __init__(self, name: str, build: Callable[[], Candidate]) -> None:
        self.name, self._build = name, build
        self._built: Candidate | None = None
        self._failed = ""

    @property
    def computes(self) -> Computes:
        """Its phases and its noise. Raises KernelRefused if it cannot be built."""
        return self._candidate().computes

    def run(self, call: ObservedCall) -> Tensor:
        """Return the candidate's output. Raises KernelRefused if it cannot be built, and whatever the candidate raises."""
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


def output_of(candidate: Candidate, call: ObservedCall, out: Tensor) -> Tensor:
    """Return a candidate's output in the shape of the reference's, `out`.

    Raises:
        KernelRefused: it has another size, dtype or device. Also whatever the candidate raises.
    """
    got = candidate.run(call)
    if isinstance(got, Tensor) and got.shape[:1] == out.shape[:1] and got.numel() == out.numel():
        got = got.reshape(out.shape)
    if fault := kernels.tensor_fault(got, out, tuple(out.shape)):
        raise KernelRefused(f"{candidate.name} returned {fault}, in layer {call.layer}")
    return got
