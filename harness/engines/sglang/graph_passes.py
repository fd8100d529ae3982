"""Passes that SGLang serves by CUDA graphs: which of them can be observed, how, and whose requests they serve.

SGLang asks its graph runner before each pass whether a graph can serve the batch, and runs the pass eagerly if not. Two kinds of
graphs can be observed as they serve:

- A *breakable* graph of prefill, or of decode with ``--debug-cuda-graph``, calls attention from Python. Attention is then given
  SGLang's static batch, without the ids of the requests and, in decode, padded.
- A graph of decode runs no Python when it is replayed, so what attention is given and what it returns are copied into static
  buffers, a copy that the graph holds as well, and are read after the replay. Any other pass is run eagerly while it is observed,
  and so is one whose outputs are to be replaced.

It is the same in 0.5.17 and 0.5.23. A version without these runners replays as before, and the report says that nothing was seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.harness.engines.inside.control import Control

_RUNNERS = "sglang.srt.model_executor.runner"
# SGLang's graph runners: module and class.
RUNNERS = (
    (f"{_RUNNERS}.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    (f"{_RUNNERS}.prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
)
_BREAKABLE = "BreakableCudaGraphBackend"

# Takes a batch of requests and the tensors of a call, by name, without the rows of padding.
_Observe = Callable[[Any, Mapping[str, Tensor]], None]

# Counts a pass that a graph served: its phase, "prefill" or "decode", and its requests.
_Count = Callable[[str, int], None]


class Replays:
    """The attention calls of decode graphs, in buffers on the device that every replay fills.

    The graphs of all batch sizes share the buffers of a layer. SGLang captures the largest first. With ``enable_torch_compile``
    among SGLang's arguments, some graphs are captured from compiled code, which fills no buffer.
    """

    def __init__(self, arguments: Any) -> None:
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._calls: dict[int, _Observe] = {}
        self._whole = not getattr(arguments, "enable_torch_compile", False)

    @property
    def readable(self) -> bool:
        """True if the calls of every graph that was captured can be read after a replay."""
        return self._whole and bool(self._calls)

    def keep(self, layer: int, tensors: Mapping[str, Any]) -> None:
        """Copy tensors of a layer's call, [rows, ...], into its buffers: in the pass that is being captured, and in replays."""
        buffers = self._buffers.setdefault(layer, {})
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or (name in buffers and len(buffers[name]) < len(tensor)):
                self._whole = False  # a smaller graph goes on to fill the buffer that it was captured with
                continue
            if name not in buffers:
                buffers[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            buffers[name][: len(tensor)].copy_(tensor)

    def observed_by(self, layer: int, observe: _Observe) -> None:
        """Have a function take the calls of a layer after each replay."""
        self._calls[layer] = observe

    def observe(self, batch: Any) -> None:
        """Give the calls of the graph that served a batch last to their functions, in the order of the layers."""
        rows = len(batch.input_ids)
        for layer, observe in self._calls.items():
            # Cloned, for the next replay fills the buffers again.
            observe(batch, {name: kept[:rows].clone() for name, kept in self._buffers[layer].items()})


@dataclass(frozen=True, eq=False)
class GraphObserver:
    """An observer of the passes of a process.

    Attributes:
        control: returns what applies to the next pass.
        replays: the calls of decode graphs.
    """

    control: Callable[[], Control]
    replays: Replays

    def refuses(self, runner: Any) -> bool:
        """Return True if the next pass must not be served by a runner's graph."""
        control = self.control()
        if not control.observes or _calls_attention(runner):
            return False
        return control.replaces or not (_is_of_decode(runner) and self.replays.readable)

    def replayed(self, runner: Any, batch: Any) -> None:
        """Observe a batch that a runner's graph has served, unless attention was called from Python."""
        control = self.control()
        if control.observes and not (control.replaces or _calls_attention(runner)) and _is_of_decode(runner):
            self.replays.observe(batch)


# The batches that graph runners serve now, the innermost last.
_serving: list[Any] = []
_observers: list[GraphObserver] = []
_counts: list[_Count] = []


def served_batch(given: Any) -> Any:
    """Return the batch of requests that a pass serves, for the batch that attention was given: the static one in a graph."""
    return _serving[-1] if _serving else given


def observe_graphs(observer: GraphObserver | None = None, count: _Count | None = None) -> None:
    """Keep the batches that graphs serve, give an observer what it wants to see of them, and count those of no draft."""
    if count is not None and count not in _counts:
        _counts.append(count)
    if observer is not None:
        _observers.append(observer)
    for module, name in RUNNERS:
        try:
            _watch_runner(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue


def _watch_runner(runner: type) -> None:
    """Make a class of graph runners note the batch that it serves, while it does, and heed the observers.

    Raises:
        AttributeError: the class serves in another way.
    """
    execute, can_run = runner.execute, runner.can_run_graph  # type: ignore[attr-defined]
    if hasattr(execute, "assay_watched"):
        return

    @functools.wraps(execute)
    def watched(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        _serving.append(forward_batch)
        try:
            out = execute(self, forward_batch, *args, **kwargs)
        finally:
            _serving.pop()
        for observer in _observers:
            observer.replayed(self, forward_batch)
        if not _is_of_draft(self):
            for count in _counts:
                count("decode" if type(self).__name__.startswith("Decode") else "prefill", forward_batch.batch_size)
        return out

    @functools.wraps(can_run)
    def can_run_graph(self: Any, forward_batch: Any) -> Any:
        return not any(observer.refuses(self) for observer in _observers) and can_run(self, forward_batch)

    watched.__dict__["assay_watched"] = True
    runner.execute, runner.can_run_graph = watched, can_run_graph  # type: ignore[attr-defined]


def _is_of_decode(runner: Any) -> bool:
    """Return True if a runner's graphs are of decode, and not of a draft model."""
    return type(runner).__name__.startswith("Decode") and not _is_of_draft(runner)


def _is_of_draft(runner: Any) -> bool:
    return bool(getattr(getattr(runner, "model_runner", None), "is_draft_worker", False))


def _calls_attention(runner: Any) -> bool:
    """Return True if a replay of a runner's graphs calls attention from Python."""
    backend = getattr(runner, "backend", None)
    if type(backend).__name__ != _BREAKABLE:
        return False
    return not _is_of_decode(runner) or bool(getattr(backend, "_debug_eager", False))


def graphs_of(arguments: Any) -> dict[str, str]:
    """Return how SGLang captures each phase, as `EngineLimits.graphs`; empty for a version whose arguments do not say."""
    config = getattr(arguments, "cuda_graph_config", None)
    if config is None:
        return {}
    if getattr(arguments, "disable_cuda_graph", False):
        return dict.fromkeys(("extend", "decode"), "disabled")
    return {"extend": str(config.prefill.backend), "decode": str(config.decode.backend)}
