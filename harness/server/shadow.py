"""Shadowing inside a server: the reference computes what the model uses, and the candidate runs on the same q, k and v.

The candidate's errors are reduced on the device and written from time to time; calls are recorded into a replay pack.
Whatever the candidate does, the model gets the reference's output: a candidate that raises is noted, and the server goes on.
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
from assay.harness.evidence.pack import Seen
from assay.harness.evidence.pack_writer import PackWriter
from assay.harness.evidence.shadow_sums import (
    FOLDER,
    Legend,
    ShadowError,
    WorstCase,
    condition_numbers,
    write_shadow_sums,
)
from assay.harness.server.candidates import Candidate, resolve
from assay.harness.server.paging import Pages, refuse
from assay.harness.server.passes import EngineCall, Pass, Phase
from assay.harness.server.reduction import LayerSums
from assay.harness.server.write_request import asked

PACK_FOLDER = "pack"
WRITE_EVERY_S = 0.5
WRITE_SHARE = 0.05
"""Largest share of the time that goes into writing."""
_LONGEST_TEXT = 1000
_MOST_PASSES = 256  # that are remembered until the worst cases among them are looked up


class Shadow:
    """One process's shadow: sums up errors, records calls.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: what is shadowed; None only to record.
        new_writer: makes what records the calls of a watch, in place of an earlier watch's; None to record nowhere.
        pages: the server's KV pool.
        rank: this process's place among those that share the heads (tensor parallelism).
        clock: seconds.
    """

    def __init__(
        self, folder: Path, candidate: Candidate | None, new_writer: Callable[[], PackWriter] | None, pages: Pages,
        rank: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._folder, self._candidate, self._new_writer, self._pages = folder, candidate, new_writer, pages
        self._rank, self._clock = rank, clock
        self.references: set[str] = set()
        self._next_write = 0.0
        self._answered = ""
        self.begin()

    def begin(self) -> None:
        """Begin a watch: what an earlier one summed up and recorded is forgotten, and its files are replaced by the next write.

        Raises:
            UsageError: the replay pack's folder holds something else.
        """
        self._writer = self._new_writer() if self._new_writer else None
        self._phases: tuple[str, ...] = ()
        self._sums: dict[int, LayerSums] = {}
        self._unrecorded: dict[int, str] = {}
        self._errors: dict[tuple[int, Phase], ShadowError] = {}
        self._worst: dict[tuple[int, Phase], Tensor] = {}
        self._cases: dict[tuple[int, Phase], WorstCase] = {}
        self._passes: dict[int, Pass] = {}
        self._pass: Pass | None = None
        self._conditions = torch.empty(0, dtype=torch.int64)
        self._count = 0

    def observe(self, call: EngineCall, out: Tensor) -> None:
        """Run the candidate on a call whose output `out`, [tokens, num_q_heads * head_dim_v], the reference computed."""
        try:
            self._begin(call, out)
            seen = Seen(call.layer.layer_id, call.phase, call.now.new, call.now.prefix, call.now.requests)
            reference = out.view(out.shape[0], call.layer.tp_q_head_num, -1)
            got = self._run(call, reference)
            if self._writer is not None and self._writer.wants(seen):
                self._record(seen, call, reference, got)
            if got is not None:
                self._measure(seen, call, got, reference)
        except Exception as error:  # the model has its output
            self.note(call.layer.layer_id, call.phase, error)

    def _run(self, call: EngineCall, reference: Tensor) -> Tensor | None:
        """The candidate's output in the shape of the reference's; None if it does not compute the phase, or raised."""
        if self._candidate is None:
            return None
        try:
            self._phases = self._candidate.phases
            if call.phase not in self._phases:
                return None
            got = self._candidate.run(call)
            if got.shape[0] != reference.shape[0] or got.numel() != reference.numel():
                expected = [len(reference), reference[0].numel()]
                raise KernelRefused(f"{self._candidate.name} returned {list(got.shape)}; expected {expected}")
            return got.view(reference.shape)
        except Exception as error:  # the candidate's, whatever it is; the call is recorded all the same
            self.note(call.layer.layer_id, call.phase, error)
            return None

    def note(self, layer: int, phase: Phase, error: Exception) -> None:
        """Note a call that the candidate did not compute."""
        known = self._errors.get((layer, phase))
        text = known.text if known else f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
        calls = known.calls + 1 if known else 1
        self._errors[layer, phase] = ShadowError(layer=layer, phase=phase, calls=calls, text=text)

    def _begin(self, call: EngineCall, out: Tensor) -> None:
        """Remember the call's pass, if it is a new one."""
        if call.now is self._pass:
            return
        if len(self._passes) == _MOST_PASSES:
            self._settle()
        self._pass = self._passes[call.now.number] = call.now
        self._conditions = torch.from_numpy(condition_numbers(call.phase, call.now.new, call.now.prefix)).to(out.device)
        self._count += 1

    def _measure(self, seen: Seen, call: EngineCall, got: Tensor, reference: Tensor) -> None:
        layer, heads = seen.layer, reference.shape[1]
        if layer not in self._sums:
            self._sums[layer] = LayerSums(heads, reference.device)
        value, at = self._sums[layer].measure(got, reference, self._conditions)
        latest = torch.stack([value, torch.full_like(value, call.now.number), at.double()])
        known = self._worst.get((layer, seen.phase))
        self._worst[layer, seen.phase] = latest if known is None else torch.where(latest[0] > known[0], latest, known)
        if self._writer is not None and self._writer.wants_worst(seen, float(value)):
            row, head = divmod(int(at), heads)
            self._record(seen, call, reference, got, float(value), (call.now.at(row)[0], head))

    def _record(
        self, seen: Seen, call: EngineCall, reference: Tensor, candidate: Tensor | None, relative_l1: float | None = None,
        worst_at: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        assert self._writer is not None
        try:
            refuse(call.layer, "a replay pack")
            # Resolved anew each time: the candidate may have written into the call that it was given.
            packed = resolve(self._pages, call)
        except KernelRefused as error:
            self._unrecorded.setdefault(seen.layer, str(error))
            return
        first_head = self._rank * reference.shape[1]
        self._writer.add(seen, packed, reference, relative_l1, worst_at, first_head, candidate)

    def end_pass(self) -> None:
        """Write at the end of a pass, if it is time or if it was asked for."""
        token = asked(self._folder)
        started = self._clock()
        if token == self._answered and started < self._next_write:
            return
        self.write()
        finished = self._clock()
        self._next_write = finished + max(WRITE_EVERY_S, (finished - started) / WRITE_SHARE)

    def write(self) -> None:
        """Write the cells and the pack, which answers the latest request to write."""
        self._answered = asked(self._folder)
        if self._writer is not None:
            self._writer.flush()
        self._settle()
        cells = [sums.cells(layer, self._rank * sums.heads) for layer, sums in sorted(self._sums.items())]
        legend = Legend(
            reference=" + ".join(sorted(self.references)),
            candidate=self._candidate.name if self._candidate else "",
            phases=self._phases,
            passes=self._count,
            worst=tuple(self._cases.values()),
            errors=tuple(self._errors.values()),
            unrecorded=self._unrecorded,
            answered=self._answered,
        )
        empty = (np.zeros((0, 6), np.int64), np.zeros((0, 9)), np.zeros(0))
        index, sums, max_abs = (np.concatenate(parts) for parts in zip(empty, *cells, strict=False))
        write_shadow_sums(self._folder / FOLDER / f"{os.getpid()}.safetensors", index, sums, max_abs, legend)

    def _settle(self) -> None:
        """Look up the requests of the worst cases, and forget the passes."""
        for (layer, phase), tensor in self._worst.items():
            value, number, at = tensor.tolist()
            if int(number) in self._passes:
                self._cases[layer, phase] = self._case(layer, phase, value, self._passes[int(number)], int(at))
        self._passes = {self._pass.number: self._pass} if self._pass else {}

    def _case(self, layer: int, phase: Phase, relative_l1: float, of: Pass, at: int) -> WorstCase:
        heads = self._sums[layer].heads
        row, head = divmod(at, heads)
        sequence, position = of.at(row)
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
