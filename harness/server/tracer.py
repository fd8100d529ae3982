"""Keeps the attention outputs that the model used, for one request under one label, within a byte budget.

Kept rows are gathered on the device after each layer and written when the pass has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.harness.evidence.nonce import nonce_of_process
from assay.harness.evidence.trace import TraceHeader, write_pass, write_refusal
from assay.harness.server.observed_call import ForwardPass, ObservedCall, Phase

MAX_ROWS = 32
"""Most rows kept per extend call: the last row, and others evenly spaced."""


@dataclass(eq=False)
class _Pending:
    """The part of the current pass that is kept."""

    forward_pass: ForwardPass
    phase: Phase
    rows: Tensor
    tokens: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Label:
    """The state of one trace."""

    name: str
    request: str
    passes: int = 0
    pending: _Pending | None = None


class Tracer:
    """One process's traces.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        budget_bytes: byte budget of all traces together. A trace that exceeds it is refused, never cut.
        rank: rank of this process among those that share the heads (tensor parallelism).
        ranks: number of those processes.
    """

    def __init__(self, folder: Path, budget_bytes: int, rank: int = 0, ranks: int = 1) -> None:
        self._folder, self._budget, self._rank, self._ranks = folder, budget_bytes, rank, ranks
        self._labels: dict[str, _Label] = {}
        self._refused: set[str] = set()
        self._label: _Label | None = None
        self._bytes = 0

    def keep(self, label: str, call: ObservedCall, used: Tensor) -> None:
        """Keep rows of the output that the model uses, [tokens, num_q_heads * head_dim_v]."""
        if label in self._refused:
            return
        kept = self._labels.setdefault(label, _Label(label, call.forward_pass.requests[0]))
        if call.forward_pass.requests != (kept.request,):
            self.refuse(
                label, f"it started with request {kept.request}, but a pass has {', '.join(call.forward_pass.requests)}"
            )
            return
        if kept.pending is None:
            rows = torch.from_numpy(rows_of(call.forward_pass.new[0])).to(used.device)
            kept.pending = _Pending(call.forward_pass, call.phase, rows, call.forward_pass.tokens[rows])
        outputs = used[kept.pending.rows].view(len(kept.pending.rows), call.heads, -1)
        if self._bytes + outputs.nbytes > self._budget:
            self.refuse(label, f"the traces of a process would exceed {self._budget} bytes")
            return
        self._bytes += outputs.nbytes
        self._label = kept
        kept.pending.outputs[call.layer] = outputs

    def refuse(self, label: str, why: str) -> None:
        """Refuse a trace: keep nothing under its label from now on, and note why."""
        if label not in self._refused:
            self._refused.add(label)
            self._labels.pop(label, None)
            self._label = None
            write_refusal(self._folder, label, why)

    def write(self) -> None:
        """Write what was kept of the pass that has ended, if anything."""
        if self._label is None or self._label.pending is None:
            return
        label, pending = self._label, self._label.pending
        self._label, label.pending = None, None
        prefix = pending.forward_pass.prefix[0]
        header = TraceHeader(
            run=nonce_of_process(),
            request=label.request,
            phase=pending.phase,
            number=label.passes,
            rank=self._rank,
            ranks=self._ranks,
        )
        outputs = {layer: out.contiguous().cpu() for layer, out in pending.outputs.items()}
        write_pass(self._folder, label.name, pending.tokens.long().cpu(), pending.rows.cpu() + prefix, outputs, header)
        label.passes += 1


def rows_of(new: int) -> np.ndarray:
    """Choose which of a sequence's new tokens to keep: at most `MAX_ROWS`, evenly spaced, always including the last; int64."""
    return np.unique(np.linspace(new - 1, 0, min(new, MAX_ROWS)).round().astype(np.int64))
