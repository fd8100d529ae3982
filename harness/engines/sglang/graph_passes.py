"""Passes that SGLang serves by CUDA graphs: whose requests they serve, and how to keep them from hiding observations.

SGLang asks its graph runner before each pass whether a graph can serve the batch, and runs the pass eagerly if not. A replayed
decode graph runs no Python, so an observed pass must run eagerly, as must one whose outputs are replaced. A *breakable* graph of
prefill calls attention from Python with SGLang's static batch, without the ids of the requests.

This is the same in 0.5.17 and 0.5.23. A version without these runners replays as before, and the report says that nothing was seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_RUNNERS = "sglang.srt.model_executor.runner"
# SGLang's graph runners: module and class.
RUNNERS = (
    (f"{_RUNNERS}.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    (f"{_RUNNERS}.prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
)

# Counts a pass that a graph served: its phase, "prefill" or "decode", and its requests.
_Count = Callable[[str, int], None]
# The batches that graph runners are serving, the innermost last.
_serving: list[Any] = []
# Functions that return True if the next pass is observed.
_observers: list[Callable[[], bool]] = []
_counts: list[_Count] = []


def served_batch(given: Any) -> Any:
    """Return the batch of requests that a pass serves, for the batch that attention was given: the static one in a graph."""
    return _serving[-1] if _serving else given


def watch_graphs(observed: Callable[[], bool] | None = None, count: _Count | None = None) -> None:
    """Keep the batches that graphs serve, keep observed passes out of graphs, and count passes without drafts."""
    if count is not None and count not in _counts:
        _counts.append(count)
    if observed is not None:
        _observers.append(observed)
    for module, name in RUNNERS:
        try:
            _watch_runner(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue


def _watch_runner(runner: type) -> None:
    """Make a class of graph runners record the batch that it is serving, and refuse observed batches.

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
        if not getattr(getattr(self, "model_runner", None), "is_draft_worker", False):
            for count in _counts:
                count("decode" if type(self).__name__.startswith("Decode") else "prefill", forward_batch.batch_size)
        return out

    @functools.wraps(can_run)
    def can_run_graph(self: Any, forward_batch: Any) -> Any:
        return not any(observed() for observed in _observers) and can_run(self, forward_batch)

    watched.__dict__["assay_watched"] = True
    runner.execute, runner.can_run_graph = watched, can_run_graph  # type: ignore[attr-defined]


def graphs_of(arguments: Any) -> dict[str, str]:
    """Return how SGLang captures each phase, as `EngineLimits.graphs`, or nothing for a version whose arguments do not say."""
    config = getattr(arguments, "cuda_graph_config", None)
    if config is None:
        return {}
    if getattr(arguments, "disable_cuda_graph", False):
        return dict.fromkeys(("extend", "decode"), "disabled")
    return {"extend": str(config.prefill.backend), "decode": str(config.decode.backend)}
