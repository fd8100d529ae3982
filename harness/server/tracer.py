"""Keeping the attention outputs that the model used, for one request under one label, within a byte budget.

Rows that are kept are gathered on the device when a layer has computed them, and written when the pass has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.harness.evidence.trace import TraceLegend, write_pass, write_refusal
from assay.harness.server.passes import EngineCall, Pass, Phase

MOST_ROWS = 32
"""Most rows that are kept of one extend call: the last one always, the others evenly spaced."""


@dataclass(eq=False)
class _Pending:
    """What is kept of the pass that goes on."""

    now: Pass
    phase: Phase
    rows: Tensor
    tokens: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Label:
    """How far the trace of a label is."""

    name: str
    request: str
    passes: int = 0
    pending: _Pending | None = None


class Tracer:
    """One process's traces.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        budget_bytes: what may be kept in all traces together; what goes beyond it is refused whole, never cut.
        rank: this process's place among those that share the heads (tensor parallelism).
        ranks: their number.
    """

    def __init__(self, folder: Path, budget_bytes: int, rank: int = 0, ranks: int = 1) -> None:
        self._folder, self._budget, self._rank, self._ranks = folder, budget_bytes, rank, ranks
        self._labels: dict[str, _Label] = {}
        self._refused: set[str] = set()
        self._label: _Label | None = None
        self._bytes = 0

    def keep(self, label: str, call: EngineCall, used: Tensor) -> None:
        """Keep rows of what the model uses of a call, [tokens, num_q_heads * head_dim_v]."""
        if label in self._refused:
            return
        kept = self._labels.setdefault(label, _Label(label, call.now.requests[0]))
        if call.now.requests != (kept.request,):
            self.refuse(
                label, f"it began with request {kept.request}, and a pass was of {', '.join(call.now.requests)}"
            )
            return
        if kept.pending is None:
            rows = torch.from_numpy(rows_of(call.now.new[0])).to(used.device)
            kept.pending = _Pending(call.now, call.phase, rows, call.batch.input_ids[rows])
        outputs = used[kept.pending.rows].view(len(kept.pending.rows), call.layer.tp_q_head_num, -1)
        if self._bytes + outputs.nbytes > self._budget:
            self.refuse(label, f"all traces together would be larger than {self._budget} bytes in a process")
            return
        self._bytes += outputs.nbytes
        self._label = kept
        kept.pending.outputs[call.layer.layer_id] = outputs

    def refuse(self, label: str, why: str) -> None:
        """Keep nothing under a label from now on, and note why."""
        if label not in self._refused:
            self._refused.add(label)
            self._labels.pop(label, None)
            self._label = None
            write_refusal(self._folder, label, why)

    def write(self) -> None:
        """Write what is kept of the pass that has ended, if anything is."""
        if self._label is None or self._label.pending is None:
            return
        label, pending = self._label, self._label.pending
        self._label, label.pending = None, None
        prefix = pending.now.prefix[0]
        legend = TraceLegend(
            request=label.request, phase=pending.phase, number=label.passes, rank=self._rank, ranks=self._ranks
        )
        outputs = {layer: out.contiguous().cpu() for layer, out in pending.outputs.items()}
        write_pass(self._folder, label.name, pending.tokens.long().cpu(), pending.rows.cpu() + prefix, outputs, legend)
        label.passes += 1


def rows_of(new: int) -> np.ndarray:
    """Which of a sequence's new tokens are kept: at most `MOST_ROWS`, evenly spaced, the last one always; int64."""
    return np.unique(np.linspace(new - 1, 0, min(new, MOST_ROWS)).round().astype(np.int64))
