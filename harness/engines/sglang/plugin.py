"""The SGLang plugin, loaded in every process before SGLang parses its arguments (entry-point group ``sglang.srt.plugins``).

It registers every published kernel as an attention backend, and meters every attention backend, including SGLang's own: it counts
calls by kernel, phase and layer, records each prefill batch, and lists the kernels of a pass on request, so that a report can prove
what ran.

In a server that assay did not start (no ``ASSAY_EVIDENCE``) the kernels can be served too, but nothing is counted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from assay.harness.attention import kernels
from assay.harness.engines.inside.control import (
    API_KEY,
    DELEGATE,
    EVIDENCE,
    FAULTS,
    FORCED,
    KERNEL,
    RECORD,
    SHADOW,
    TRACE,
)
from assay.harness.engines.sglang import forcing


def register() -> None:
    """Register the hooks: the entry point of the plugin group."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    names = set(kernels.published())
    if extra := os.environ.get(KERNEL):
        names.add(extra)
    for name in sorted(names - set(ATTENTION_BACKENDS)):
        ATTENTION_BACKENDS[name] = _factory(name)
    _add_choices(sorted(names))
    _judge_by_delegate(names, os.environ.get(DELEGATE, ""))
    _ask_for_key()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _interpret()
    if "--enable-lora" in sys.argv:
        _pin_nothing()
    if folder := os.environ.get(EVIDENCE):
        if os.environ.get(FORCED):
            forcing.install(Path(folder))
        _wrap_all(ATTENTION_BACKENDS, functools.partial(_metered, Path(folder)))
        if any(os.environ.get(name) for name in (SHADOW, RECORD, TRACE, FAULTS)):
            _wrap_all(ATTENTION_BACKENDS, functools.partial(_attached, Path(folder)))


def _ask_for_key() -> None:
    """Give the server its key as if by a flag: everyone on the machine can read a command line, but not an environment."""
    key = os.environ.get(API_KEY)
    if key and "--api-key" not in sys.argv:
        sys.argv += ["--api-key", key]


def _interpret() -> None:
    """Have Triton's interpreter compute as a GPU does, and in a third of the time. K and V may be stored in FP8 for it.

    SGLang refuses that where Intel's AMX is missing, since the CPU's own kernels need it.
    """
    from assay.harness.attention.interpreter import interpret_without_gpu

    interpret_without_gpu()
    if not any("fp8_e4m3" in word for word in sys.argv):
        return
    try:
        from sglang.srt.mem_cache import kv_cache_configurator
    except ImportError:  # before 0.5.18 nothing was refused
        return
    platform = kv_cache_configurator.current_platform

    class NotCPU:
        def __getattr__(self, name: str) -> Any:
            return (lambda: False) if name == "is_cpu" else getattr(platform, name)

    kv_cache_configurator.current_platform = NotCPU()


def _pin_nothing() -> None:
    """Let SGLang apply adapters without a GPU: it pins memory that is copied to one, which PyTorch refuses there."""
    import torch

    if torch.cuda.is_available():
        return

    def unpinned(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010 (a type checker wants a method)


def _factory(name: str) -> Any:
    def create(runner: Any) -> Any:
        from assay.harness.engines.sglang.served_kernel import serve_kernel

        return serve_kernel(name, kernels.load(name), runner, os.environ.get(DELEGATE, ""))

    return create


def _add_choices(names: list[str]) -> None:
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as CHOICES
    except ImportError:  # before 0.5.18 the list lived with the server arguments
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES as CHOICES
    CHOICES.extend(name for name in names if name not in CHOICES)


def _judge_by_delegate(names: Collection[str], delegate: str) -> None:
    """Make models that refuse attention backends by name (gpt-oss, Gemma 4) judge a kernel by the backend that it delegates to.

    They know the names of backends that support their layers. A kernel declares its features, and does not get calls that ask
    for more.
    """

    def judged(backends: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(delegate if delegate and name in names else name for name in backends)

    try:
        from sglang.srt.arg_groups import model_hook
    except ImportError:  # before 0.5.18 it was a method of the server arguments
        from sglang.srt.server_args import ServerArgs

        adjust = ServerArgs._handle_model_specific_adjustments

        def adjusted(self: Any) -> Any:
            resolved = self._resolved_attention_backends
            self._resolved_attention_backends = lambda: judged(resolved())
            try:
                return adjust(self)
            finally:
                del self._resolved_attention_backends

        ServerArgs._handle_model_specific_adjustments = adjusted
    else:
        asked = model_hook.attention_backends_of
        model_hook.attention_backends_of = lambda arguments: judged(asked(arguments))


def _wrap_all(backends: dict[str, Any], wrap: Callable[[Any, str, Any], Any]) -> None:
    """Wrap every backend's factory so that everything it builds is wrapped, except what a candidate builds."""

    def wrapped(name: str, create: Any) -> Any:
        def build(runner: Any) -> Any:
            return wrap(create(runner), name, runner)

        build.__dict__["assay_unmetered"] = getattr(create, "assay_unmetered", create)
        return build

    for name, create in list(backends.items()):
        backends[name] = wrapped(name, create)


def _metered(folder: Path, backend: Any, name: str, runner: Any) -> Any:
    from assay.harness.engines.sglang.kv_pool import number_layers
    from assay.harness.engines.sglang.meter import meter, watch

    if getattr(runner, "is_draft_worker", False):
        return backend  # its calls say nothing about what the model computes
    number_layers(runner.model)
    watch(runner, name, backend, folder)
    return meter(backend, name, folder, str(runner.device))


def _attached(folder: Path, backend: Any, name: str, runner: Any) -> Any:
    from assay.harness.engines.sglang.attach import attach

    return attach(backend, name, runner, folder)
