"""Passes that SGLang serves by CUDA graphs: which of them can be observed, and whose requests they serve.

A replay of a full graph runs no Python, so nothing of it is seen. SGLang asks its graph runner before each pass whether a graph can
serve the batch, and runs the pass eagerly if not. A *breakable* graph calls attention from Python: that of prefill always does,
that of decode with ``--debug-cuda-graph``. Attention is then given SGLang's static batch, without the ids of the requests and, in
decode, padded.

It is the same in 0.5.17 and 0.5.23. A version without these runners replays as before, and the report says that nothing was seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_RUNNERS = "sglang.srt.model_executor.runner"
RUNNERS = (
    (f"{_RUNNERS}.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    (f"{_RUNNERS}.prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
)
"""SGLang's graph runners: module and class."""
_BREAKABLE = "BreakableCudaGraphBackend"
_serving: list[Any] = []
"""The batches that graph runners serve now, the innermost last."""


def served_batch(given: Any) -> Any:
    """Return the batch of requests that a pass serves, for the batch that attention was given: the static one in a graph."""
    return _serving[-1] if _serving else given


def observe_graphs(observed: Callable[[], bool] = lambda: False) -> None:
    """Keep the batches that graphs serve, and run passes eagerly while they are observed and a graph would hide them.

    Args:
        observed: whether the next pass is. It is asked before every pass that a graph could serve.
    """
    for module, name in RUNNERS:
        try:
            runner = getattr(importlib.import_module(module), name)
            keep_served(runner)
            refuse_while(runner, observed)
        except (ImportError, AttributeError):
            continue


def keep_served(runner: type) -> None:
    """Make a class of graph runners note the batch that it serves, while it does.

    Raises:
        AttributeError: the class serves in another way.
    """
    execute = runner.execute  # type: ignore[attr-defined]
    if hasattr(execute, "assay_kept"):
        return

    @functools.wraps(execute)
    def kept(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        _serving.append(forward_batch)
        try:
            return execute(self, forward_batch, *args, **kwargs)
        finally:
            _serving.pop()

    kept.__dict__["assay_kept"] = True
    runner.execute = kept  # type: ignore[attr-defined]


def refuse_while(runner: type, observed: Callable[[], bool]) -> None:
    """Make a class of graph runners refuse every batch while its pass is observed and would be hidden.

    Raises:
        AttributeError: the class asks in another way.
    """
    can_run = runner.can_run_graph  # type: ignore[attr-defined]

    @functools.wraps(can_run)
    def can_run_graph(self: Any, forward_batch: Any) -> Any:
        return False if observed() and not _calls_attention(self) else can_run(self, forward_batch)

    runner.can_run_graph = can_run_graph  # type: ignore[attr-defined]


def _calls_attention(runner: Any) -> bool:
    """Return True if a replay of a runner's graphs calls attention from Python."""
    backend = getattr(runner, "backend", None)
    if type(backend).__name__ != _BREAKABLE:
        return False
    return type(runner).__name__.startswith("Prefill") or bool(getattr(backend, "_debug_eager", False))


def graphs_of(arguments: Any) -> dict[str, str]:
    """Return how SGLang captures each phase, as `EngineLimits.graphs`; empty for a version that does not say.

    Args:
        arguments: SGLang's resolved server arguments.
    """
    config = getattr(arguments, "cuda_graph_config", None)
    if config is None:
        return {}
    if getattr(arguments, "disable_cuda_graph", False):
        return dict.fromkeys(("extend", "decode"), "disabled")
    return {"extend": str(config.prefill.backend), "decode": str(config.decode.backend)}
