"""SGLang's own layers, loaded by their own loaders as each rank of several would: ``python sharded_layers.py OUT``.

It is run in a process of its own, with the stand-ins of a CPU server, and writes ``{variant: {layer: {arrangement: [what each rank
holds]}}}`` with `torch.save`, of each rank ``{parameter: (tensor, place)}``. The variant "same" has the weights of `wholes`,
"rows" and "columns" have them permuted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from assay.evals.tiny_model.families import SOURCE
from assay.harness.fingerprint.weight_places import place_of

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCABULARY, EXPERTS = 32, 8, 8, 2, 48, 600, 4
AT = "model.layers.0"
ARRANGEMENTS = {"tp 1": (1, 1), "tp 2": (2, 1), "tp 4": (4, 1), "ep 2": (2, 2), "tp 2, ep 2": (4, 2)}
"""Name -> ranks, and groups of experts."""


def wholes() -> dict[str, Tensor]:
    """Return the parameters of a checkpoint."""
    draw = torch.Generator().manual_seed(0)
    attention, experts = f"{AT}.self_attn", f"{AT}.block.experts"
    shapes: dict[str, tuple[int, ...]] = {
        f"{attention}.q_proj.weight": (HEADS * HEAD, HIDDEN), f"{attention}.q_proj.bias": (HEADS * HEAD,),
        **{f"{attention}.{x}_proj.weight": (KV_HEADS * HEAD, HIDDEN) for x in "kv"},
        **{f"{attention}.{x}_proj.bias": (KV_HEADS * HEAD,) for x in "kv"},
        f"{AT}.mlp.gate_proj.weight": (INNER, HIDDEN), f"{AT}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{AT}.mlp.down_proj.weight": (HIDDEN, INNER), f"{AT}.mlp.down_proj.bias": (HIDDEN,),
        f"{AT}.block.gate.weight": (EXPERTS, HIDDEN), "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"{experts}.{n}.{x}_proj.weight": (INNER, HIDDEN) for n in range(EXPERTS) for x in ("gate", "up")},
        **{f"{experts}.{n}.down_proj.weight": (HIDDEN, INNER) for n in range(EXPERTS)},
    }  # fmt: skip
    return {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def permuted(weights: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Return parameters with their rows or columns in another order."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: weight.index_select(dim, torch.randperm(weight.shape[dim], generator=draw)) if weight.dim() > dim else weight
        for name, weight in weights.items()
    }


def _qkv(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.linear import QKVParallelLinear

    layer = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=True, params_dtype=torch.float32)
    for part in "qkv":
        for kind, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            layer.weight_loader(parameter, weights[f"{AT}.self_attn.{part}_proj.{kind}"], part)
    return layer


def _gate_up(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.linear import MergedColumnParallelLinear

    layer = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False, params_dtype=torch.float32)
    for number, part in enumerate(("gate", "up")):
        layer.weight_loader(layer.weight, weights[f"{AT}.mlp.{part}_proj.weight"], number)
    return layer


def _down(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.linear import RowParallelLinear

    layer = RowParallelLinear(INNER, HIDDEN, bias=True, params_dtype=torch.float32)
    for kind, parameter in (("weight", layer.weight), ("bias", layer.bias)):
        layer.weight_loader(parameter, weights[f"{AT}.mlp.down_proj.{kind}"])
    return layer


def _router(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=torch.float32)
    layer.weight_loader(layer.weight, weights[f"{AT}.block.gate.weight"])
    return layer


def _embedding(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer = VocabParallelEmbedding(VOCABULARY, HIDDEN, params_dtype=torch.float32)
    layer.weight_loader(layer.weight, weights["model.embed_tokens.weight"])
    return layer


def _norm(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    layer = RMSNorm(HIDDEN)
    layer.weight.data.copy_(weights["model.norm.weight"])
    return layer


def _moe(weights: dict[str, Tensor]) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER, layer_id=0, top_k=2, params_dtype=torch.float32
    )
    for number in range(EXPERTS):
        for part, shard in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            name = f"{AT}.block.experts.{number}.{part}_proj.weight"
            parameter = layer.w2_weight if part == "down" else layer.w13_weight
            parameter.weight_loader(parameter, weights[name], name, shard_id=shard, expert_id=number)
    return layer


LAYERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    f"{AT}.self_attn.qkv_proj": _qkv,
    f"{AT}.mlp.gate_up_proj": _gate_up,
    f"{AT}.mlp.down_proj": _down,
    f"{AT}.block.gate": _router,
    f"{AT}.block.experts": _moe,
    "model.embed_tokens": _embedding,
    "model.norm": _norm,
}


@contextmanager
def _as_rank(rank: int, ranks: int, groups: int) -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    of_group = ranks // groups
    with get_parallel().override(
        tp_size=ranks, tp_rank=rank, attn_tp_size=ranks, attn_tp_rank=rank, moe_ep_size=groups, moe_ep_rank=rank // of_group,
        moe_tp_size=of_group, moe_tp_rank=rank % of_group,
    ):  # fmt: skip
        yield


def _held(layer: Any) -> dict[str, tuple[Tensor, Any]]:
    return {
        name: (parameter.detach().clone(), place_of(layer, name, parameter, True)) for name, parameter in layer.named_parameters()
    }


def main(out: str) -> None:
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(["--model-path", str(SOURCE), "--device", "cpu", "--attention-backend", "torch_native"])
    args.resolve_once()
    publish(args, role="scheduler")
    variants = {"same": wholes(), "rows": permuted(wholes(), 0), "columns": permuted(wholes(), 1)}
    made: dict[str, Any] = {}
    for variant, weights in variants.items():
        for layer, build in LAYERS.items():
            of_layer = made.setdefault(variant, {}).setdefault(layer, {})
            for arrangement, (ranks, groups) in ARRANGEMENTS.items():
                for rank in range(ranks):
                    with _as_rank(rank, ranks, groups):
                        of_layer.setdefault(arrangement, []).append(_held(build(weights)))
    torch.save(made, out)


if __name__ == "__main__":
    main(sys.argv[1])
