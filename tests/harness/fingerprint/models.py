"""Models of a few kilobytes for fingerprints: configurations of public bugs, a tokenizer, and random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 600, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    *,
    tokenizer_class: str = "PreTrainedTokenizerFast",
    template: str = TEMPLATE,
    adds_bos: bool = False,
    splits: str = "",
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model's folder, and return it.

    Args:
        folder: where to; made if it is not there.
        config: what ``config.json`` says beyond `LLAMA`.
        tokenizer_class: as ``tokenizer_config.json`` names it.
        template: of chats.
        adds_bos: whether the tokenizer adds a BOS to each text.
        splits: regular expression by which the tokenizer splits texts; empty for that of GPT-2.
        weights: by default random ones, the same in each call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6}))
    _write_tokenizer(folder, tokenizer_class, template, adds_bos, splits)
    save_file(dict(weights if weights is not None else random_weights()), folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, tokenizer_class: str, template: str, adds_bos: bool, splits: str) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = whole
    if splits:
        parts = [pre_tokenizers.Split(Regex(splits), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=whole.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((f"{n * 7919 % 100000} {n} the capital of France is Paris" for n in range(2000)), trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in vocabulary["merges"]))
    written = {
        "tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "model_max_length": 512,
        "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


def random_weights() -> dict[str, Tensor]:
    """Return the parameters of a Llama of the size of `LLAMA`, by the names of transformers."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, size = 64, 96, 600
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size, hidden), "lm_head.weight": (size, hidden)}
    for number in range(2):
        at = f"model.layers.{number}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (64, hidden), f"{at}.self_attn.k_proj.weight": (32, hidden),
            f"{at}.self_attn.v_proj.weight": (32, hidden), f"{at}.self_attn.o_proj.weight": (hidden, 64),
            f"{at}.mlp.gate_proj.weight": (inner, hidden), f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    norms = [
        "model.norm.weight",
        *(f"model.layers.{n}.{x}_layernorm.weight" for n in range(2) for x in ("input", "post_attention")),
    ]
    return weights | {name: 1 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
