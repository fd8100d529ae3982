"""Faults in SGLang and vLLM, seeded as soon as their module is imported. ``two_sides.py`` lays this module over a side's Python.

It imports nothing of an engine or of assay, so that each process of a server can begin with it. With a fault in what surrounds
attention, attention is the right function of wrong inputs, which no comparison of kernels can see.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

LAYER, HEAD = 2, 1
"""Where faults of one layer, or of one head, are in vLLM."""


def attention(module: Any) -> None:
    """Make outputs of prefills 5 % too large."""
    name = "TritonAttnBackend" if module.__name__.endswith("triton_backend") else "TorchNativeAttnBackend"
    backend = getattr(module, name)
    was = backend.forward_extend
    backend.forward_extend = lambda self, *a, **k: was(self, *a, **k) * 1.05


def norm(module: Any) -> None:
    """Give norms an epsilon that is 10,000 times too large."""
    was = module.RMSNorm.__init__
    module.RMSNorm.__init__ = lambda self, size, eps=1e-6, *a, **k: was(self, size, eps * 1e4, *a, **k)


def rope(module: Any) -> None:
    """Give RoPE another base."""
    was = module.RotaryEmbedding._compute_inv_freq
    module.RotaryEmbedding._compute_inv_freq = lambda self, base: was(self, base * 1.5)


def sampler(module: Any) -> None:
    """Raise the logits of every fifth token before one is chosen."""
    was = module.Sampler.forward

    def forward(self: Any, output: Any, *arguments: Any, **named: Any) -> Any:
        output.next_token_logits[:, ::5] += 2
        return was(self, output, *arguments, **named)

    module.Sampler.forward = forward


def _after(owner: Any, name: str, change: Callable[..., None]) -> None:
    """Have a function also call another one, with what it returned and its arguments."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def both(*arguments: Any, **named: Any) -> Any:
        made = plain(*arguments, **named)
        change(made, *arguments, **named)
        return made

    setattr(owner, name, both)


def _of_layer(module: Any, change: Callable[[Any], None]) -> None:
    """Change the implementation of one layer's attention in vLLM, when it is made."""

    def made(_: None, layer: Any, *arguments: Any, **named: Any) -> None:
        if int(layer.layer_name.split(".")[2]) == LAYER:
            change(layer.impl)

    _after(module.Attention, "__init__", made)


def scale(module: Any) -> None:
    """Multiply the softmax scale of one layer by 1.1."""

    def change(impl: Any) -> None:
        impl.scale *= 1.1

    _of_layer(module, change)


def head_lost(module: Any) -> None:
    """Leave one head of one layer unwritten."""

    def change(impl: Any) -> None:
        _after(impl, "forward", lambda *_, output, **named: output[:, HEAD].zero_())

    _of_layer(module, change)


def rope_base(module: Any) -> None:
    """Turn q and k by angles of a base that is 10 % too large."""
    was = module.RotaryEmbeddingBase._compute_inv_freq
    module.RotaryEmbeddingBase._compute_inv_freq = lambda self, base: was(self, base * 1.1)


def _of_table(module: Any, change: Callable[[Any, Any], None]) -> None:
    """Change the block table of every pass before attention, and assay, read it; it is given with the lengths of sequences."""

    def built(metadata: Any, *arguments: Any, **named: Any) -> None:
        metadata.block_table = metadata.block_table.clone()
        change(metadata.block_table, metadata.seq_lens)

    _after(module.CPUAttentionMetadataBuilder, "build", built)


def stale_block_table(module: Any) -> None:
    """Read the last block of each sequence from the place of the one before, as if the table had not been updated."""

    def change(table: Any, lens: Any) -> None:
        for row, length in enumerate(lens.tolist()):
            if (last := (length - 1) // 32) > 0:
                table[row, last] = table[row, last - 1]

    _of_table(module, change)


def kv_of_another_request(module: Any) -> None:
    """Read the first block of each sequence from the next sequence of the batch."""

    def change(table: Any, lens: Any) -> None:
        table[: len(lens), 0] = table[: len(lens), 0].roll(-1)

    _of_table(module, change)


def prefix_of_another_prompt(module: Any) -> None:
    """Take a cached block for that of another prompt if the first half of its tokens is the same."""
    was = module.hash_block_tokens
    module.hash_block_tokens = lambda function, parent, tokens, extra=None: was(
        function, parent, tokens[: len(tokens) // 2], extra
    )


def softcap_dropped(module: Any) -> None:
    """Compute without the cap of scores, as vLLM did for Gemma 2 on a CPU, with a warning (vllm 11169, 7419)."""
    _after(module.Attention, "__init__", lambda _, layer, *a, **k: setattr(layer.impl, "logits_soft_cap", 0))


def window_everywhere(module: Any) -> None:
    """Give layers without a window that of the others, as vLLM did for Gemma 3n (vllm 21863)."""
    was = module.Attention.__init__

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().model_config.hf_text_config
        named["per_layer_sliding_window"] = named.get("per_layer_sliding_window") or config.sliding_window
        was(self, *arguments, **named)

    module.Attention.__init__ = made


_LAYERS, _V1 = "sglang.srt.layers", "vllm.v1"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
FAULTS: dict[str, dict[str, tuple[tuple[str, ...], Callable[[Any], None]]]] = {
    "sglang": {
        "attention": (
            (f"{_LAYERS}.attention.torch_native_backend", f"{_LAYERS}.attention.triton_backend"),
            attention,
        ),
        "norm": ((f"{_LAYERS}.layernorm",), norm),
        "rope": ((f"{_LAYERS}.rotary_embedding.base",), rope),
        "sampler": ((f"{_LAYERS}.sampler",), sampler),
    },
    "vllm": {
        "wrong-scale": ((_ATTENTION,), scale),
        "head-lost": ((_ATTENTION,), head_lost),
        "rope-base": (("vllm.model_executor.layers.rotary_embedding.base",), rope_base),
        "stale-block-table": ((f"{_V1}.attention.backends.cpu_attn",), stale_block_table),
        "kv-of-another-request": ((f"{_V1}.attention.backends.cpu_attn",), kv_of_another_request),
        "softcap-dropped": ((_ATTENTION,), softcap_dropped),
        "window-everywhere": ((_ATTENTION,), window_everywhere),
        "prefix-of-another-prompt": ((f"{_V1}.core.kv_cache_utils",), prefix_of_another_prompt),
    },
}
"""By engine and name, modules (of SGLang 0.5.17 to 0.5.23, vLLM 0.32.0), and the function that changes each of them."""


def seed(engine: str, fault: str) -> None:
    """Seed a fault in this process, once, when the engine is imported: Python may read the line that calls this more than once."""
    if any(finder.__module__ == __name__ for finder in sys.meta_path):
        return
    modules, change = FAULTS[engine][fault]

    class Finder:
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name not in modules:
                return None
            others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
            spec = next(filter(None, others), None)
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (run(module), change(module))  # type: ignore[method-assign, assignment, func-returns-value]
            return spec

    sys.meta_path.insert(0, Finder)
