"""What assay adds to each worker of a vLLM server (``--worker-extension-cls``): exact scores, kept weights, and its fingerprint.

Importing this module in a worker repairs vLLM before the model is loaded:

- Prompt log-probabilities are kept in float32 in a file of the server's folder (`SCORES`): JSON would have all positions, and -9999
  for NaN. Rows that came from the prefix cache are uninitialised memory in vLLM, which ends the server; here they are zeros.
- On a CPU, linear weights are repacked for oneDNN and the originals emptied, so that no digest could tell two models apart. Here
  the originals stay.
- An idle worker sleeps, as SGLang's scheduler does with ``--sleep-on-idle``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from assay.harness.engines.inside.control import EVIDENCE

SCORES = "scores"
"""Folder of the scores, a file for each request id."""
SCORED = "assay_scored"
"""Key of a request's ``extra_args``: [first position, number of most probable tokens, further ids ...]."""


# Seconds that a worker polls for its next call: longer than a scheduler takes between two passes.
_POLLS_S = 0.01


class Extension:
    """Methods of every worker, called by name over ``/collective_rpc``."""

    model_runner: Any

    def assay_fingerprint(self, label: str) -> str:
        """Write the fingerprint of this process, and return the name of its engine."""
        from assay.harness.engines.vllm.fingerprint import write

        return write(self.model_runner, label)


def repair() -> None:
    """Install the repairs, once in a process."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "_assay_repaired"):
        return
    GPUModelRunner._assay_repaired = True
    empty, prompt_logprobs = LogprobsTensors.empty_cpu, GPUModelRunner._get_prompt_logprobs_dict

    def zeros(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        for tensor in (made.logprob_token_ids, made.logprobs, made.selected_token_ranks):
            tensor.zero_()
        return made

    def kept(runner: Any, hidden_states: Any, scheduled: dict[str, int]) -> Any:
        asked = {name: runner.requests[name] for name in runner.num_prompt_logprobs if name in scheduled}
        scores = {name: _Scores.of(name, request) for name, request in asked.items()}
        # vLLM gathers in this order, for each request with a position whose next token is one of its prompt.
        gathered = iter(
            [scores[name] for name, of in asked.items() if of.num_computed_tokens + 1 < len(of.prompt_token_ids)]
        )
        gather = runner.sampler.gather_logprobs

        def watched(logprobs: torch.Tensor, count: int, tokens: torch.Tensor) -> Any:
            if (own := next(gathered)) is not None:
                own.keep(logprobs, tokens)
            return gather(logprobs, count, tokens)

        runner.sampler.gather_logprobs = watched
        try:
            made = prompt_logprobs(runner, hidden_states, scheduled)
        finally:
            del runner.sampler.gather_logprobs
        for name, own in scores.items():
            if own is not None and name in made:
                own.write()
        return made

    _sleep_when_idle()
    LogprobsTensors.empty_cpu = staticmethod(zeros)
    GPUModelRunner._get_prompt_logprobs_dict = kept
    _keep_weights()


def _sleep_when_idle() -> None:
    """Let a worker wait for a notice soon after its last request, instead of polling for a second.

    A bench plays blocks on two servers in turn: one that polls takes a core from the other's API server and scheduler.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is not None and condition.__init__.__defaults__ == (1,):
        condition.__init__.__defaults__ = (_POLLS_S,)


def _keep_weights() -> None:
    from vllm.model_executor.layers import utils

    pack = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if pack is not None:
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight=True: pack(layer, remove_weight=False)


class _Scores:
    """The log-probabilities of one request, chunk by chunk."""

    _open: ClassVar[dict[str, _Scores]] = {}

    def __init__(self, name: str, start: int, top_k: int, at: list[int]) -> None:
        self._name, self._start, self._top_k, self._at = name, start, top_k, at
        self._first, self._rows = 0, list[dict[str, Any]]()

    @classmethod
    def of(cls, name: str, request: Any) -> _Scores | None:
        """Return the scores of a request in a pass, or None for one that asks for none."""
        asked = (request.sampling_params.extra_args or {}).get(SCORED) if request.sampling_params else None
        if asked is None:
            return None
        start, top_k, *at = map(int, asked)
        scores = cls._open.setdefault(name, cls(name, start, top_k, at))
        scores._first = request.num_computed_tokens
        return scores

    def keep(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep what a pass computed: log-probabilities [positions, vocabulary], and the tokens that follow."""
        skipped = max(self._start - self._first, 0)
        if len(rows := logprobs[skipped:].float()):
            top, ids = torch.topk(rows, self._top_k, dim=-1)
            self._rows.append({
                "first": self._first + skipped, "ids": tokens[skipped:], "token": rows.gather(-1, tokens[skipped:, None])[:, 0],
                "top_ids": ids, "top": top, "at": rows[:, self._at],
            })  # fmt: skip

    def write(self) -> None:
        """Write the scores of a request whose prompt is complete; the first rank does."""
        self._open.pop(self._name, None)
        if not self._rows or (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            return
        arrays = {
            name: torch.cat([row[name] for row in self._rows]).cpu().numpy()
            for name in ("ids", "token", "top_ids", "top", "at")
        }
        folder = Path(os.environ[EVIDENCE]) / SCORES
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{self._name}.npz"
        arrays["first"] = np.array(self._rows[0]["first"])
        np.savez(made, **arrays)  # type: ignore[arg-type]
        made.rename(folder / f"{self._name}.npz")


if os.environ.get(EVIDENCE):
    repair()
