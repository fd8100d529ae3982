"""The shadow inside a server: the model uses the reference's output, and the candidate runs on the same q, k and v.

On sampled queries of every call both outputs are compared with the truth, and with honest implementations of the candidate's noise
family. All errors are reduced on the device and written at intervals. Calls are recorded into a replay pack.
Whatever the candidate does, the model gets the reference's output: if the candidate raises, this is recorded; the server goes on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.attention.noise import BESIDE_FP8
from assay.harness.backend import Backend
from assay.harness.engines.inside.candidates import Candidate, output_of
from assay.harness.engines.inside.control import latest_write_request
from assay.harness.engines.inside.observed_call import ForwardPass, ObservedCall, Phase
from assay.harness.engines.inside.pack_writer import PackWriter, stratum
from assay.harness.engines.inside.truth_sums import TruthSums, check_stored, sampled_rows
from assay.harness.evidence.envelope import ENVELOPE_FILES, EngineLimits
from assay.harness.evidence.envelope_counting import EnvelopeCounting, Values
from assay.harness.evidence.error_table import (
    CONDITION_COUNT,
    DISTANCE,
    ErrorTable,
    cell_index,
    condition_numbers,
    joined,
)
from assay.harness.evidence.run_file import nonce_of_process
from assay.harness.evidence.shadow_errors import (
    FOLDER,
    FailedCalls,
    ShadowHeader,
    write_shadow_errors,
)
from assay.harness.stats.error_sums import query_sums, relative_l1

_WRITE_INTERVAL_S = 0.5
_MAX_WRITE_SHARE = 0.05  # of wall-clock time
_MAX_TEXT = 1000


def _beside_cache(names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of an engine's own backends: with a cache of fewer bits they store q and weights in as few bits."""
    return BESIDE_FP8 if stored else ""


@dataclass(frozen=True)
class _OfPass:
    """The facts that all calls of a pass in one phase share.

    Attributes:
        forward_pass: the pass.
        numbers: condition of each query, int64 [queries].
        conditions: the same, on the device.
        rows: queries that are compared with the truth, int64.
        values: the pass's conditions in a verdict.
    """

    forward_pass: ForwardPass
    numbers: np.ndarray
    conditions: Tensor
    rows: np.ndarray
    values: Values


class LayerSums:
    """The differences of a layer's outputs, added up on the device: a row per condition, a column per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads = heads
        self._sums = torch.zeros(CONDITION_COUNT, heads, len(DISTANCE), dtype=torch.float64, device=device)

    def measure(self, out: Tensor, reference: Tensor, conditions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Add the errors of a call's outputs, [rows, heads, head_dim]; `conditions`, int64 [rows], are those of its queries.

        Returns the worst query and head by relative L1, and by the sum of |out - reference|, which is not misled by a query whose
        reference is nearly zero: each as the number, float64 [], and its index into [rows, heads], on the device.
        """
        # Where the reference is not finite, the candidate's output does not matter.
        sums = query_sums(out, reference.masked_fill(~reference.isfinite(), torch.nan))[..., : len(DISTANCE)]
        self._sums.index_add_(0, conditions, sums)
        worst = (relative_l1(sums).flatten().max(0), sums[..., DISTANCE.index("difference")].flatten().max(0))
        return [(value, at) for value, at in worst]

    def cells(self, layer: int, first_head: int) -> ErrorTable:
        """Return the observed cells of a layer; `first_head` is the first head that this process computes."""
        sums = self._sums.cpu().numpy()
        seen = sums[..., -3:].any(-1)
        index = cell_index(layer, range(first_head, first_head + self.heads), range(CONDITION_COUNT))
        return ErrorTable.of(index[seen], sums[seen])


