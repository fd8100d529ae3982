"""The kernel on whose outputs faults are seeded: the certified one."""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

import torch

from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.kernels import Declaration, declaration, declares, find, published
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sdpa import TORCH_SDPA, torch_sdpa
from assay.harness.attention.source import source_hashes
from assay.harness.backend import Backend
from assay.harness.bugs.seeded import SeededFault
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_BYTES = 2**30
"""Most memory of outputs that are kept for the next fault; calls beyond it are computed again."""


class CertifiedKernel:
    """A kernel that computes each call once, however many faults are seeded in its output: it may be an interpreted one.

    A call is known by its content. Whether the kernel is deterministic is not seen here, but where the kernel itself, without a
    fault, is examined.

    Attributes:
        kernel: the kernel itself.
        name: as a user gave it; empty for PyTorch's attention, the default.
        code: hash of its code, which every result is bound to; empty for PyTorch's attention.
    """

    def __init__(self, kernel: Kernel = torch_sdpa, name: str = "", code: str = "") -> None:
        self.kernel, self.name, self.code = kernel, name, code
        self._outputs: dict[tuple[str, bytes], Tensor] = {}
        self._bytes = 0

    @property
    def declared(self) -> Declaration:
        """The kernel's declaration."""
        return declaration(self.kernel)

    @property
    def backend(self) -> str:
        """Its name as that of the candidate of a run."""
        return self.name or TORCH_SDPA

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute the kernel's output, which must not be written to. Raises whatever the kernel raises."""
        return self._kept("output", self.kernel, call)

    def truth(self, call: AttentionCall) -> Tensor | None:
        """Compute exact output, float64 [total_q, num_q_heads, head_dim_v], if the kernel declares a noise family, else None."""
        return self._kept("truth", oracle, call) if self.declared.noise else None

    def _kept(self, what: str, compute: Kernel, call: AttentionCall) -> Tensor:
        key = what, _content(call)
        if key in self._outputs:
            return self._outputs[key]
        out = tensor_of(compute(call)).clone()  # it may be a buffer that the next call overwrites
        if self._bytes + out.nbytes <= _KEPT_BYTES:
            self._outputs[key] = out
            self._bytes += out.nbytes
        return out


def seeded(fault: SeededFault, kernel: CertifiedKernel) -> Kernel:
    """Seed a fault in a kernel's output. The result declares what the kernel declares."""
    declared = kernel.declared

    @declares(
        phases=declared.phases,
        noise=declared.noise,
        head_dims=declared.head_dims,
        dtypes=declared.dtypes,
        prefix=declared.prefix,
    )
    def faulty(call: AttentionCall) -> Tensor:
        return fault.apply(call, kernel(call).clone(), kernel.truth(call))  # where nothing is changed, not what is kept

    return faulty


def certified_kernel(name: str | None) -> CertifiedKernel:
    """Return the kernel that a user named with ``--candidate``; PyTorch's attention if none was named.

    Raises:
        UsageError: the name is a URL or that of a backend of the engine, or the kernel cannot be imported.
    """
    if name is None:
        return CertifiedKernel()
    backend = Backend.parse(name)
    if not backend.is_kernel:
        refusal = f"--candidate is the URL {name}." if backend.is_url else f"--candidate: no kernel is named {name!r}."
        near = did_you_mean(name, sorted(published()))
        raise UsageError(
            refusal,
            "a kernel, as a published name or module:function: faults are seeded in outputs that assay computes itself",
            f"{near or 'name a kernel, see assay backends'}; or omit --candidate for PyTorch's attention, which only rounds",
        )
    kernel = find("--candidate", name)
    parts = sorted(source_hashes(name).items())
    return CertifiedKernel(kernel, name, sha256(repr(parts).encode()).hexdigest()[:12])


def _content(call: AttentionCall) -> bytes:
    """Hash everything in a call."""
    total = blake2b(digest_size=16)
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor):
            total.update(f"{field.name} {value.dtype} {list(value.shape)}".encode())
            total.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{field.name} {value!r}".encode())
    return total.digest()
