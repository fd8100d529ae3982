"""Calls of vLLM's latent attention (MLA), which computes the sequences in decode and the others by two functions.

In decode it reads latents from the cache as they are; otherwise it makes K and V from the latents of the new tokens. The backend
puts sequences with one new token first and computes them as decode steps, the last token of a prompt among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, cumulative
from assay.harness.engines.vllm.engine_call import VLLMCall
from assay.harness.engines.vllm.kv_pages import located

# The module of vLLM's ``forward_mha`` that makes K and V of the new tokens. AMX_MLA has another one, on bfloat16 with Intel's AMX.
_COMMON = "vllm.model_executor.layers.attention.mla_attention"


@dataclass
class LatentCall(VLLMCall):
    """An attention call of either function; see `VLLMCall`.

    `q` has the rows of the part only, and K and V of `own` are those that attention reads: made from the latents, or, in decode,
    none.
    """

    @property
    def rows(self) -> slice:
        """All rows of `q`."""
        return slice(0, sum(self.part.new))

    @property
    def given(self) -> None:
        """None: a cache of latents in fewer bits is refused."""
        return

    def pack(self, who: str) -> AttentionCall:
        """Return the call. Raises KernelRefused for anything that the contract cannot express."""
        spec = CallSpec(float(self.attention.impl.scale), layer=self.layer, phase=self.phase)
        return self._decode(spec, who) if self.phase == "decode" else self._extend(spec, who)

    def _extend(self, spec: CallSpec, who: str) -> AttentionCall:
        if not makes_keys(self.attention.impl):
            raise KernelRefused(
                f"{type(self.attention.impl).__name__} attends to latents and projects them in one function, in layer "
                f"{spec.layer}, so what its attention returns is not known and {who} cannot serve it"
            )
        if any(self.part.prefix) or self.k is None or self.v is None:
            raise KernelRefused(
                f"layer {spec.layer} attends to cached and to new keys in parts that are merged later, so {who} cannot serve it"
            )
        cu_seqlens = cumulative(self.part.new, self.q.device)
        return AttentionCall(self.q, self.k, self.v, cu_seqlens, cu_seqlens, spec)

    def _decode(self, spec: CallSpec, who: str) -> AttentionCall:
        if self.cache.dim() != 3 or self.cache.dtype != self.q.dtype:
            raise KernelRefused(
                f"the cache of latents is {self.cache.dtype} {list(self.cache.shape)}, and q is {self.q.dtype}, so {who} cannot "
                "serve it; start the server without --kv-cache-dtype"
            )
        lens = [p + n for p, n in zip(self.part.prefix, self.part.new, strict=True)]
        table = self.metadata.decode.block_table
        k = self.cache[located(table, [0] * len(lens), lens, self.cache.shape[1], self.cache.device)].unsqueeze(1)
        cu_seqlens = cumulative(self.part.new, self.q.device), cumulative(lens, self.q.device)
        spec = CallSpec(spec.scale, layer=spec.layer, phase=spec.phase, layout="v in k")
        return AttentionCall(self.q, k, k[..., : self.attention.impl.kv_lora_rank], *cu_seqlens, spec)


def makes_keys(impl: Any) -> bool:
    """Return True if an implementation's ``forward_mha`` makes K and V from the latents of the new tokens, as vLLM's common one."""
    return str(type(impl).forward_mha.__module__) == _COMMON


def keys_and_values(impl: Any, latents: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """Make K and V of the new tokens from their latents, as vLLM's ``forward_mha`` does: [tokens, q heads, dims] each.

    Args:
        impl: vLLM's implementation.
        latents: [tokens, kv_lora_rank].
        k_pe: the dims of K with RoPE, [tokens, 1, dims].
    """
    made = impl.kv_b_proj(latents)[0].view(-1, impl.num_heads, impl.qk_nope_head_dim + impl.v_head_dim)
    k_nope, v = made[..., : impl.qk_nope_head_dim], made[..., impl.qk_nope_head_dim :]
    return torch.cat([k_nope, k_pe.expand(-1, impl.num_heads, -1)], dim=-1), v