class Shadow:
    """The shadow of one process: sums up errors and records calls.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: the kernel that runs in the shadow, or None to only record.
        new_writer: creates the pack writer of a session, which replaces the pack of the session before, or None to record nothing.
        rank: rank of this process among those that share the heads (tensor parallelism).
        ranks: number of these processes.
        clock: a clock, in seconds.
        native_noise: returns the noise family of the engine's own backends in a phase, with a cache of fewer bits or without.
        limits: the engine's limits; with them, compared calls are counted by the conditions of a verdict.
    """

    def __init__(
        self, folder: Path, candidate: Candidate | None, new_writer: Callable[[], PackWriter] | None,
        rank: int = 0, ranks: int = 1, clock: Callable[[], float] = time.monotonic,
        native_noise: Callable[[Collection[str], str, bool], str] = _beside_cache, limits: EngineLimits | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._candidate, self._new_writer = folder, candidate, new_writer
        self._rank, self._ranks, self._clock = rank, ranks, clock
        self._native_noise, self._limits = native_noise, limits
        self._seed = secrets.randbits(32)
        self.references: set[str] = set()
        self._next_write = 0.0
        self._written = ""
        self.start_session()

    def start_session(self) -> None:
        """Discard the sums and records of an earlier session. The next write replaces its files.

        Raises:
            UsageError: the pack's folder holds something else.
        """
        self._writer = self._new_writer() if self._new_writer else None
        self._counting = EnvelopeCounting(self._limits) if self._limits else None
        # Written at intervals and kept until the session ends: sums by layer, or by layer and phase, each made at its
        # first call; for calls that were not computed, compared or recorded, the first reason.
        self._phases: tuple[str, ...] = ()
        self._noise = ""
        self._features: dict[str, None] = {}
        self._sums: dict[int, LayerSums] = {}
        self._truth: dict[tuple[int, Phase], TruthSums] = {}
        self._unrecorded: dict[int, str] = {}
        self._untested: dict[int, str] = {}
        self._failed: dict[tuple[int, Phase], FailedCalls] = {}
        self._count = self._row_count = self._sampled = 0
        # The latest pass of each phase: an engine may compute both phases in the same layers of one pass, in turn.
        self._entered: dict[Phase, _OfPass] = {}

    def observe(self, call: ObservedCall, out: Tensor) -> None:
        """Run the candidate on a call. `out`, [tokens, num_q_heads * head_dim_v], is the reference's output."""
        try:
            of = self._enter(call, out)
            new, prefix = call.forward_pass.new, call.forward_pass.prefix
            reference = out.view(out.shape[0], call.heads, -1)
            got = self._run(call, out)
            if self._writer is not None and self._writer.wants(stratum(call.layer, call.phase, new, prefix)):
                self._record(call, reference, got)
            if got is not None:
                worst = self._measure(call, got, reference, of)
                self._compare_with_truth(call, got, reference, worst, of)
                if self._counting is not None:
                    self._counting.count(call.phase, call.layer, of.values)
        except Exception as error:  # the model has its output already
            self.note_failure(call.layer, call.phase, error)

    def _run(self, call: ObservedCall, out: Tensor) -> Tensor | None:
        """Compute the candidate's output, [tokens, heads, head_dim_v], or None if it raised or does not compute the phase."""
        if self._candidate is None:
            return None
        try:
            self._phases = self._candidate.computes.phases
            if call.phase not in self._phases:
                return None
            return output_of(self._candidate, call, out).view(len(out), call.heads, -1)
        except Exception as error:  # a candidate may raise anything; the call is recorded all the same
            self.note_failure(call.layer, call.phase, error)
            return None

    def note_failure(self, layer: int, phase: Phase, error: Exception) -> None:
        """Count a call that the candidate did not compute, with the first error of its layer and phase."""
        known = self._failed.get((layer, phase))
        text = known.text if known else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        calls = known.calls + 1 if known else 1
        self._failed[layer, phase] = FailedCalls(layer=layer, phase=phase, calls=calls, text=text)

    def _enter(self, call: ObservedCall, out: Tensor) -> _OfPass:
        """Return what the calls of this one's pass share, and count the pass if it is a new one."""
        known, of_pass = self._entered.get(call.phase), call.forward_pass
        if known is not None and known.forward_pass is of_pass:
            return known
        values: Values = {}
        if self._counting is not None and call.phase == "decode":
            values = self._counting.decode(of_pass.prefix, of_pass.requests)
        elif self._counting is not None:
            values = self._counting.extend(of_pass.new, of_pass.prefix, of_pass.requests, mixed=of_pass.mixed)
        numbers = condition_numbers(call.phase, of_pass.new, of_pass.prefix)
        # Seeded by the pass as well, so that all layers and all processes compare the same queries.
        random = np.random.default_rng([self._seed, self._count])
        rows = sampled_rows(of_pass.new, of_pass.prefix, random)
        self._count += 1
        self._row_count += len(numbers)
        self._sampled += len(rows)
        entered = _OfPass(of_pass, numbers, torch.from_numpy(numbers).to(out.device), rows, values)
        self._entered[call.phase] = entered
        return entered

    def _measure(self, call: ObservedCall, got: Tensor, reference: Tensor, of: _OfPass) -> list[int]:
        """Add the differences of a call; return the queries that differ most, by relative L1 and by the difference itself."""
        layer, phase, heads = call.layer, call.phase, reference.shape[1]
        if layer not in self._sums:
            self._sums[layer] = LayerSums(heads, reference.device)
        (value, at), (_, farthest) = self._sums[layer].measure(got, reference, of.conditions)
        if self._writer is not None and self._writer.wants_worst(layer, phase, float(value)):
            row, head = divmod(int(at), heads)
            sequence, position = call.forward_pass.locate(row)
            self._record(call, reference, got, float(value), (sequence, head, position))
        return (torch.stack([at, farthest]) // heads).tolist()

    def _compare_with_truth(
        self, call: ObservedCall, got: Tensor, reference: Tensor, worst: list[int], of: _OfPass
    ) -> None:
        """Compare sampled queries with the truth, and those in `worst`: a wrong query differs from the reference."""
        assert self._candidate is not None
        layer = call.layer
        try:
            packed = call.pack("the oracle")
            stored = packed.stored is not None
            given = call.given if stored else None  # layers may not read the stored values
            if given is not None:
                check_stored(packed, *given)
            if (layer, call.phase) not in self._truth:
                able = self._candidate.computes
                noise = able.noise or self._native_noise(
                    (self._candidate.name,), call.phase, stored and able.reads_given
                )
                self._noise = self._noise or noise
                families = (noise, self._reference_noise(call.phase, stored))
                self._truth[layer, call.phase] = TruthSums(reference.shape[1], *families, able.reads_given)
            [seed] = np.random.SeedSequence([self._seed, self._count, layer]).generate_state(1).tolist()
            self._features |= dict.fromkeys(packed.features)
            self._truth[layer, call.phase].add(
                packed, (got, reference), of.rows, of.numbers, seed, worst, call.forward_pass.prefix, given,
            )  # fmt: skip
        except Exception as error:  # such as out of memory: the layer lacks its comparison, which is reported
            self._untested.setdefault(layer, f"{type(error).__name__}: {error}"[:_MAX_TEXT])

    def _reference_noise(self, phase: Phase, stored: bool) -> str:
        """Return the noise family of the serving backend in a phase that it computes itself, or an empty string."""
        own = [Backend.parse(name) for name in self.references]
        declared = next((backend.noise for backend in own if backend.noise and phase in backend.phases), "")
        computes = any(backend.is_kernel and phase in backend.phases for backend in own)
        return declared or self._native_noise(self.references, phase, stored and not computes)

    def _record(
        self, call: ObservedCall, reference: Tensor, candidate: Tensor | None, relative_l1: float | None = None,
        worst_at: tuple[int, int, int] = (0, 0, 0),
    ) -> None:  # fmt: skip
        assert self._writer is not None
        try:
            # Gathered again: the candidate may have written to the call that it received.
            packed = call.pack("a replay pack")
        except KernelRefused as error:
            self._unrecorded.setdefault(call.layer, str(error))
            return
        first_head = self._rank * reference.shape[1]
        prefix = call.forward_pass.prefix
        self._writer.add(packed, reference, relative_l1, worst_at, first_head, candidate, prefix)

    def end_pass(self) -> None:
        """Write at the end of a pass, if it is time or if there is a new write request."""
        token = latest_write_request(self._folder)
        started = self._clock()
        if token == self._written and started < self._next_write:
            return
        self.write()
        finished = self._clock()
        self._next_write = finished + max(_WRITE_INTERVAL_S, (finished - started) / _MAX_WRITE_SHARE)

    def write(self) -> None:
        """Write the errors and the pack, which serves the latest write request."""
        self._written = latest_write_request(self._folder)
        if self._writer is not None:
            self._writer.flush()
        if self._counting is not None:
            ENVELOPE_FILES.write(self._folder, self._counting.counts(nonce_of_process()))
        header = ShadowHeader(
            run=nonce_of_process(),
            reference=" + ".join(sorted(self.references)),
            candidate=self._candidate.name if self._candidate else "",
            phases=self._phases,
            passes=self._count,
            failed=tuple(self._failed.values()),
            unrecorded=self._unrecorded,
            untested=self._untested,
            known=tuple((*at, how) for at, sums in sorted(self._truth.items()) for how in sorted(sums.known)),
            candidate_noise=self._noise,
            dtype=next((sums.dtype for sums in self._truth.values()), ""),
            accumulation=next((sums.accumulation for sums in self._truth.values()), ""),
            reference_noise=self._reference_noise("extend", "stored_kv" in self._features),
            features=tuple(self._features),
            effects=tuple(
                (*at, *felt) for at, sums in sorted(self._truth.items()) for felt in sorted(sums.felt.items())
            ),
            heads={layer: sums.heads * self._ranks for layer, sums in self._sums.items()},
            rows=self._row_count,
            sampled_rows=self._sampled,
            write_request=self._written,
        )
        parts = [sums.cells(layer, self._rank * sums.heads) for layer, sums in self._sums.items()]
        parts += [sums.cells(layer, self._rank * sums.heads) for (layer, _), sums in self._truth.items()]
        write_shadow_errors(self._folder / FOLDER / f"{os.getpid()}.safetensors", joined(parts), header)
