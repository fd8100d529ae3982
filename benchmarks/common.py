"""What the benchmarks share: the command line of assay, kernels of this folder, and a model with the shape of an 8B model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from assay.harness.engines.model import TINY_MODEL

HERE = Path(__file__).parent
REFERENCE = {"cpu": "torch_native", "cuda": "triton"}
"""The reference backend on each device."""
DUMMY_WEIGHTS = "--load-format=dummy"
"""Flag of SGLang for a model folder without weights."""
SHAPE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
}
"""The shape of Llama 3.1 8B."""
SHAPE_1B: dict[str, Any] = SHAPE_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
}
"""The shape of Llama 3.2 1B, but for the tokens: it has the tiny model's, and their embeddings twice."""
_HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False, "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
"""A small Qwen3-Next: three layers of gated delta rules, which keep states, then one of attention, all with experts."""
_WIDE = 0.08
"""Standard deviation of its weights: with the usual .02, its tokens are nearly equally probable whatever a layer does."""


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` with these folders and this one first, so that a server finds the kernels in them."""
    return os.pathsep.join([*map(str, folders), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def assay(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run ``assay`` with the kernels of this folder importable, and variables added to the environment; return its exit code."""
    command = [sys.executable, "-m", "assay", *arguments]
    variables = os.environ | {"PYTHONPATH": python_path()} | env
    return subprocess.run(command, cwd=cwd, env=variables, check=False).returncode


def shaped_model(folder: Path, shape: Mapping[str, Any] = MappingProxyType(SHAPE_8B)) -> Path:
    """Create a folder with the configuration of a model of this shape and the tiny model's tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in TINY_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(TINY_MODEL / "chat_template.jinja", folder)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(shape)))
    return folder


def random_model(folder: Path) -> Path:
    """Create a folder with a model of the shape of 1B and random weights, whose every layer moves what it writes.

    Weights without meaning are enough where one build is compared with itself; those of `DUMMY_WEIGHTS` are so small that all
    tokens are equally probable.
    """
    import safetensors.torch
    import torch

    shaped_model(folder, SHAPE_1B)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, spread: float = 0.02) -> torch.Tensor:
        return (spread * torch.randn(shape, generator=generator, device=device)).bfloat16().cpu()

    weights = {
        "model.embed_tokens.weight": drawn(config["vocab_size"], hidden),
        "lm_head.weight": drawn(config["vocab_size"], hidden, spread=0.04),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        weights |= {f"model.layers.{layer}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        weights |= {
            f"model.layers.{layer}.{name}_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16)
            for name in ("input", "post_attention")
        }
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def hybrid_model(folder: Path) -> Path:
    """Create a folder with a small model whose layers keep states: random weights, and the tiny model's tokenizer."""
    import safetensors.torch
    import torch

    shaped_model(folder)
    tiny, config = json.loads((TINY_MODEL / "config.json").read_text()), dict(_HYBRID)
    config |= {name: tiny[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in _hybrid_shapes(config).items():
        spread = _WIDE * torch.randn(shape, generator=generator)
        # Norms multiply by one more than their weight, those of states by their weight alone; states decay by a tenth a token.
        around = next(
            (value for end, value in (("linear_attn.norm.weight", 1.0), ("A_log", -2.0)) if name.endswith(end)), 0.0
        )
        weights[name] = (around + spread).to(torch.float32 if name.endswith("A_log") else torch.bfloat16)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _hybrid_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Qwen3-Next, by its name in a checkpoint."""
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    heads, value_head = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    linear = {
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (value_head,),
        "linear_attn.out_proj.weight": (hidden, values),
    }
    attention = {
        "self_attn.q_proj.weight": (2 * q, hidden),  # with its gate
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    mlp = {"mlp.gate.weight": (config["num_experts"], hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    for expert in ("shared_expert", *(f"experts.{number}" for number in range(config["num_experts"]))):
        mlp |= {f"mlp.{expert}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        mlp[f"mlp.{expert}.down_proj.weight"] = (hidden, inner)
    norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        attends = (number + 1) % config["full_attention_interval"] == 0
        of_layer = {**norms, **(attention if attends else linear), **mlp}
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    return shapes
