"""Shapes of attention in well-known models, by name: numbers of heads and head dim, as in each model's ``config.json``."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """A model's attention, before it is split over devices.

    Attributes:
        q_heads: ``num_attention_heads``.
        kv_heads: ``num_key_value_heads``.
        head_dim: ``head_dim``, or ``hidden_size / num_attention_heads``.
    """

    q_heads: int
    kv_heads: int
    head_dim: int


SHAPES: dict[str, HeadShape] = {
    "llama-3-8b": HeadShape(32, 8, 128),
    "llama-3-70b": HeadShape(64, 8, 128),
    "llama-3.2-1b": HeadShape(32, 8, 64),
    "llama-3.2-3b": HeadShape(24, 8, 128),
    "llama-2-7b": HeadShape(32, 32, 128),
    "qwen2.5-0.5b": HeadShape(14, 2, 64),
    "qwen2.5-1.5b": HeadShape(12, 2, 128),
    "qwen2.5-7b": HeadShape(28, 4, 128),
    "qwen2.5-14b": HeadShape(40, 8, 128),
    "qwen2.5-32b": HeadShape(40, 8, 128),
    "qwen2.5-72b": HeadShape(64, 8, 128),
    "qwen3-0.6b": HeadShape(16, 8, 128),
    "qwen3-8b": HeadShape(32, 8, 128),
    "qwen3-30b-a3b": HeadShape(32, 4, 128),
    "mistral-7b": HeadShape(32, 8, 128),
    "mixtral-8x7b": HeadShape(32, 8, 128),
    "gemma-7b": HeadShape(16, 16, 256),
    "phi-2": HeadShape(32, 32, 80),
    "phi-3-mini": HeadShape(32, 32, 96),
    "falcon-7b": HeadShape(71, 1, 64),
}
COMMON = ("llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b")
"""Models whose shapes the full matrix includes: one of each ratio of heads in wide use."""
