"""Converts the tiny model to the architectures of other families: the same answers from different layers.

Nothing is trained. The tiny Llama's weights are written into the layers of another architecture, which then compute nearly the same
function, and the family's attention features are added: windows, a soft cap, sinks. So the model still answers.

Parts that a Llama lacks are made nearly linear. A norm after a block, or of q and k, gets inputs far below its epsilon, where it is
a constant factor; the norms before a block get inputs far above it. `silu(x)` is nearly `1.702 gelu(x / 1.702)`, and is exactly
gpt-oss's gate with a bias of -1 on the other factor.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line lists models and must not wait for torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "model"
"""The tiny Llama."""
_EPS = 1.0
# Factors for the residual stream, and for the inputs of norms that shall be linear. Their mean squares are then far above and far
# below `_EPS`.
_LARGE, _SMALL = 2.0**12, 2.0**-12
_GELU = 1.702
# Visible keys in a layer with a window. The built-in questions have 105 to 146 tokens.
_WINDOW = 64
_CAP, _FINAL_CAP = 20.0, 60.0
_SINK = -1.0
_EXPERTS, _CHOSEN = 4, 2
_TINY = 2.0**-18
# Factor for a router's scores, so that the chosen experts have all the weight, with or without normalisation.
_SURE = 100.0
# Dims of DeepSeek's latents, and of its heads without the 64 for RoPE. Kernels for latent attention expect these.
_LATENT, _NOPE = 512, 128
_KV_SCALES = {"k": 0.08, "v": 0.02}

_Weights = dict[str, "Tensor"]
_Config = dict[str, Any]


def _linear(layers: _Weights, number: int, old: str, new: str, weight: float) -> None:
    """Add the weight of a norm that multiplies by `weight`."""
    layers[f"model.layers.{number}.{new}.weight"] = layers[f"model.layers.{number}.{old}.weight"] * 0 + weight


def _enlarged(weights: _Weights, config: _Config, by: float = 1.0) -> None:
    """Enlarge the residual stream. The architecture itself multiplies embeddings by `by`."""
    weights["model.embed_tokens.weight"] *= _LARGE / by
    weights["model.norm.weight"] *= by / _LARGE
    config["rms_norm_eps"] = _EPS


def _of_gemma(weights: _Weights, config: _Config) -> None:
    """Add the norms after the blocks, and Gemma's conventions for the weights of norms, embeddings and gates."""
    _enlarged(weights, config, config["hidden_size"] ** 0.5)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        weights[f"{at}.pre_feedforward_layernorm.weight"] = weights.pop(f"{at}.post_attention_layernorm.weight")
        for block, norm in (
            ("self_attn.o_proj", "post_attention_layernorm"),
            ("mlp.down_proj", "post_feedforward_layernorm"),
        ):
            weights[f"{at}.{block}.weight"] *= _SMALL
            _linear(weights, number, "input_layernorm", norm, _LARGE / _SMALL)
        weights[f"{at}.mlp.gate_proj.weight"] /= _GELU
        weights[f"{at}.mlp.down_proj.weight"] *= _GELU
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] -= 1
    config |= {
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": _WINDOW, "attention_bias": False,
    }  # fmt: skip


def _normed_heads(weights: _Weights, config: _Config) -> None:
    """Add the norms of q and k, which are linear."""
    for number in range(config["num_hidden_layers"]):
        for projection in "qk":
            at = f"model.layers.{number}.self_attn.{projection}"
            weights[f"{at}_proj.weight"] *= _SMALL
            weights[f"{at}_norm.weight"] = weights[f"{at}_proj.weight"].new_full((config["head_dim"],), 1 / _SMALL)


