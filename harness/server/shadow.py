"""The shadow inside a server: the model uses the reference's output, and the candidate runs on the same q, k and v.

The candidate's errors are reduced on the device and written at intervals. Calls are recorded into a replay pack.
Whatever the candidate does, the model gets the reference's output: if the candidate raises, that is noted and the server goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.evidence.nonce import nonce_of_process
from assay.harness.evidence.pack import CallMetadata
from assay.harness.evidence.shadow_errors import (
    FOLDER,
    FailedCalls,
    ShadowHeader,
    WorstCase,
    condition_numbers,
    write_shadow_errors,
)
from assay.harness.server.candidates import Candidate, output_of, packed_call
from assay.harness.server.forward_pass import EngineCall, ForwardPass, Phase
from assay.harness.server.kv_pool import Pages, refuse_unsupported
from assay.harness.server.pack_writer import PackWriter
from assay.harness.server.reduction import LayerSums
from assay.harness.server.write_request import latest_write_request

WRITE_INTERVAL_S = 0.5
MAX_WRITE_SHARE = 0.05
"""Largest share of wall-clock time spent on writing."""
_MAX_TEXT = 1000
_MAX_PASSES = 256  # kept in memory until the worst cases among them are resolved


class Shadow:
    """The shadow of one process: sums up errors and records calls.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: what runs in the shadow; None to only record.
        new_writer: creates the pack writer of a session, which replaces the pack of the session before; None to record nothing.
        pages: the server's KV pool.
        rank: rank of this process among those that share the heads (tensor parallelism).
        clock: a clock, in seconds.
    """

    def __init__(
        self, folder: Path, candidate: Candidate | None, new_writer: Callable[[], PackWriter] | None, pages: Pages,
        rank: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._folder, self._candidate, self._new_writer, self._pages = folder, candidate, new_writer, pages
        self._rank, self._clock = rank, clock
        self.references: set[str] = set()
        self._next_write = 0.0
        self._written = ""
        self.start_session()

    def start_session(self) -> None:
        """Forget what an earlier session summed up and recorded. The next write replaces its files.

        Raises:
            UsageError: the pack's folder holds something else.
        """
        self._writer = self._new_writer() if self._new_writer else None
        self._phases: tuple[str, ...] = ()
        self._sums: dict[int, LayerSums] = {}
        self._unrecorded: dict[int, str] = {}
        self._failed: dict[tuple[int, Phase], FailedCalls] = {}
        self._worst: dict[tuple[int, Phase], Tensor] = {}
        self._cases: dict[tuple[int, Phase], WorstCase] = {}
        self._passes: dict[int, ForwardPass] = {}
        self._pass: ForwardPass | None = None
        self._conditions = torch.empty(0, dtype=torch.int64)
        self._count = 0

    def observe(self, call: EngineCall, out: Tensor) -> None:
        """Run the candidate on a call. `out`, [tokens, num_q_heads * head_dim_v], is the reference's output."""
        try:
            self._enter(call, out)
            metadata = _metadata(call)
            reference = out.view(out.shape[0], call.layer.tp_q_head_num, -1)
            got = self._run(call, out)
            if self._writer is not None and self._writer.wants(metadata):
                self._record(metadata, call, reference, got)
            if got is not None:
                self._measure(metadata, call, got, reference)
        except Exception as error:  # the model has its output already
            self.note_failure(call.layer.layer_id, call.phase, error)

    def _run(self, call: EngineCall, out: Tensor) -> Tensor | None:
        """The candidate's output, [tokens, heads, head_dim_v]; None if it raised or does not compute the phase."""
        if self._candidate is None:
            return None
        try:
            self._phases = self._candidate.phases
            if call.phase not in self._phases:
                return None
            return output_of(self._candidate, call, out).view(len(out), call.layer.tp_q_head_num, -1)
        except Exception as error:  # a candidate may raise anything; the call is recorded all the same
            self.note_failure(call.layer.layer_id, call.phase, error)
            return None

    def note_failure(self, layer: int, phase: Phase, error: Exception) -> None:
        """Count a call that the candidate did not compute, with the first error of its layer and phase."""
        known = self._failed.get((layer, phase))
        text = known.text if known else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        calls = known.calls + 1 if known else 1
        self._failed[layer, phase] = FailedCalls(layer=layer, phase=phase, calls=calls, text=text)

    def _enter(self, call: EngineCall, out: Tensor) -> None:
        """Take note of the call's pass if it is a new one."""
        if call.forward_pass is self._pass:
            return
        if len(self._passes) == _MAX_PASSES:
            self._resolve_worst()
        self._pass = self._passes[call.forward_pass.number] = call.forward_pass
        numbers = condition_numbers(call.phase, call.forward_pass.new, call.forward_pass.prefix)
        self._conditions = torch.from_numpy(numbers).to(out.device)
        self._count += 1

    def _measure(self, metadata: CallMetadata, call: EngineCall, got: Tensor, reference: Tensor) -> None:
        layer, heads = metadata.layer, reference.shape[1]
        if layer not in self._sums:
            self._sums[layer] = LayerSums(heads, reference.device)
        value, at = self._sums[layer].measure(got, reference, self._conditions)
        latest = torch.stack([value, torch.full_like(value, call.forward_pass.number), at.double()])
        known = self._worst.get((layer, metadata.phase))
        self._worst[layer, metadata.phase] = (
            latest if known is None else torch.where(latest[0] > known[0], latest, known)
        )
        if self._writer is not None and self._writer.wants_worst(metadata, float(value)):
            row, head = divmod(int(at), heads)
            self._record(metadata, call, reference, got, float(value), (call.forward_pass.locate(row)[0], head))

    def _record(
        self, metadata: CallMetadata, call: EngineCall, reference: Tensor, candidate: Tensor | None,
        relative_l1: float | None = None, worst_at: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        assert self._writer is not None
        try:
            refuse_unsupported(call.layer, call.kwargs, "a replay pack")
            # Gathered again: the candidate may have written to the call that it received.
            packed = packed_call(self._pages, call)
        except KernelRefused as error:
            self._unrecorded.setdefault(metadata.layer, str(error))
            return
        first_head = self._rank * reference.shape[1]
        self._writer.add(metadata, packed, reference, relative_l1, worst_at, first_head, candidate)

    def end_pass(self) -> None:
        """At the end of a pass, write if it is time or if there is a new write request."""
        token = latest_write_request(self._folder)
        started = self._clock()
        if token == self._written and started < self._next_write:
            return
        self.write()
        finished = self._clock()
        self._next_write = finished + max(WRITE_INTERVAL_S, (finished - started) / MAX_WRITE_SHARE)

    def write(self) -> None:
        """Write the errors and the pack, which serves the latest write request."""
        self._written = latest_write_request(self._folder)
        if self._writer is not None:
            self._writer.flush()
        self._resolve_worst()
        cells = [sums.cells(layer, self._rank * sums.heads) for layer, sums in sorted(self._sums.items())]
        header = ShadowHeader(
            run=nonce_of_process(),
            reference=" + ".join(sorted(self.references)),
            candidate=self._candidate.name if self._candidate else "",
            phases=self._phases,
            passes=self._count,
            worst=tuple(self._cases.values()),
            failed=tuple(self._failed.values()),
            unrecorded=self._unrecorded,
            write_request=self._written,
        )
        empty = (np.zeros((0, 6), np.int64), np.zeros((0, 9)), np.zeros(0))
        index, sums, max_abs = (np.concatenate(parts) for parts in zip(empty, *cells, strict=False))
        write_shadow_errors(self._folder / FOLDER / f"{os.getpid()}.safetensors", index, sums, max_abs, header)

    def _resolve_worst(self) -> None:
        """Look up the requests of the worst cases, and drop the passes."""
        for (layer, phase), tensor in self._worst.items():
            value, number, at = tensor.tolist()
            if int(number) in self._passes:
                self._cases[layer, phase] = self._case(layer, phase, value, self._passes[int(number)], int(at))
        self._passes = {self._pass.number: self._pass} if self._pass else {}

    def _case(self, layer: int, phase: Phase, relative_l1: float, of: ForwardPass, at: int) -> WorstCase:
        heads = self._sums[layer].heads
        row, head = divmod(at, heads)
        sequence, position = of.locate(row)
        return WorstCase(
            layer=layer,
            phase=phase,
            relative_l1=relative_l1,
            head=self._rank * heads + head,
            request=of.requests[sequence],
            position=of.prefix[sequence] + position,
            prefix=of.prefix[sequence],
            new=of.new[sequence],
            sequences=len(of.new),
        )


def _metadata(call: EngineCall) -> CallMetadata:
    of_pass = call.forward_pass
    return CallMetadata(call.layer.layer_id, call.phase, of_pass.new, of_pass.prefix, of_pass.requests)
