"""Forced decode: a server writes prescribed tokens, one by one, each in a separate decode pass.

A request brings its tokens in its ``extra_args``, under `FORCED_TOKENS`. The model's own choice is still computed and its
log-probabilities are returned as ever (``--logprobs-mode raw_logprobs``); only the token that goes into the next pass is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from assay.harness.engines.inside.control import FORCED_TOKENS


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Replaces the logits of requests that bring their tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        # By row of the batch: the prescribed tokens, and vLLM's own list of the answer so far, which grows.
        self._rows: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that leave the batch, come into it, or move in it."""
        for row in batch_update.removed if batch_update else ():
            self._rows.pop(row, None)
        for row, params, _, answer in batch_update.added if batch_update else ():
            self._rows.pop(row, None)
            if ids := (params.extra_args or {}).get(FORCED_TOKENS):
                self._rows[row] = ids, answer
        for left, right, how in batch_update.moved if batch_update else ():
            a, b = self._rows.pop(left, None), self._rows.pop(right, None)
            if a is not None:
                self._rows[right] = a
            if b is not None and how == MoveDirectionality.SWAP:
                self._rows[left] = b

    def apply(self, logits: Any) -> Any:
        """Leave the prescribed token alone in each row that has one."""
        for row, (ids, answer) in self._rows.items():
            if len(answer) < len(ids):
                logits[row] = -float("inf")
                logits[row, int(ids[len(answer)])] = 0
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return False: the greedy token changes."""
        return False
