"""Serves a kernel of the contract in the place of vLLM's own attention backend.

vLLM's layers write K and V to the pages before attention runs; the kernel computes the outputs of the phases that it declares, from
one packed `AttentionCall`. vLLM's backend computes the others, which reports call "delegated". If a layer asks for something that
the kernel does not declare, or that the contract cannot express, it raises: no other kernel computes it silently.

`make_candidate` makes a candidate of the shadow, by name: a kernel of the contract, or vLLM's own backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import Kernel, KernelRefused
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.kernels import run_kernel
from assay.harness.backend import Backend
from assay.harness.conditions import PHASES
from assay.harness.engines.inside.candidates import Candidate, Computes, KernelCandidate, LazyCandidate
from assay.harness.engines.inside.observed_call import ObservedCall
from assay.harness.engines.vllm.engine_call import VLLMCall


@dataclass(frozen=True)
class ServedKernel:
    """A kernel in the place of a backend of vLLM.

    Attributes:
        name: its name.
        kernel: the function.
    """

    name: str
    kernel: Kernel

    @cached_property
    def declared(self) -> Declaration:
        """Its declaration."""
        return declaration(self.kernel)

    def run(self, call: VLLMCall) -> Tensor:
        """Compute the output of a part, [rows, q heads, head_dim].

        Raises:
            KernelRefused: it does not declare what the call asks for, or the contract cannot express it.
        """
        return run_kernel(self.name, self.kernel, call.pack(self.name))


def served_kernel(name: str) -> ServedKernel | None:
    """Return the kernel of this name, or None for an empty name, or for the name of a backend of vLLM.

    Raises:
        KernelRefused: it cannot be imported.
    """
    if not name or not Backend.parse(name).is_kernel:
        return None
    return ServedKernel(name, kernels.load(name))


class _BackendCandidate:
    """The backend that vLLM itself chose for a layer. It reads the same pages and does not write to them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.computes = Computes(PHASES, "")

    def run(self, call: ObservedCall) -> Tensor:
        assert isinstance(call, VLLMCall)
        return call.recompute()[call.rows].flatten(1)


def make_candidate(name: str, backends: Sequence[str]) -> Candidate:
    """Return the candidate of this name, built at its first use: a kernel, or the backend of vLLM that computes the model's layers.

    Args:
        name: a published kernel, a ``module:function``, or a backend's name.
        backends: names of vLLM's own backends in the model.

    Raises:
        KernelRefused: nothing has this name. Any other failure is raised at the first use.
    """
    backend = Backend.parse(name)
    if name in backends:
        return _BackendCandidate(name)
    if not backend.is_kernel:
        known = ", ".join([*backends, *sorted(kernels.published())])
        raise KernelRefused(f"unknown candidate {name!r}; expected a module:function or one of {known}")
    return LazyCandidate(name, lambda: KernelCandidate(name, backend.kernel()))
