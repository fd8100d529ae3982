"""Features of a vLLM server that should not affect outputs (`assay.harness.engines.features`), on a CPU and on a GPU.

The base is the plainest server that assay starts: eager, with the scheduler waiting for each pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from assay.evals.probes import CHUNK
from assay.harness.engines.features import Feature, batched, cached, chunked, continued, reordered
from assay.harness.sides import Device

DERIVED = ("arguments.compilation_config",)
"""Differences between servers that follow from features: sizes to compile or capture depend on the most tokens of a pass."""
# Tokens of a block, twice those of assay's base on a CPU, whose blocks are multiples of 32.
_BLOCK = 64
# Operations that compiled code takes from vLLM's definitions in PyTorch, instead of its own kernels: the compiler fuses them.
_FUSED = tuple(f"backends.{name}" for name in ("RMSNorm", "RotaryEmbedding", "ApplyRotaryEmb", "SiluAndMul"))


def _features(device: Device) -> Iterable[Feature]:
    chunk = CHUNK[device]
    yield Feature(
        "prefix-cache", "the prefix of a prompt comes from the cache", seen=cached, excludes=("no-prefix-cache",)
    )
    yield Feature("batch", "requests of all lengths are sent at once", seen=batched)
    yield Feature("order", "requests arrive in another order", seen=reordered)
    yield Feature(
        "conversation",
        "the end of a prefix was generated in an earlier turn",
        seen=continued,
        requires=("prefix-cache",),
    )
    yield Feature(
        "chunked-prefill", f"passes have at most {chunk} tokens, so that prompts are prefilled in chunks",
        on=(f"--max-num-batched-tokens={chunk}",), resolved={"scheduler_config.max_num_batched_tokens": chunk}, seen=chunked,
    )  # fmt: skip
    yield Feature(
        "block-size",
        f"blocks of {_BLOCK} tokens",
        on=(f"--block-size={_BLOCK}",),
        resolved={"cache_config.block_size": _BLOCK},
    )
    yield Feature(
        "no-prefix-cache", "no prefix cache", on=("--no-enable-prefix-caching",),
        resolved={"cache_config.enable_prefix_caching": False},
    )  # fmt: skip
    yield Feature(
        "async-scheduling", "the scheduler overlaps with the model", on=("--async-scheduling",), off=("--no-async-scheduling",),
        resolved={"scheduler_config.async_scheduling": True}, devices=("cuda",), lacks="vLLM switches it off there",
    )  # fmt: skip
    yield Feature(
        "compiled", "the model is compiled", on=("--no-enforce-eager",), environment={"TORCH_COMPILE_DISABLE": "0"},
        resolved={"model_config.enforce_eager": False}, cost="another kernel", declares=("arguments.kernel_config", *_FUSED),
    )  # fmt: skip


def features_of(device: Device) -> dict[str, Feature]:
    """Return all features by id, in the order in which they are listed."""
    return {feature.id: feature for feature in _features(device)}


def with_models(flags: tuple[str, ...], model: Path, folder: Path) -> tuple[str, ...]:
    """Return the flags: no feature needs another model."""
    return flags
