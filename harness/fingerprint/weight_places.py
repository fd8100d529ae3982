"""The part of a whole parameter that a process of an engine holds, according to the layer that loaded it.

SGLang's layers descend from vLLM's and have their names. Only parameters filled by the own loaders of these layers are known, and
only in the layout in which they load. Parameters that a model slices itself, a quantisation or a kernel packs, or an expert map
moves have no place, and are compared without one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from assay.harness.evidence.fingerprint import Weight
from assay.harness.fingerprint.weights import Piece, WeightPlace, describe_weight

_LAYERS = ("sglang.srt.layers.", "vllm.model_executor.layers.")
# Parameters that engines must keep in float32, by their names. A bias of the router's own product has the dtype of the
# model.
_KEPT = {
    "router bias": re.compile(r"e_score_correction_bias$"),
    "decay of a state": re.compile(r"A_log$"),
}
# Methods that keep the layout of the checkpoint, unless `_packed` says otherwise.
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
# Attributes of the method of experts that name kernels with a special layout.
_OTHER_ORDER = (
    "use_triton_kernels", "use_flashinfer_cutlass", "use_flashinfer_trtllm_moe", "use_deep_gemm", "load_up_proj_weight_first",
    "w13_swiglu_interleaved",
)  # fmt: skip


def weights_of(model: Any, in_order: bool) -> tuple[Weight, ...]:
    """Describe all parameters of a model; `in_order` as in `place_of`."""
    described = []
    for name, parameter in model.named_parameters():
        kept = next((why for why, pattern in _KEPT.items() if pattern.search(name)), "")
        path, _, attribute = name.rpartition(".")
        place = place_of(model.get_submodule(path), attribute, parameter, in_order)
        described.append(describe_weight(name, parameter, kept, place))
    return tuple(described)


def place_of(module: Any, attribute: str, parameter: Any, in_order: bool) -> WeightPlace | None:
    """Return the place of a parameter of a module, by its name there, or None if it is unknown.

    `in_order` says whether the experts lie in the order of their numbers.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(_LAYERS)}
    loader = getattr(parameter, "weight_loader", None)
    if any(kind.endswith("Norm") for kind in kinds) and loader is None:
        return _copy(parameter)
    if not kinds or _packed(module) or not _own(loader, module):
        return None
    place = None
    if "FusedMoE" in kinds:
        place = _experts(module, attribute) if in_order else None
    elif "QKVParallelLinear" in kinds:
        place = _qkv(module, parameter)
    elif "ColumnParallelLinear" in kinds:
        place = _columns(module, parameter)
    elif "RowParallelLinear" in kinds:
        place = _rows(module, parameter)
    elif "ReplicatedLinear" in kinds:
        place = _copy(parameter)
    elif "VocabParallelEmbedding" in kinds:
        place = _vocabulary(module, parameter)
    return place if place is not None and _fits(place, parameter) else None


def _own(loader: Any, module: Any) -> bool:
    """Return True if a loader is the layer's own, and cuts its argument itself."""
    function = getattr(loader, "__func__", None)
    return (
        getattr(loader, "__self__", None) is module
        and function is not None
        and function.__module__.startswith(_LAYERS)
        and not getattr(module, "use_presharded_weights", False)
    )


def _packed(module: Any) -> bool:
    method = getattr(module, "quant_method", None)
    return (
        torch.version.hip is not None
        or bool(getattr(module, "use_intel_amx_backend", False))
        or type(method).__name__ not in _AS_LOADED
        or any(getattr(method, name, False) for name in _OTHER_ORDER)
    )


def _fits(place: WeightPlace, parameter: Any) -> bool:
    shape = tuple(parameter.shape)
    rows = shape[0] if len(shape) < 2 else parameter.numel() // max(1, shape[-1])
    return len(shape) == len(place.whole) and sum(piece.size for piece in place.pieces) == rows


def _group(module: Any, name: str = "tp_group") -> tuple[int, int] | None:
    """Return rank and size of the group that shares a layer, or None if this version does not say."""
    if hasattr(module, name):  # 0.5.23
        group = getattr(module, name)
        return (0, 1) if group is None else (group.rank_in_group, group.world_size)
    if hasattr(module, "tp_rank") and hasattr(module, "tp_size"):  # 0.5.17
        return module.tp_rank, module.tp_size
    return None


