"""Attention calls in a dump of FlashInfer's API, complete with their keys and values.

FlashInfer 0.6.18 (``flashinfer/api_logging.py``, ``FLASHINFER_LOGLEVEL=10``): a folder per call with inputs.pt, or with
inputs.safetensors under ``FLASHINFER_DUMP_SAFETENSORS=1``, the same for outputs, and metadata.jsonl. A wrapper's ``plan``
and ``run`` are two calls with one self_id, and their first argument is the wrapper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.ingest.tensors.dump import Dump
from assay.harness.ingest.tensors.tensor_files import Unreadable, load_torch, safetensors_entries
from assay.harness.ingest.tensors.whole_calls import WholeCall, packed_call, unpaged
from assay.harness.reading import whole_file

_SINGLE = "single_prefill_with_kv_cache"
_RAGGED, _PAGED = "BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_MASKS = ("head_dim_vo", "custom_mask", "packed_custom_mask", "causal")
_TABLE = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_PLANS = {
    _RAGGED: ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", *_MASKS),
    _PAGED: ("qo_indptr", *_TABLE, "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", *_MASKS),
    _DECODE: (*_TABLE, "num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
}
"""Arguments of ``plan`` in order."""
_ALIASES = {"indptr": _TABLE[0], "indices": _TABLE[1], "last_page_len": _TABLE[2]}
"""What ``plan`` of the decode wrapper calls the page table."""


def flashinfer_calls(dump: Dump, problems: list[str]) -> Iterator[WholeCall]:
    """Yield the attention calls of a dump, in order. What cannot be used is added to `problems`."""
    plans: dict[int | None, dict[str, Any]] = {}
    for folder in sorted({tensor.path.parent for tensor in dump.tensors}):
        if not (folder / "metadata.jsonl").exists():
            continue
        try:
            function, self_id, values, out = _api_call(folder)
        except (Unreadable, ValueError, KeyError, OSError) as error:
            problems.append(f"{folder.name}: {error!s:.200}")
            continue
        if function.endswith(".plan"):
            plans[self_id] = values
        elif function.endswith(".run") or function == _SINGLE:
            made = _planned(function, values, plans.get(self_id))
            if isinstance(made, str):
                problems.append(f"{folder.name}: {made}")
            else:
                yield made, out


def _api_call(folder: Path) -> tuple[str, int | None, dict[str, Any], Tensor | None]:
    """Read a dumped call: its function, the wrapper that it is a method of, its arguments by name, and its output."""
    about = json.loads(
        [line for line in whole_file(folder / "metadata.jsonl").decode().splitlines() if line.strip()][-1]
    )
    values: dict[str, Any] = {**about["input_metadata"], **_tensors(folder, "inputs")}
    outputs = _tensors(folder, "outputs")
    shift = int(about.get("self_id") is not None)
    named = {_argument(name, shift): value for name, value in values.items()}
    return about["function_name"], about.get("self_id"), named, outputs.get("result", outputs.get("result_0"))


def _argument(name: str, shift: int) -> str:
    """Convert "arg_2__0" to "arg_1__0" for a method, whose first argument is the wrapper, and "kwarg_causal" to "causal"."""
    positional = re.match(r"arg_(\d+)(.*)", name)
    return f"arg_{int(positional[1]) - shift}{positional[2]}" if positional else name.removeprefix("kwarg_")


def _tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    if (path := folder / f"{stem}.safetensors").exists():
        return {name: mapped() for name, (_, mapped) in safetensors_entries(path).items()}
    path = folder / f"{stem}.pt"
    return dict(load_torch(path)) if path.exists() else {}


def _planned(function: str, run: dict[str, Any], plan: dict[str, Any] | None) -> AttentionCall | str:
    """Return the call, or why it cannot be used."""
    if function.endswith(_SINGLE):
        given = _inputs(run)
        if given is None:
            return "q, k or v is not [tokens, heads, dim]"
        q, k, v = given
        if run.get("kv_layout", "NHD") == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        scale, causal = run.get("sm_scale"), bool(run.get("causal", False))
        return packed_call(q, k, v, [q.shape[0]], [k.shape[0]], scale=scale, causal=causal)
    if plan is None:
        return "its plan() is not in the dump, which has the lengths of the sequences"
    wrapper = function.rpartition(".")[0]
    if wrapper not in _PLANS:
        return f"{wrapper} is not a wrapper that assay knows"
    planned = _named(plan, _PLANS[wrapper])
    return _ragged(run, planned) if wrapper == _RAGGED else _paged(run, planned)


def _inputs(run: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return q, k and v; None if one is missing or not [tokens, heads, dim]."""
    q, k, v = (run.get(f"arg_{i}", run.get("qkv"[i])) for i in range(3))
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and q.ndim == k.ndim == v.ndim == 3:
        return q, k, v
    return None


def _named(plan: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    positional = {name: plan[f"arg_{i}"] for i, name in enumerate(names) if f"arg_{i}" in plan}
    return positional | {_ALIASES.get(name, name): value for name, value in plan.items()}


def _ragged(run: dict[str, Any], plan: dict[str, Any]) -> AttentionCall | str:
    given, indptrs = _inputs(run), [plan.get(name) for name in ("qo_indptr", "kv_indptr")]
    if given is None or not all(isinstance(x, Tensor) for x in indptrs):
        return "q, k, v or an indptr is missing"
    lens_q, lens_k = (x.diff().tolist() for x in indptrs if isinstance(x, Tensor))
    scale, causal = plan.get("sm_scale"), bool(plan.get("causal", False))
    return packed_call(*given, lens_q, lens_k, scale=scale, causal=causal)


def _paged(run: dict[str, Any], plan: dict[str, Any]) -> AttentionCall | str:
    q, caches = run.get("arg_0", run.get("q")), _caches(run, plan)
    table = [plan.get(name) for name in _TABLE]
    if not isinstance(q, Tensor) or caches is None:
        return "q, or the cache, is missing"
    if not all(isinstance(x, Tensor) for x in table):
        return "the page table of its plan() is missing"
    qo = plan.get("qo_indptr")
    lens_q = qo.diff().tolist() if isinstance(qo, Tensor) else [1] * q.shape[0]
    k, v, lens_k = unpaged(*caches, *(x for x in table if isinstance(x, Tensor)))
    causal = bool(plan.get("causal", not isinstance(qo, Tensor)))
    return packed_call(q, k, v, lens_q, lens_k, scale=plan.get("sm_scale"), causal=causal)


def _caches(run: dict[str, Any], plan: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return caches of k and v, [pages, page_size, kv_heads, head_dim], given as two tensors or as one of [pages, 2, ...]."""
    for name in ("arg_1", "paged_kv_cache"):
        k, v, both = run.get(f"{name}__0"), run.get(f"{name}__1"), run.get(name)
        if isinstance(both, Tensor) and both.ndim == 5:
            k, v = both.unbind(1)
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            heads, size = plan.get("num_kv_heads"), plan.get("page_size")
            if (k.shape[1], k.shape[2]) == (heads, size) and heads != size:  # layout HND
                return k.transpose(1, 2), v.transpose(1, 2)
            return k, v
    return None
