"""Keeps the attention outputs that the model used, for one request under one label, within a byte budget.

Kept rows are gathered on the device after each layer and written when the pass has ended. Of a request that the control names, in
any batch, every row up to a position is kept with its q, K and V, as well as K and V of the whole sequence as the last of these
rows reads them, and what the whole layer returns for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.engines.inside.control import TracedRequest
from assay.harness.engines.inside.observed_call import ForwardPass, ObservedCall, Phase
from assay.harness.evidence.run_file import nonce_of_process
from assay.harness.evidence.trace import LAYER_OUTPUT, NEW, OUTPUT, QUERY, READ, TraceHeader, write_pass, write_refusal

MAX_ROWS = 32
"""Most rows kept per extend call: the last row, and others evenly spaced."""
# The path of a numbered layer, in the path of a module inside of it.
_LAYER = re.compile(r".*\.(\d+)(?=\.)")


def decoder_layers(model: torch.nn.Module, attention: Callable[[torch.nn.Module], bool]) -> dict[int, torch.nn.Module]:
    """Find the decoder layers of a model: the innermost numbered module around each attention.

    Args:
        attention: recognises a module that computes attention.

    Returns:
        The layers by number, without numbers that several parts of the model use.
    """
    modules = dict(model.named_modules())
    inside = (_LAYER.match(path) for path, module in modules.items() if attention(module))
    numbers = {match[0]: int(match[1]) for match in inside if match}
    used = list(numbers.values())
    return {number: modules[path] for path, number in numbers.items() if used.count(number) == 1}


@dataclass(eq=False)
class _Pending:
    """The kept part of the current pass.

    Attributes:
        phase: "extend" or "decode".
        sequence: index of the request in the batch.
        rows: rows of the pass, int64 [rows].
        positions: position of each row in its request, int64 [rows].
        tokens: ids, [rows].
        last: whether the last of them is the last that is wanted of the request.
        in_batch: the rows among those of the engine's batch, [rows], if outputs of layers are kept too, or None.
        tensors: the tensors to write, by name in the file.
    """

    phase: Phase
    sequence: int
    rows: Tensor
    positions: Tensor
    tokens: Tensor
    last: bool
    in_batch: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Label:
    """The state of one trace."""

    name: str
    request: str
    passes: int = 0
    pending: _Pending | None = None
    reached: bool = False
    """Whether the last wanted position was kept, so that later passes need not be."""


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

    @property
    def on(self) -> bool:
        """True if there is a budget, so that the control may name a trace."""
        return self._budget > 0

    def keep(self, label: str, call: ObservedCall, used: Tensor, traced: TracedRequest | None = None) -> None:
        """Keep rows of the output that the model uses, [tokens, num_q_heads * head_dim_v], and more of a named request."""
        if label in self._refused:
            return
        requests = call.forward_pass.requests
        if traced is not None and traced.request not in requests:
            return
        kept = self._labels.setdefault(label, _Label(label, traced.request if traced else requests[0]))
        if traced is None and requests != (kept.request,):
            self.refuse(label, f"it started with request {kept.request}, but a pass has {', '.join(requests)}")
            return
        if kept.pending is None:
            kept.pending = _rows_of_pass(call, requests.index(kept.request), traced, used.device)
            # Processes that share a layer may each hold a part of its output.
            if traced is not None and self._ranks == 1:
                kept.pending.in_batch = _in_batch(call, kept.pending.rows)
        if kept.reached or not len(kept.pending.rows):
            kept.pending = None
            return
        try:
            tensors = _kept_of(call, used, kept.pending, traced)
        except KernelRefused as error:
            self.refuse(label, str(error))
            return
        self._label = kept
        self._add(kept, kept.pending, tensors)

    def keep_layer(self, number: int, returned: object) -> None:
        """Keep what a decoder layer returns, with its residual: the traced rows of [tokens, hidden size].

        Args:
            number: the layer's number; nothing is kept unless its attention is.
            returned: what its module returned: a tensor, or a tuple of the output and the residual that is added later, or None.
        """
        kept = self._label
        if kept is None or kept.pending is None or kept.pending.in_batch is None:
            return
        rows, parts = kept.pending.in_batch, returned[:2] if isinstance(returned, tuple) else (returned,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        first = tensors[0] if tensors else None
        if first is None or first.dim() < 2 or f"{OUTPUT}{number}" not in kept.pending.tensors:
            return
        flat = [part.flatten(0, -2)[rows].float() for part in tensors if part.shape == first.shape]
        self._add(kept, kept.pending, {f"{LAYER_OUTPUT}{number}": sum(flat[1:], flat[0])[:, None]})

    def _add(self, kept: _Label, pending: _Pending, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes + size > self._budget:
            self.refuse(kept.name, f"the traces of a process would exceed {self._budget} bytes")
            return
        self._bytes += size
        pending.tensors |= tensors

    def refuse(self, label: str, why: str) -> None:
        """Refuse a trace: keep nothing under its label from now on, and record why. A complete trace stays as it is."""
        if label in self._labels and self._labels[label].reached:
            return
        if label not in self._refused:
            self._refused.add(label)
            self._labels.pop(label, None)
            self._label = None
            write_refusal(self._folder, label, why)

    def write(self) -> None:
        """Write the tensors kept of the pass that has ended, if any."""
        if self._label is None or self._label.pending is None:
            return
        label, pending = self._label, self._label.pending
        self._label, label.pending, label.reached = None, None, pending.last
        header = TraceHeader(
            run=nonce_of_process(),
            request=label.request,
            phase=pending.phase,
            number=label.passes,
            rank=self._rank,
            ranks=self._ranks,
        )
        write_pass(self._folder, label.name, pending.tokens, pending.positions, pending.tensors, header)
        label.passes += 1


def rows_of(new: int) -> np.ndarray:
    """Choose which of a sequence's new tokens to keep: at most `MAX_ROWS`, evenly spaced, always including the last; int64."""
    return np.unique(np.linspace(new - 1, 0, min(new, MAX_ROWS)).round().astype(np.int64))


