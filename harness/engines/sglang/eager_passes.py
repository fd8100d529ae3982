"""Keeps SGLang from replaying CUDA graphs while something observes its passes: a replay runs no Python, so nothing of it is seen.

SGLang asks its graph runner before each pass whether a graph can serve the batch, and runs the pass eagerly if not. (The same in
0.5.17 and 0.5.23; a version without these runners replays as before, and the report says that nothing was seen.)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

RUNNERS = (
    ("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    ("sglang.srt.model_executor.runner.prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
)
"""SGLang's graph runners: module and class."""


def run_eagerly_while(observed: Callable[[], bool]) -> None:
    """Run passes eagerly while they are observed.

    Args:
        observed: whether the next pass is. It is asked before every pass that a graph could serve.
    """
    for module, name in RUNNERS:
        try:
            runner = getattr(importlib.import_module(module), name)
            refuse_while(runner, observed)
        except (ImportError, AttributeError):
            continue


def refuse_while(runner: type, observed: Callable[[], bool]) -> None:
    """Make a class of graph runners refuse every batch while its pass is observed.

    Raises:
        AttributeError: the class asks in another way.
    """
    can_run = runner.can_run_graph  # type: ignore[attr-defined]

    @functools.wraps(can_run)
    def can_run_graph(self: Any, forward_batch: Any) -> Any:
        return False if observed() else can_run(self, forward_batch)

    runner.can_run_graph = can_run_graph  # type: ignore[attr-defined]
