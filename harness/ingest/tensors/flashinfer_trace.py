"""FlashInfer Trace: replay packs as definitions and workloads that flashinfer-bench reads, and back.

The schema is that of flashinfer-bench 0.1.2 (``flashinfer_bench/data``): ``definitions/<op_type>/<name>.json``,
``workloads/<op_type>/<name>.jsonl`` and ``blob/workloads/<op_type>/<name>/<name>_<uuid>.safetensors``; names and axes are those of
its ragged prefill (``gqa_ragged_prefill_causal_h32_kv8_d128``). A workload with a cached prefix is one whose ``kv_indptr`` grows
faster than its ``qo_indptr``; the mask is right-aligned. A definition's reference is code: it is written here, and never run.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from assay.harness.attention.call import AttentionCall, CallSpec, Mask, cumulative
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.pack import RecordedCall, read_pack
from assay.harness.files import is_unused, write_whole
from assay.harness.ingest.tensors.tensor_files import safetensors_entries
from assay.harness.ingest.tensors.whole_calls import unpaged
from assay.harness.reading import whole_file

_OP_TYPE = "gqa_ragged"
_NAMESPACE = uuid.UUID("6f1d6c3e-9f0b-5f57-9a57-2f7ac1f0a5a1")
LARGEST_INPUT = 1 << 30
"""Bytes of an input that is drawn: a workload can state any number of rows."""
_DEFINED = ("name", "op_type", "axes", "inputs")
_INPUTS = ("q", "k", "v", "qo_indptr", "kv_indptr")
_TORCH = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
_REFERENCE = '''\
import math

import torch


@torch.no_grad()
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    """Attention in float64. The causal mask is right-aligned: query i sees keys 0 to i + (kv_len - qo_len)."""
    groups = q.shape[1] // k.shape[1]
    output = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -float("inf"), dtype=torch.float32, device=q.device)
    for b in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        keys = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        qb = q[rows].double().transpose(0, 1)
        kb = k[keys].double().transpose(0, 1).repeat_interleave(groups, 0)
        vb = v[keys].double().transpose(0, 1).repeat_interleave(groups, 0)
        if not qb.shape[1] or not kb.shape[1]:
            continue
        scores = sm_scale * qb @ kb.transpose(1, 2)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        seen = seen.tril(kb.shape[1] - qb.shape[1]) if CAUSAL else seen
        scores = scores.masked_fill(~seen, -float("inf"))
        output[rows] = (scores.softmax(-1) @ vb).transpose(0, 1).to(q.dtype)
        lse[rows] = (torch.logsumexp(scores, -1) / math.log(2.0)).transpose(0, 1).float()
    return output, lse
'''


@dataclass(frozen=True)
class _Exported:
    """The files that were written.

    Attributes:
        definitions: their names.
        workloads: how many.
        with_prefix: workloads with a cached prefix.
        refused: why calls were left out.
    """

    definitions: tuple[str, ...]
    workloads: int
    with_prefix: int
    refused: tuple[str, ...]


def _definition_name(call: AttentionCall) -> str:
    """Name a definition, such as "gqa_ragged_prefill_causal_h32_kv8_d128"; dtypes other than theirs, bfloat16, come at the end."""
    dtype = {torch.bfloat16: "", torch.float16: "_fp16", torch.float32: "_fp32"}[call.q.dtype]
    causal = "_causal" if call.causal else ""
    return f"gqa_ragged_prefill{causal}_h{call.q.shape[1]}_kv{call.k.shape[1]}_d{call.q.shape[2]}{dtype}"


def _definition_of(call: AttentionCall) -> dict[str, Any]:
    """Make the definition of a call's kernel, as JSON."""
    dtype = str(call.q.dtype).removeprefix("torch.")
    const = {"num_qo_heads": call.q.shape[1], "num_kv_heads": call.k.shape[1], "head_dim": call.q.shape[2]}
    kv = {"shape": ["total_kv", "num_kv_heads", "head_dim"], "dtype": dtype}
    mask = "right-aligned causal mask, with or without a cached prefix (qo_len <= kv_len)" if call.causal else "no mask"
    return {
        "name": _definition_name(call),
        "description": f"Batched grouped-query attention over packed sequences, {mask}.",
        "op_type": _OP_TYPE,
        "tags": ["stage:prefill"],
        "axes": {name: {"type": "const", "value": value} for name, value in const.items()}
        | {name: {"type": "var"} for name in ("len_indptr", "total_q", "total_kv")},
        "constraints": ["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"],
        "inputs": {
            "q": {"shape": ["total_q", "num_qo_heads", "head_dim"], "dtype": dtype},
            "k": kv,
            "v": kv,
            "qo_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
            "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
            "sm_scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {
            "output": {"shape": ["total_q", "num_qo_heads", "head_dim"], "dtype": dtype},
            "lse": {"shape": ["total_q", "num_qo_heads"], "dtype": "float32", "description": "log-sum-exp, to base 2"},
        },
        "reference": f"CAUSAL = {call.causal}\n{_REFERENCE}",
    }  # fmt: skip


