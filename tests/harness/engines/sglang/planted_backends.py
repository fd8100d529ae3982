"""Check backends of SGLang without a server: its torch_native, and the same with bugs planted in it.

Prints one JSON line per check, then one about two that are timed in turns, and one about what is global to SGLang. It runs in a
process of its own, since it imports SGLang.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.declaration import Declaration
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import matrix_of

kernels.load("sglang:torch_native@16")  # sets SGLang up, before it is imported here

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402


class RowsByPlace(TorchNativeAttnBackend):
    """A sequence's row of the block table is taken to be its place in the batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        places = torch.arange(1, batch.batch_size + 1)
        return super().forward(q, k, v, layer, replace(batch, req_pool_indices=places), save_kv_cache)


class ConsecutivePages(TorchNativeAttnBackend):
    """The pages of a sequence are taken to follow one another."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        table = self.req_to_token_pool.req_to_token
        follow = (table[:, :1] + torch.arange(table.shape[1])).clamp(max=self.token_to_kv_pool.size)
        with patch.object(self.req_to_token_pool, "req_to_token", follow.int()):
            return super().forward(q, k, v, layer, batch, save_kv_cache)


class Unwritten(TorchNativeAttnBackend):
    """The new tokens' K and V are not written to the pool."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        return super().forward(q, k, v, layer, batch, False)


class OneTokenMore(TorchNativeAttnBackend):
    """Each sequence is taken to be one token longer in decode, so that it sees what its row of the block table holds behind it."""

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True) -> Tensor:
        return super().forward_decode(q, k, v, layer, replace(batch, seq_lens=batch.seq_lens + 1), save_kv_cache)


PLANTED = (RowsByPlace, ConsecutivePages, Unwritten, OneTokenMore)


def checked(backend: str) -> dict[str, Any]:
    made = matrix_of(Declaration())[::3]
    result = check(f"sglang:{backend}@16", cases=made)
    others = {one.case for one in (*result.refused, *result.excluded)}
    return {
        "backend": backend,
        "verdict": result.verdict,
        "findings": [finding.id for finding in result.findings],
        "failing": sorted(result.failing),
        "right": sorted({case.name for case in made} - {*result.failing} - others),
    }


def globals_of_sglang() -> dict[str, Any]:
    from sglang.srt.model_executor.forward_context import has_forward_context
    from sglang.srt.runtime_context import get_context, get_parallel

    return {
        "arguments": get_context()._server_args is not None,
        "parallel": get_parallel()._overrides,
        "forward context": has_forward_context(),
        "gradients off": not torch.is_grad_enabled(),
    }


if __name__ == "__main__":
    for planted in PLANTED:
        ATTENTION_BACKENDS[planted.__name__] = planted
    for name in ("torch_native", *(planted.__name__ for planted in PLANTED)):
        print(json.dumps(checked(name)), flush=True)
    print(json.dumps(globals_of_sglang()), flush=True)
