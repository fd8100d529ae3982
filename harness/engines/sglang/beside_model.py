"""Make the models that features serve next to the model, from its configuration: an adapter of zeros, and a draft model.

Flags of a server name them by `MODEL`, `ADAPTER` and `DRAFT`, which `filled` replaces by folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.harness.files import write_whole

if TYPE_CHECKING:  # the command line names features, and must not wait for torch
    from torch import Tensor

# In a flag: the folder of the model.
MODEL = "{model}"
# In a flag: the folder of a LoRA adapter that adds zeros.
ADAPTER = "{adapter}"
# Name of the adapter of zeros in a server.
ADAPTER_NAME = "assay-zeros"
# In a flag: the folder of a draft model for EAGLE.
DRAFT = "{draft}"
# Folder, next to that of the adapter of zeros, of a nonzero adapter, which shows that adapters are applied.
OTHER_ADAPTER = "other-adapter"
# Architectures whose layers are known to have the projections of Llama, and whose models give their embedding to a draft.
_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Architectures whose modules in SGLang divide the heads by the size of attention's own group (``attn_tp_size``).
_BY_REQUEST = (
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "MiniMaxM2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
_RANK, _ALPHA = 8, 16
# Standard deviation of the other adapter's second matrix: enough to move every log-probability.
_SPREAD = 0.1

_Config = Mapping[str, Any]
_Weights = dict[str, "Tensor"]
# Name and content of the configuration, and of the weights.
_MadeModel = tuple[str, _Config, str, _Weights]


def like_llama(config: _Config) -> str:
    """Say why adapters and drafts cannot be made for a model of this configuration, or return an empty string."""
    architecture = next(iter(config.get("architectures") or ()), "a model without an architecture")
    return "" if architecture in _FAMILIES else f"is made for {', '.join(_FAMILIES)}, not for {architecture}"


def attends_by_request(config: _Config) -> str:
    """Say why two GPUs cannot share the requests of a model's attention, or return an empty string."""
    architecture = next(iter(config.get("architectures") or ()), "a model without an architecture")
    return "" if architecture in _BY_REQUEST else f"SGLang's {architecture} shares every layer among all GPUs"


def has_experts(config: _Config) -> str:
    """Say why the experts of a model cannot be shared by two GPUs, or return an empty string."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((int(config[name]) for name in names if config.get(name)), 0)
    if count < 2:
        return "the model has no experts"
    if config.get("model_type") == "gpt_oss":
        return "SGLang 0.5.17 leaves the experts of gpt-oss together"
    return "" if count % 2 == 0 else f"{count} experts cannot be shared by two"


def adapter(config: _Config, zeros: bool) -> _MadeModel:
    """Make a LoRA adapter in PEFT's format, for q and v of every layer, that adds zeros, or something to every token."""
    import torch

    generator, hidden = torch.Generator().manual_seed(0), int(config["hidden_size"])
    weights: _Weights = {}
    for number in range(int(config["num_hidden_layers"])):
        for projection, rows in (("q", _rows(config)[0]), ("v", _rows(config)[1])):
            at = f"base_model.model.model.layers.{number}.self_attn.{projection}_proj"
            second = torch.zeros(rows, _RANK) if zeros else _random(generator, rows, _RANK, spread=_SPREAD)
            weights[f"{at}.lora_A.weight"] = _random(generator, _RANK, hidden, spread=hidden**-0.5).to(_dtype(config))
            weights[f"{at}.lora_B.weight"] = second.to(_dtype(config))
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _ALPHA, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    return "adapter_config.json", described, "adapter_model.safetensors", weights


def draft(config: _Config) -> _MadeModel:
    """Make a draft model for EAGLE: one layer after a projection of the model's embedding and hidden states, with random weights.

    Embedding and head are the model's own, which SGLang gives to a draft. Names are those of ``models/llama_eagle.py``.
    """
    import torch

    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    q_rows, kv_rows = _rows(config)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (q_rows, hidden),
        "layers.0.self_attn.k_proj.weight": (kv_rows, hidden),
        "layers.0.self_attn.v_proj.weight": (kv_rows, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q_rows),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    generator, dtype = torch.Generator().manual_seed(0), _dtype(config)
    weights = {name: _random(generator, *shape, spread=shape[1] ** -0.5).to(dtype) for name, shape in shapes.items()}
    weights["fc.bias"] = torch.zeros(hidden, dtype=dtype)
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden, dtype=dtype)
    of_model = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "quantization_config")
    described = {name: value for name, value in config.items() if name not in of_model} | {
        "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1, "attention_bias": False,
        # SGLang takes the draft's own embedding and head apart before it puts the model's there.
        "tie_word_embeddings": False,
    }  # fmt: skip
    return "config.json", described, "model.safetensors", weights


def filled(flags: tuple[str, ...], model: Path, config: _Config, folder: Path) -> tuple[str, ...]:
    """Put folders into flags: that of the model, and those of the models made for it, which are written into the server's folder.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    makers: Mapping[str, Callable[[], Mapping[Path, _MadeModel]]] = {
        ADAPTER: lambda: {
            folder / "adapter": adapter(config, zeros=True),
            folder / OTHER_ADAPTER: adapter(config, zeros=False),
        },
        DRAFT: lambda: {folder / "draft": draft(config)},
    }
    places = {MODEL: model}
    for name, make in makers.items():
        if any(name in flag for flag in flags):
            made = make()
            for place, content in made.items():
                _write(place, content)
            places[name] = next(iter(made)).resolve()
    return tuple(_with(flag, places) for flag in flags)


def _with(flag: str, places: Mapping[str, Path]) -> str:
    for name, place in places.items():
        flag = flag.replace(name, str(place))
    return flag


def _write(folder: Path, made: _MadeModel) -> None:
    import safetensors.torch

    config_file, config, weights_file, weights = made
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / config_file, json.dumps(config, indent=1), durable=False)
    write_whole(folder / weights_file, safetensors.torch.save(weights, {"format": "pt"}), durable=False)


def _rows(config: _Config) -> tuple[int, int]:
    """Return the outputs of the projections of q and of k or v."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return heads * head_dim, int(config.get("num_key_value_heads") or heads) * head_dim


def _random(generator: Any, *shape: int, spread: float) -> Tensor:
    import torch

    return spread * torch.randn(*shape, generator=generator)


def _dtype(config: _Config) -> Any:
    """Return the dtype of a model's weights."""
    import torch

    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