def export_pack(pack: Path, folder: Path) -> _Exported:
    """Write a pack's calls as definitions and workloads.

    Raises:
        UsageError: the folder is not empty, or `pack` is not a pack.
        EvidenceError: no call can be written.
    """
    if not is_unused(folder):
        raise UsageError(f"{folder} has content.", "a new or empty folder", "choose another folder")
    lines: dict[str, list[str]] = {}
    refused: list[str] = []
    with_prefix = 0
    for recorded in read_pack(pack):
        call = recorded.call
        if call.q.dtype not in _TORCH.values() or call.v.shape[2] != call.q.shape[2]:
            refused.append(
                f"{recorded.entry.file}: {call.q.dtype}, head dim {call.q.shape[2]} and {call.v.shape[2]} of v have no definition"
            )
            continue
        name = _definition_name(call)
        if name not in lines:
            write_whole(
                folder / "definitions" / _OP_TYPE / f"{name}.json",
                json.dumps(_definition_of(call), indent=2),
                durable=False,
            )
        lines.setdefault(name, []).append(_write_workload(folder, name, recorded))
        with_prefix += max(call.prefixes) > 0
    if not lines:
        raise EvidenceError(
            f"No call of {pack} can be written: {refused[0]}.",
            "calls in float32, float16 or bfloat16",
            "record another pack",
        )
    for name, traces in lines.items():
        write_whole(folder / "workloads" / _OP_TYPE / f"{name}.jsonl", "\n".join(traces) + "\n", durable=False)
    return _Exported(tuple(lines), sum(map(len, lines.values())), with_prefix, tuple(refused))


def _write_workload(folder: Path, name: str, recorded_call: RecordedCall) -> str:
    """Write the tensors of a call; returns its line of the workloads."""
    call, identity = recorded_call.call, str(uuid.uuid5(_NAMESPACE, recorded_call.entry.sha256))
    place = f"blob/workloads/{_OP_TYPE}/{name}/{name}_{identity}.safetensors"
    tensors = {"q": call.q, "k": call.k, "v": call.v, "qo_indptr": call.cu_seqlens_q, "kv_indptr": call.cu_seqlens_k}
    write_whole(
        folder / place, safetensors.torch.save({key: x.contiguous() for key, x in tensors.items()}), durable=False
    )
    inputs: dict[str, Any] = {key: {"type": "safetensors", "path": place, "tensor_key": key} for key in _INPUTS}
    workload = {
        "axes": {"len_indptr": len(call.cu_seqlens_q), "total_q": call.q.shape[0], "total_kv": call.k.shape[0]},
        "inputs": inputs | {"sm_scale": {"type": "scalar", "value": call.scale}},
        "uuid": identity,
    }
    return json.dumps({"definition": name, "workload": workload, "solution": None, "evaluation": None})


def is_trace(folder: Path) -> bool:
    """Return True if a folder is a FlashInfer Trace."""
    return (folder / "definitions").is_dir() and (folder / "workloads").is_dir()


