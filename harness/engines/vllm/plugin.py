"""The vLLM plugin, loaded in every process before vLLM resolves its arguments (entry-point group ``vllm.general_plugins``).

It does nothing in a server that assay did not start (no ``ASSAY_EVIDENCE``). In a worker of one that it did start, all attention
layers are metered once the model is loaded, and attached to as the environment requests. vLLM only logs a plugin that fails, and
serves without it: what was counted shows that it ran.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from assay.harness.engines.inside.control import API_KEY, EVIDENCE

# vLLM's own variable for the key that clients must send.
_VLLM_API_KEY = "VLLM_API_KEY"


def register() -> None:
    """Register the hooks: the entry point of the plugin group. vLLM calls it several times in some processes."""
    if key := os.environ.get(API_KEY):
        os.environ.setdefault(_VLLM_API_KEY, key)
    if folder := os.environ.get(EVIDENCE):
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        observe_workers(WorkerWrapperBase, Path(folder))


def observe_workers(wrapper: Any, folder: Path) -> None:
    """Make a class of worker wrappers observe the attention of each worker's model, once it is loaded. Idempotent.

    Args:
        wrapper: vLLM's class, whose ``init_device`` makes ``worker.model_runner``, the later ``load_model`` of the worker its
            attention layers. The classes of workers and runners differ by platform; this class is common to all.
        folder: the server's folder (``ASSAY_EVIDENCE``).
    """
    init_device = wrapper.init_device
    if getattr(init_device, "assay_observed", False):
        return

    @functools.wraps(init_device)
    def observed(self: Any) -> None:
        init_device(self)
        worker, load_model = self.worker, self.worker.load_model

        def loaded(*args: Any, **kwargs: Any) -> Any:
            from assay.harness.engines.vllm.attach import observe_runner

            result = load_model(*args, **kwargs)
            observe_runner(worker.model_runner, folder)
            return result

        worker.load_model = loaded

    observed.__dict__["assay_observed"] = True
    wrapper.init_device = observed
