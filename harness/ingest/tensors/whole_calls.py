"""Dumped attention calls that hold all their keys and values: FlashInfer's API, and hooks on a Hugging Face model.

FlashInfer 0.6.18 (``flashinfer/api_logging.py``, level 10): a folder per call with inputs.pt or inputs.safetensors, outputs, and
metadata.jsonl, whose last line is the newest. A wrapper's ``plan`` and ``run`` are two calls with one self_id.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, cumulative
from assay.harness.ingest.tensors.dump import Dump, StoredTensor
from assay.harness.ingest.tensors.files import Unreadable, load_torch, safetensors_entries

_Q, _K, _V, _OUT = ("q", "query"), ("k", "key"), ("v", "value"), ("out", "output", "attn_output", "reference")
_RAGGED, _PAGED = "BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_SINGLE = "single_prefill_with_kv_cache"
_MASKS = ("head_dim_vo", "custom_mask", "packed_custom_mask", "causal")
_RAGGED_PLAN = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", *_MASKS)
_PAGE_TABLE = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_PAGED_PLAN = (*_PAGE_TABLE, "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", *_MASKS)
"""Arguments of ``plan`` in order."""


@dataclass(frozen=True)
class WholeCall:
    """A call with its dumped output; None if there is none."""

    call: AttentionCall
    out: Tensor | None


def whole_calls_of(dump: Dump, problems: list[str]) -> Iterator[WholeCall]:
    """The calls of a dump. What cannot be used is added to `problems`."""
    if dump.format == "kernel-api":
        yield from _flashinfer(dump, problems)
    else:
        yield from _hooked(dump, problems)


def _hooked(dump: Dump, problems: list[str]) -> Iterator[WholeCall]:
    """Tensors named q, k, v (and out) of a layer: [batch, heads, tokens, dim], as Hugging Face's attention functions take them, or
    [tokens, heads, dim] of one sequence."""
    groups: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    projections = 0
    for one in dump.tensors:
        base, _, last = one.key.rpartition(".")
        kind = next((kind for kind, names in (("q", _Q), ("k", _K), ("v", _V), ("out", _OUT)) if last in names), None)
        if kind:
            groups[base][kind] = one
        projections += last in ("q_proj", "k_proj", "v_proj")
    for base, group in groups.items():
        if not {"q", "k", "v"} <= set(group):
            problems.append(f"{base} has only {', '.join(sorted(group))}")
            continue
        yield from _from_hooks(base, group, problems)
    if not groups and projections:
        problems.append(
            "it has outputs of q_proj, k_proj and v_proj, which precede the rotary embedding; "
            "dump what the attention function is given"
        )


def _from_hooks(base: str, group: dict[str, StoredTensor], problems: list[str]) -> Iterator[WholeCall]:
    q, k, v = (group[name].map() for name in "qkv")
    out = group["out"].map() if "out" in group else None
    layer = group["q"].place.layer or 0
    if q.ndim == 3:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        out = out[None] if out is not None else None
    if (
        q.ndim != 4
        or k.ndim != 4
        or v.shape[:3] != k.shape[:3]
        or q.shape[0] != k.shape[0]
        or q.shape[1] % k.shape[1]
        or q.shape[2] > k.shape[2]
    ):
        problems.append(
            f"{base}: shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} are not [batch, heads, tokens, dim]"
        )
        return
    if out is not None and out.ndim == 3:
        out = out.reshape(q.shape[0], q.shape[2], q.shape[1], -1)
    elif out is not None and out.shape[1:3] == q.shape[1:3] and q.shape[1] != q.shape[2]:
        out = out.transpose(1, 2)
    for b in range(q.shape[0]):
        packed = [x[b].transpose(0, 1).contiguous() for x in (q, k, v)]
        yield WholeCall(
            _call(packed[0], packed[1], packed[2], [q.shape[2]], [k.shape[2]], layer),
            None if out is None else out[b].contiguous(),
        )


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens_q: list[int],
    lens_k: list[int],
    layer: int = 0,
    scale: float | None = None,
    causal: bool = True,
) -> AttentionCall:
    decode = all(n == 1 for n in lens_q) and all(n > 1 for n in lens_k)
    return AttentionCall(
        q, k, v, cumulative(lens_q), cumulative(lens_k), scale=q.shape[-1] ** -0.5 if scale is None else scale, causal=causal,
        layer=layer, phase="decode" if decode else "extend",
    )  # fmt: skip


@dataclass(frozen=True)
class _ApiCall:
    function: str
    self_id: int | None
    values: dict[str, Any]
    out: Tensor | None


def _flashinfer(dump: Dump, problems: list[str]) -> Iterator[WholeCall]:
    plans: dict[int | None, _ApiCall] = {}
    for folder in sorted({one.path.parent for one in dump.tensors}):
        if not (folder / "metadata.jsonl").exists():
            continue
        try:
            one = _api_call(folder)
        except (Unreadable, ValueError, KeyError, OSError) as error:
            problems.append(f"{folder.name}: {error!s:.200}")
            continue
        if one.function.endswith(".plan"):
            plans[one.self_id] = one
        elif one.function.endswith(".run") or one.function.endswith(_SINGLE):
            made = _planned(one, plans.get(one.self_id))
            if isinstance(made, str):
                problems.append(f"{folder.name}: {made}")
            else:
                yield made


def _api_call(folder: Path) -> _ApiCall:
    lines = [line for line in (folder / "metadata.jsonl").read_text().splitlines() if line.strip()]
    about = json.loads(lines[-1])
    values: dict[str, Any] = {**about["input_metadata"], **_tensors(folder, "inputs")}
    outputs = _tensors(folder, "outputs")
    out = outputs.get("result", outputs.get("result_0"))
    shift = (
        1
        if about.get("self_id") is not None
        and "arg_0" not in _tensors(folder, "inputs")
        and _is_object(values.get("arg_0"))
        else 0
    )
    named = {
        f"arg_{int(k[4:]) - shift}" if k.startswith("arg_") and k[4:].isdigit() else k.removeprefix("kwarg_"): v
        for k, v in values.items()
    }
    return _ApiCall(about["function_name"], about.get("self_id"), named, out)


def _is_object(value: Any) -> bool:
    """Whether an argument is something that was only described, such as the wrapper itself."""
    return isinstance(value, dict) and "repr" in value


def _tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    if (path := folder / f"{stem}.safetensors").exists():
        return {name: entry.map(path) for name, entry in safetensors_entries(path).items()}
    path = folder / f"{stem}.pt"
    return dict(load_torch(path)) if path.exists() else {}


def _planned(run: _ApiCall, plan: _ApiCall | None) -> WholeCall | str:
    """The call, or why it cannot be used."""
    if run.function.endswith(_SINGLE):
        given = _inputs(run)
        if given is None:
            return "q, k or v is not [tokens, heads, dim]"
        q, k, v = given
        if run.values.get("kv_layout", "NHD") == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        scale, causal = run.values.get("sm_scale"), bool(run.values.get("causal", False))
        return WholeCall(_call(q, k, v, [q.shape[0]], [k.shape[0]], scale=scale, causal=causal), run.out)
    if plan is None:
        return "its plan() is not in the dump, which has the lengths of the sequences"
    if _RAGGED in run.function:
        return _ragged(run, _named(plan, _RAGGED_PLAN))
    return (
        _paged(run, _named(plan, _PAGED_PLAN)) if _PAGED in run.function else "not an attention call that assay knows"
    )


def _inputs(run: _ApiCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, k and v; None if one is missing or not [tokens, heads, dim]."""
    q, k, v = (run.values.get(f"arg_{i}", run.values.get("qkv"[i])) for i in range(3))
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and q.ndim == k.ndim == v.ndim == 3:
        return q, k, v
    return None