def _gemma2(weights: _Weights, config: _Config) -> None:
    _of_gemma(weights, config)
    config |= {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": _CAP,
        "final_logit_softcapping": _FINAL_CAP, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip


def _gemma3(weights: _Weights, config: _Config) -> None:
    _normed_heads(weights, config)
    _of_gemma(weights, config)
    config |= {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0, "rope_theta": 10000.0,
        "rope_parameters": {
            kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
        },
    }  # fmt: skip


def _qwen3(weights: _Weights, config: _Config) -> None:
    _enlarged(weights, config)
    _normed_heads(weights, config)
    for number in range(config["num_hidden_layers"]):
        for block in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{number}.{block}.weight"] *= _LARGE
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _gpt_oss(weights: _Weights, config: _Config) -> None:
    import torch

    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}.mlp"
        gate, up, down = (weights.pop(f"{at}.{part}_proj.weight") for part in ("gate", "up", "down"))
        both = torch.stack([gate / _GELU, up], 1).flatten(0, 1)  # alternate the rows of both
        bias = torch.tensor([0.0, -1.0]).repeat(len(gate))
        weights |= {
            f"{at}.experts.gate_up_proj": both.T.repeat(_EXPERTS, 1, 1),
            f"{at}.experts.gate_up_proj_bias": bias.repeat(_EXPERTS, 1),
            f"{at}.experts.down_proj": (down.T * _GELU).repeat(_EXPERTS, 1, 1),
            f"{at}.experts.down_proj_bias": down.new_zeros(_EXPERTS, len(down)),
            f"{at}.router.weight": torch.eye(_EXPERTS, len(down)),
            f"{at}.router.bias": down.new_zeros(_EXPERTS),
        }
        at = f"model.layers.{number}.self_attn"
        weights[f"{at}.sinks"] = torch.linspace(_SINK, -_SINK, config["num_attention_heads"])
        for projection in "qkvo":
            weights[f"{at}.{projection}_proj.bias"] = down.new_zeros(len(weights[f"{at}.{projection}_proj.weight"]))
    config |= {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "sliding_window": _WINDOW,
        "num_local_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN, "swiglu_limit": 1000.0, "rope_theta": 10000.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False,
        "dtype": "float32",  # SGLang makes some of its layers in the configuration's dtype and ignores --dtype
    }  # fmt: skip
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def _deepseek_v2(weights: _Weights, config: _Config) -> None:
    """Write K and V into latents, and MLPs into experts. Only one kv head keeps RoPE, so this model cannot answer questions."""
    import torch

    eps = 1e-6  # transformers does not accept another one for the norm of latents
    heads, dim, hidden = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    mixed = torch.linalg.qr(torch.randn(_LATENT, 3 * dim, generator=torch.Generator().manual_seed(0)))[0]
    in_turns = torch.arange(dim).view(2, -1).T.flatten()  # RoPE rotates neighbouring dims
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}.self_attn"
        q, k, v = (weights.pop(f"{at}.{x}_proj.weight").view(-1, dim, hidden) for x in "qkv")
        of_q, of_kv = q.new_zeros(heads, _NOPE + dim, hidden), q.new_zeros(heads, 2 * _NOPE, 3 * dim)
        of_o = q.new_zeros(hidden, heads, _NOPE)
        of_o[..., :dim] = weights[f"{at}.o_proj.weight"].view(hidden, heads, dim)
        for head in range(heads):
            kv = head // (heads // len(k))
            of_q[head, slice(0, dim) if kv else slice(_NOPE, None)] = q[head] if kv else q[head, in_turns]
            of_kv[head, _NOPE : _NOPE + dim, kv * dim : (kv + 1) * dim] = torch.eye(dim)
            of_kv[head, :dim, 2 * dim :] = torch.eye(dim) * kv
        weights |= {
            f"{at}.q_proj.weight": of_q.flatten(0, 1) * (1 + _NOPE / dim) ** 0.5,
            f"{at}.kv_a_proj_with_mqa.weight": torch.cat([mixed @ torch.cat([*v, k[1]]) * _TINY, k[0, in_turns]]),
            f"{at}.kv_a_layernorm.weight": q.new_full((_LATENT,), eps**0.5 / _TINY),
            f"{at}.kv_b_proj.weight": of_kv.flatten(0, 1) @ mixed.T,
            f"{at}.o_proj.weight": of_o.flatten(1),
        }
        at = f"model.layers.{number}.mlp"
        if number:  # half of each MLP becomes the shared experts, the other half becomes every routed expert
            parts = {x: weights.pop(f"{at}.{x}_proj.weight").chunk(2, int(x == "down")) for x in ("gate", "up", "down")}
            weights[f"{at}.gate.weight"] = _SURE * torch.eye(_EXPERTS, hidden)
            for x, (shared, chosen) in parts.items():
                weights[f"{at}.shared_experts.{x}_proj.weight"] = shared
                weights |= {f"{at}.experts.{n}.{x}_proj.weight": chosen.clone() for n in range(_EXPERTS)}
    config |= {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": _NOPE, "qk_rope_head_dim": dim, "v_head_dim": _NOPE, "num_key_value_heads": heads,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": config["intermediate_size"] // 2,
        "n_routed_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN, "n_shared_experts": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": eps,
        # Without a GPU, SGLang supports DeepSeek's RoPE only as YaRN. A factor of 1 changes nothing.
        "rope_scaling": {
            "rope_type": "yarn", "type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": config["max_position_embeddings"],
        },
    }  # fmt: skip
    del config["head_dim"], config["rope_parameters"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def _fp8_kv(weights: _Weights, config: _Config) -> None:
    """Add scales for K and V, as in checkpoints for ``--kv-cache-dtype fp8_e4m3``. Nothing else is quantised."""
    import torch

    linear = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}.self_attn"
        weights |= {f"{at}.{part}_scale": torch.tensor(scale * (1 + number / 8)) for part, scale in _KV_SCALES.items()}
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": linear, "kv_cache_quant_algo": "FP8",
    }  # fmt: skip
    config["dtype"] = "float16"  # SGLang does not support quantised checkpoints in float32


FAMILIES: Mapping[str, Callable[[_Weights, _Config], None]] = {
    "deepseek-v2": _deepseek_v2, "fp8-kv": _fp8_kv, "gemma2": _gemma2, "gemma3": _gemma3, "gpt-oss": _gpt_oss, "qwen3": _qwen3,
}  # fmt: skip
"""Functions that convert the tiny Llama to a family, in place."""


def tiny_model(family: str) -> Path:
    """Return the folder of a family's tiny model. The first call makes it in the user's cache: one second, 7 MB."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
    made = hashlib.sha256(Path(__file__).read_bytes() + (SOURCE / "model.safetensors").read_bytes()).hexdigest()[:12]
    folder = cache / f"tiny-{family}-{made}"
    if not folder.exists():
        beside = folder.with_name(f".{folder.name}.{os.getpid()}")
        make(family, beside)
        try:
            beside.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(beside)
    return folder


def make(family: str, folder: Path) -> None:
    """Write a family's tiny model into a new folder."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("README.md", "training.json", "model.safetensors"))
    weights = {name: tensor.float() for name, tensor in load_file(SOURCE / "model.safetensors").items()}
    config = json.loads((SOURCE / "config.json").read_text())
    FAMILIES[family](weights, config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: tensor.bfloat16().contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