def _rows_of_pass(call: ObservedCall, sequence: int, traced: TracedRequest | None, device: torch.device) -> _Pending:
    """Choose the rows of a pass to keep: of a named request, all up to its position, which may be none."""
    of_pass: ForwardPass = call.forward_pass
    new, prefix = of_pass.new[sequence], of_pass.prefix[sequence]
    chosen = rows_of(new) if traced is None else np.arange(min(new, max(0, traced.until + 1 - prefix)))
    own = torch.from_numpy(chosen).to(device)
    rows = own + sum(of_pass.new[:sequence])
    last = traced is not None and len(chosen) > 0 and prefix + len(chosen) - 1 == traced.until
    return _Pending(call.phase, sequence, rows, own + prefix, of_pass.tokens[rows], last)


def _in_batch(call: ObservedCall, rows: Tensor) -> Tensor:
    """Return rows of a call among the tokens of the engine's batch, int64 [rows]."""
    own = call.rows_of_batch
    return rows + (own.start or 0) if isinstance(own, slice) else own.to(rows.device)[rows]


def _kept_of(call: ObservedCall, used: Tensor, pending: _Pending, traced: TracedRequest | None) -> dict[str, Tensor]:
    """Keep the tensors of a call. Raises KernelRefused if the contract cannot express the call."""
    outputs = used[pending.rows].view(len(pending.rows), call.heads, -1)
    tensors = {f"{OUTPUT}{call.layer}": outputs}
    if traced is None:
        return tensors
    packed = call.pack("a trace")
    tensors[f"{QUERY}{call.layer}"] = packed.q[pending.rows]
    tensors |= {f"{name}{call.layer}": own[pending.rows] for name, own in zip(NEW, call.own() or (), strict=False)}
    if pending.last:
        begin, end = packed.cu_seqlens_k[pending.sequence : pending.sequence + 2].tolist()
        of_pass = call.forward_pass
        after = of_pass.prefix[pending.sequence] + of_pass.new[pending.sequence] - 1 - traced.until
        for name, tensor in zip(READ, (packed.k, packed.v), strict=True):
            tensors[f"{name}{call.layer}"] = tensor[begin : end - after].clone()
    return tensors