def _named(one: _ApiCall, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: one.values[f"arg_{i}"] for i, name in enumerate(names) if f"arg_{i}" in one.values} | one.values


def _ragged(run: _ApiCall, plan: dict[str, Any]) -> WholeCall | str:
    given, indptrs = _inputs(run), [plan.get(name) for name in ("qo_indptr", "kv_indptr")]
    if given is None or not all(isinstance(x, Tensor) for x in indptrs):
        return "q, k, v or an indptr is missing"
    lens_q, lens_k = (x.diff().tolist() for x in indptrs if isinstance(x, Tensor))
    scale, causal = plan.get("sm_scale"), bool(plan.get("causal", False))
    return WholeCall(_call(*given, lens_q, lens_k, scale=scale, causal=causal), run.out)


def _paged(run: _ApiCall, plan: dict[str, Any]) -> WholeCall | str:
    q = run.values.get("arg_0", run.values.get("q"))
    caches = [run.values.get(f"{name}__{i}") for name in ("arg_1", "paged_kv_cache") for i in range(2)]
    k_cache, v_cache = caches[:2] if isinstance(caches[0], Tensor) else caches[2:]
    pages = [plan.get(name) for name in _PAGE_TABLE]
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        return "q, or the cache as (k, v), is missing"
    if not all(isinstance(x, Tensor) for x in pages):
        return "the page table of its plan() is missing"
    qo, indptr, indices, last = (x.tolist() for x in pages if isinstance(x, Tensor))
    size = k_cache.shape[1]
    k, v, lens_k = [], [], []
    for b in range(len(indptr) - 1):
        used = torch.tensor(indices[indptr[b] : indptr[b + 1]], dtype=torch.int64)
        length = max(len(used) - 1, 0) * size + (last[b] if len(used) else 0)
        k.append(k_cache[used].flatten(0, 1)[:length])
        v.append(v_cache[used].flatten(0, 1)[:length])
        lens_k.append(length)
    lens_q = [qo[i + 1] - qo[i] for i in range(len(qo) - 1)]
    call = _call(
        q,
        torch.cat(k),
        torch.cat(v),
        lens_q,
        lens_k,
        scale=plan.get("sm_scale"),
        causal=bool(plan.get("causal", False)),
    )
    return WholeCall(call, run.out)
