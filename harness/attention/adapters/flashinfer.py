"""FlashInfer's wrappers, which are planned for a batch and then run: prefill with a paged or a ragged KV cache, and paged decode.

``window_left`` is the number of keys before a query's own, -1 for no window. Log-sum-exps are to base 2. Sinks need a separately
compiled variant of the kernel, so the adapter passes none on. SGLang calls the older `forward` and `forward_return_lse`, which
take the planned arguments again. A paged cache in FP8 has one scale of K and one of V, which `run` takes.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    FP8_PER_TENSOR,
    WITH_OUT,
    WITHOUT_SCALE,
    Adapter,
    Attend,
    Parameters,
    out_of,
    scaled,
    scales_of,
)
from assay.harness.attention.call import WITHOUT_LSE, AttentionCall, KernelRefused, Outputs, cumulative
from assay.harness.attention.paging import PagedKV, paged

_PAGE = 16
_BY_FORWARD = "by forward"
# Bytes of a wrapper's workspace, as FlashInfer's documentation has it.
_WORKSPACE = 128 << 20


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _wrapper(kind: Any, call: AttentionCall) -> Any:
    """Make a wrapper for one call: it has one plan, and several calls may be laid out at a time."""
    return kind(_workspace(call.q.device), "NHD")


def _asked(call: AttentionCall) -> dict[str, Any]:
    """Return the arguments of every plan for a call's spec and dtypes."""
    stored = call.stored or call
    asked: dict[str, Any] = {**scaled(call, "sm_scale"), "q_data_type": call.q.dtype, "kv_data_type": stored.k.dtype}
    if call.spec.mask.window:
        asked["window_left"] = call.spec.mask.window - 1
    if call.spec.softcap:
        asked["logits_soft_cap"] = call.spec.softcap
    return asked


def _run(
    wrapper: Any, parameters: Parameters, scales: tuple[Tensor, Tensor] | None, call: AttentionCall, *kv: Any
) -> Tensor | Outputs:
    """Run the plan, and convert log-sum-exps from base 2 to base e."""
    passed: dict[str, Any] = {} if scales is None else {"k_scale": float(scales[0]), "v_scale": float(scales[1])}
    with_lse = "return_lse" in parameters.names and WITHOUT_LSE not in call.spec.ways
    if _BY_FORWARD in call.spec.ways:
        again = {name: value for name, value in _asked(call).items() if not name.endswith("type")}
        again |= {"causal": call.causal} if "causal" in parameters.names else {}
        if not with_lse:
            by_forward: Tensor = wrapper.forward(call.q, *kv, **again, **passed)
            return by_forward
        by_forward, lse = wrapper.forward_return_lse(call.q, *kv, **again, **passed)
        return Outputs(by_forward, lse * math.log(2))
    out = out_of(call) if WITH_OUT in call.spec.ways else None
    passed |= {} if out is None else {"out": out}
    if not with_lse:
        made: Tensor = wrapper.run(call.q, *kv, **passed)
        return made if out is None else out
    made, lse = wrapper.run(call.q, *kv, return_lse=True, **passed)
    return Outputs(made if out is None else out, lse * math.log(2))


def _pages(call: AttentionCall, pool: PagedKV) -> tuple[Tensor, Tensor, Tensor]:
    """Return FlashInfer's page table: where the pages of each sequence begin, the pages, and the tokens in each last one."""
    device = call.q.device
    last = torch.tensor([(length - 1) % _PAGE + 1 for length in call.lens_k], dtype=torch.int32, device=device)
    return cumulative(map(len, pool.pages), device), torch.cat(pool.pages).int().to(device), last


def _paged_prefill(kind: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    scales = scales_of(call)  # refuses what no plan can be made for
    pool, wrapper = paged(call, _PAGE), _wrapper(kind, call)
    first, pages, last = _pages(call, pool)
    wrapper.plan(
        qo_indptr=call.cu_seqlens_q, paged_kv_indptr=first, paged_kv_indices=pages, paged_kv_last_page_len=last,
        num_qo_heads=call.q.shape[1], num_kv_heads=call.k.shape[1], head_dim_qk=call.q.shape[2], page_size=_PAGE,
        causal=call.causal, custom_mask=None, **_asked(call),
    )  # fmt: skip
    return partial(_run, wrapper, parameters, scales, call, (pool.k, pool.v))


def _ragged_prefill(kind: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    wrapper = _wrapper(kind, call)
    wrapper.plan(
        qo_indptr=call.cu_seqlens_q, kv_indptr=call.cu_seqlens_k, num_qo_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1], head_dim_qk=call.q.shape[2], head_dim_vo=call.v.shape[2], causal=call.causal,
        custom_mask=None, **_asked(call),
    )  # fmt: skip
    return partial(_run, wrapper, parameters, None, call, call.k, call.v)


def _paged_decode(kind: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    if max(call.lens_q) != 1 or min(call.lens_q) != 1:
        raise KernelRefused("a decode wrapper computes one query of each sequence")
    scales = scales_of(call)  # refuses what no plan can be made for
    pool, wrapper = paged(call, _PAGE), _wrapper(kind, call)
    first, pages, last = _pages(call, pool)
    wrapper.plan(
        indptr=first, indices=pages, last_page_len=last, num_qo_heads=call.q.shape[1], num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[2], page_size=_PAGE, **_asked(call),
    )  # fmt: skip
    return partial(_run, wrapper, parameters, scales, call, (pool.k, pool.v))


_ASKS: dict[str, tuple[str, ...]] = {
    "window": ("window_left",), "softcap": ("logits_soft_cap",), "lse": ("return_lse",),
}  # fmt: skip
_PREFILL: dict[str, tuple[str, ...]] = {**_ASKS, "not_causal": ()}
_PAGED: dict[str, tuple[str, ...]] = dict.fromkeys(FP8_PER_TENSOR, ("k_scale",))
_WAYS: dict[str, tuple[str, ...]] = {
    WITHOUT_LSE: ("return_lse",), WITHOUT_SCALE: ("sm_scale",), WITH_OUT: ("out",), _BY_FORWARD: ("forward",),
}  # fmt: skip
_DTYPES = ("sm_scale", "q_data_type", "kv_data_type")
_HEADS = ("num_qo_heads", "num_kv_heads")
PAGED_PREFILL = Adapter(
    "flashinfer",
    (
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", *_HEADS, "head_dim_qk", "page_size",
        "causal", "custom_mask", *_DTYPES, "q", "paged_kv_cache",
    ),
    _PREFILL | _PAGED,
    _paged_prefill,
    ways=_WAYS,
)  # fmt: skip
RAGGED_PREFILL = Adapter(
    "flashinfer",
    (
        "qo_indptr", "kv_indptr", *_HEADS, "head_dim_qk", "head_dim_vo", "causal", "custom_mask", *_DTYPES, "q", "k", "v",
    ),
    _PREFILL,
    _ragged_prefill,
    ways=_WAYS,
)  # fmt: skip
PAGED_DECODE = Adapter(
    "flashinfer",
    ("indptr", "indices", "last_page_len", *_HEADS, "head_dim", "page_size", *_DTYPES, "q", "paged_kv_cache"),
    _ASKS | _PAGED,
    _paged_decode,
    phases=("decode",),
    ways=_WAYS,
)