def _copy(parameter: Any) -> WeightPlace:
    shape = tuple(parameter.shape)
    rows = parameter.numel() // max(1, shape[-1]) if len(shape) > 1 else parameter.numel()
    return WeightPlace(shape, (Piece(((0, rows),)),))


def _by_rows(parameter: Any, rows: int, *pieces: Piece) -> WeightPlace:
    return WeightPlace((rows, *tuple(parameter.shape)[1:]), pieces)


def _columns(module: Any, parameter: Any) -> WeightPlace | None:
    """Place an output that is cut; several outputs in one are cut separately."""
    group = _group(module)
    if group is None:
        return None
    rank, size = group
    return _by_rows(
        parameter, size * sum(module.output_partition_sizes), Piece(_cut(module.output_partition_sizes, rank, size))
    )


def _cut(sizes: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of a rank that has this many rows of each of several parts."""
    return tuple((size * sum(sizes[:number]) + rank * rows, rows) for number, rows in enumerate(sizes))


def _qkv(module: Any, parameter: Any) -> WeightPlace | None:
    """Place q, k and v; fewer KV heads than ranks are held in copies."""
    group, of_kv = _group(module), _group(module, "kv_tp_group" if hasattr(module, "kv_tp_group") else "tp_group")
    if group is None or of_kv is None:
        return None
    (rank, size), (kv_rank, kv_size) = group, of_kv
    replicas = module.num_kv_head_replicas
    q = module.num_heads * module.head_size
    kv = (
        module.num_kv_heads * module.head_size,
        module.num_kv_heads * getattr(module, "v_head_size", module.head_size),
    )
    runs = _cut(kv, kv_rank // replicas, kv_size // replicas)
    runs_of_kv = tuple((size * q + first, rows) for first, rows in runs)
    whole = size * q + kv_size // replicas * sum(kv)
    if (kv_rank // replicas, kv_size // replicas) == (rank, size):
        return _by_rows(parameter, whole, Piece(((rank * q, q), *runs_of_kv)))
    return _by_rows(parameter, whole, Piece(((rank * q, q),)), Piece(runs_of_kv))


def _rows(module: Any, parameter: Any) -> WeightPlace | None:
    """Place an input that is cut; the bias is added once, and is whole in each process."""
    if parameter.dim() < 2:
        return _copy(parameter)
    group = _group(module)
    if group is None:
        return None
    rank, size = group
    rows, columns = parameter.shape
    return WeightPlace((rows, size * columns), (Piece(((0, rows),), rank * columns),))


def _vocabulary(module: Any, parameter: Any) -> WeightPlace | None:
    """Place the rows of tokens, with the padding after them."""
    at = module.shard_indices
    if module.num_embeddings != module.org_vocab_size:
        return None  # tokens that an adapter added lie after the padding of each part
    return _by_rows(
        parameter, module.num_embeddings_padded, Piece(((at.padded_org_vocab_start_index, parameter.shape[0]),))
    )


def _experts(module: Any, attribute: str) -> WeightPlace | None:
    """Place the experts, which are divided among the processes first, and each expert among the rest."""
    if attribute not in ("w13_weight", "w2_weight") or getattr(module, "num_fused_shared_experts", 0) > 0:
        return None
    parameter = getattr(module, attribute)
    experts, rows, columns = parameter.shape
    rank, size = module.moe_tp_rank, module.moe_tp_size
    first, of = module.moe_ep_rank * experts, module.moe_ep_size * experts
    if attribute == "w2_weight":
        return WeightPlace((of, rows, size * columns), (Piece(((first * rows, experts * rows),), rank * columns),))
    halves = (rows // 2, rows // 2) if module.moe_runner_config.is_gated else (rows,)
    runs = _cut(halves, rank, size)
    return WeightPlace(
        (of, size * rows, columns),
        (
            Piece(
                tuple(
                    (number * size * rows + at, many) for number in range(first, first + experts) for at, many in runs
                )
            ),
        ),
    )