def calls_of(folder: Path, problems: list[str]) -> Iterator[AttentionCall]:
    """Yield the attention calls of a trace's workloads. What cannot be used is added to `problems`.

    Inputs that a workload calls random are drawn here, from a normal distribution as flashinfer-bench draws them, with the
    workload's id as the seed.
    """
    definitions: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "definitions").rglob("*.json")):
        try:
            made = json.loads(whole_file(path))
            definitions[made["name"]] = {
                name: dict(made[name]) if name in ("axes", "inputs") else made[name] for name in _DEFINED
            }
        except (ValueError, KeyError, TypeError, OSError) as error:
            problems.append(f"{path.name} is no definition: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    for path in sorted((folder / "workloads").rglob("*.jsonl")):
        for number, line in enumerate(whole_file(path).decode(errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                trace = json.loads(line)
                call = _call(folder, definitions[trace["definition"]], trace["workload"])
            except KeyError as error:
                problems.append(f"{path.name}: there is no definition or input {error}")
            except Exception as error:  # whatever a damaged line, or tensors that do not fit together, raise
                said = str(error).splitlines() or [type(error).__name__]
                problems.append(f"{path.name}, line {number}: {said[0]}")
            else:
                yield call


def _call(folder: Path, definition: Mapping[str, Any], workload: Mapping[str, Any]) -> AttentionCall:
    """Read the call of a workload. Raises ValueError if assay does not know such a call, KeyError if an input is missing."""
    op_type, name = definition["op_type"], definition["name"]
    if op_type not in ("gqa_ragged", "gqa_paged"):
        raise ValueError(f"op type {op_type} is not gqa_ragged or gqa_paged")
    given = {name: _input(folder, definition, workload, name) for name in definition["inputs"]}
    q = given["q"]
    causal = "causal" in name or "decode" in name
    scale = float(given["sm_scale"]) if given.get("sm_scale") is not None else q.shape[-1] ** -0.5
    if op_type == "gqa_ragged":
        qo, kv = given["qo_indptr"].to(torch.int32), given["kv_indptr"].to(torch.int32)
        k, v = given["k"], given["v"]
    else:
        qo = given["qo_indptr"].to(torch.int32) if "qo_indptr" in given else cumulative([1] * q.shape[0])
        table = given["kv_indptr"], given["kv_indices"], given.get("kv_last_page_len")
        k, v, lens = unpaged(given["k_cache"], given["v_cache"], *table)
        kv = cumulative(lens)
    fits = (int(qo[-1]), int(kv[-1])) == (q.shape[0], k.shape[0]) and len(qo) == len(kv)
    if not fits or bool((kv.diff() < qo.diff()).any()):
        raise ValueError(
            f"indptrs {qo.tolist()[-1]} and {kv.tolist()[-1]} do not fit {q.shape[0]} queries and {k.shape[0]} keys"
        )
    decode = bool((qo.diff() == 1).all() and (kv.diff() > 1).all())
    return AttentionCall(q, k, v, qo, kv, CallSpec(scale, Mask(causal), phase="decode" if decode else "extend"))


def _input(folder: Path, definition: Mapping[str, Any], workload: Mapping[str, Any], name: str) -> Any:
    """Return a tensor, or a scalar; None for a random scalar."""
    spec, given = definition["inputs"][name], workload["inputs"][name]
    if given["type"] == "scalar":
        return given["value"]
    fixed = {axis: declared.get("value") for axis, declared in definition["axes"].items()}
    axes = spec.get("shape")
    shape = axes and [workload["axes"][axis] if fixed[axis] is None else fixed[axis] for axis in axes]
    if given["type"] == "safetensors":
        return _stored(folder, name, given, shape)
    if given["type"] != "random":
        raise ValueError(f"{name} is of type {given['type']}, not random, scalar or safetensors")
    if shape is None:
        return None
    dtype = _TORCH.get(spec["dtype"])
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"{name} is {spec['dtype']} and random, so that the lengths are not known")
    if math.prod(shape) * dtype.itemsize > LARGEST_INPUT:
        raise ValueError(f"{name} of shape {shape} has more than {LARGEST_INPUT:,} bytes")
    seed = int.from_bytes(hashlib.sha256(f"{workload['uuid']} {name}".encode()).digest()[:8], "little") >> 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _stored(folder: Path, name: str, given: Mapping[str, Any], shape: list[int] | None) -> Any:
    path = (folder / given["path"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{given['path']} lies outside of the trace")
    _, mapped = safetensors_entries(path)[given["tensor_key"]]
    tensor = mapped()
    if shape is None and tensor.numel() == 1:
        return tensor.item()
    if shape is None or list(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, its definition states {shape}")
    return tensor
