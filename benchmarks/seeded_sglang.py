"""Faults in SGLang, seeded as soon as its module is imported. ``two_sides.py`` lays this module over a side's Python.

It imports nothing of SGLang or of assay, so that each process of a server can begin with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any


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


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "attention": ("attention.torch_native_backend attention.triton_backend", attention),
    "norm": ("layernorm", norm),
    "rope": ("rotary_embedding.base", rope),
    "sampler": ("sampler", sampler),
}
"""By name, the modules below ``sglang.srt.layers`` (of 0.5.17 to 0.5.23), and the function that changes each."""


def seed(fault: str) -> None:
    """Seed a fault in this process, once, when SGLang is imported: Python may read the line that calls this more than once."""
    if any(finder.__module__ == __name__ for finder in sys.meta_path):
        return
    modules, change = FAULTS[fault]

    class Finder:
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name.removeprefix("sglang.srt.layers.") not in modules.split():
                return None
            others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
            spec = next(filter(None, others), None)
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (run(module), change(module))  # type: ignore[method-assign, assignment, func-returns-value]
            return spec

    sys.meta_path.insert(0, Finder)
