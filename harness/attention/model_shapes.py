"""Shapes of attention in well-known models, by name: numbers of heads and head dim, as in each model's ``config.json``."""

from __future__ import annotations

SHAPES: dict[str, tuple[int, int, int]] = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (64, 8, 128),
    "llama-3.2-1b": (32, 8, 64),
    "llama-3.2-3b": (24, 8, 128),
    "llama-2-7b": (32, 32, 128),
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-14b": (40, 8, 128),
    "qwen2.5-32b": (40, 8, 128),
    "qwen2.5-72b": (64, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "qwen3-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "mistral-7b": (32, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
    "gemma-7b": (16, 16, 256),
    "gemma-2-9b": (16, 8, 256),
    "gpt-oss-20b": (64, 8, 64),
    "phi-2": (32, 32, 80),
    "phi-3-mini": (32, 32, 96),
    "falcon-7b": (71, 1, 64),
}
"""(q heads, kv heads, head dim) of a model before it is split over devices: ``num_attention_heads``, ``num_key_value_heads``, and
``head_dim``, or ``hidden_size / num_attention_heads``."""
ASKED_BY: dict[str, tuple[str, ...]] = {
    "mistral-7b": ("window 4096",),
    "phi-3-mini": ("window 2047",),
    "gemma-2-9b": ("window 4096", "softcap 50"),
    "gpt-oss-20b": ("window 128", "sinks near 0"),
}
"""Requests of a model's layers: ``sliding_window`` (of Mistral 7B v0.1 and Phi-3-mini-4k), ``attn_logit_softcapping``, sinks."""
COMMON = ("llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b")
"""Models whose shapes the full matrix includes: one of each ratio of heads in wide use."""
