"""Attachments of a server's model: shadow, layer substitution, faults and trace, switched by the control.

An engine's adapter gives each call to `Attachment.output`. The control (`assay.harness.engines.inside.control`) is read when a
forward pass starts. While everything is off, a call costs one more comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.conditions import has_cached_prefix
from assay.harness.engines.inside.candidates import Candidate, output_of
from assay.harness.engines.inside.control import (
    CONTROL,
    MODEL_HASH,
    RECORD,
    SHADOW,
    TRACE,
    Setting,
    read_setting,
    substitution_folder,
)
from assay.harness.engines.inside.faults import Faults, FaultyCandidate
from assay.harness.engines.inside.observed_call import ForwardPass, ObservedCall, Phase
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.inside.tracer import Tracer
from assay.harness.engines.registry import native_noise
from assay.harness.evidence.counters import CounterFile, CounterRow
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.faults import SENSITIVITY
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.manifest import engine_label
from assay.harness.evidence.pack import Source, rank_folder
from assay.harness.evidence.run_file import nonce_of_process
from assay.harness.sides import Engine


def attachment_of(
    folder: Path, engine: Engine, version: str, device: str, model: str, reference: str, ranks: tuple[int, int],
    make: Callable[[str], Candidate], limits: EngineLimits,
) -> Attachment:  # fmt: skip
    """Make the attachment of a server's process, as the environment requests (`assay.harness.engines.inside.control`).

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        model: its folder or hub id.
        reference: name of the backend or of the kernel that serves.
        ranks: rank of this process among those that share the heads (tensor parallelism), and their number.
        make: makes a candidate by its name.
        limits: the engine's limits.

    Raises:
        KernelRefused: no candidate has the name that ``ASSAY_SHADOW`` gives.
        UsageError: the pack's folder holds something else.
    """
    candidate, new_writer, (rank, _) = os.environ.get(SHADOW, ""), None, ranks
    if record_bytes := int(os.environ.get(RECORD) or 0):
        source = Source(
            engine=engine_label(engine, version, device), model=model, model_hash=os.environ.get(MODEL_HASH, ""),
            reference=reference, candidate=candidate, run=nonce_of_process(),
        )  # fmt: skip
        new_writer = partial(PackWriter, rank_folder(folder / PACK_FOLDER, rank), source, record_bytes // ranks[1])
    built, faults, noise = make(candidate) if candidate else None, Faults(folder), partial(native_noise, engine)
    faulty = FaultyCandidate(built, faults) if built else None
    return Attachment(
        folder,
        Shadow(folder, built, new_writer, *ranks, native_noise=noise, limits=limits),
        built,
        Tracer(folder, int(os.environ.get(TRACE) or 0), *ranks),
        faults,
        Shadow(folder / SENSITIVITY, faulty, None, *ranks, native_noise=noise),
    )


class ControlReader:
    """The server's side: the latest setting. While the file does not change, reading it costs one ``stat``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[int, int] | None = None
        self._setting = Setting()

    def latest(self) -> Setting:
        """Read the setting that applies now. Raises EvidenceError if the file is damaged."""
        try:
            status = os.stat(self._folder / CONTROL)
            version = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            version = None
        if version != self._read:
            self._read, self._setting = version, read_setting(self._folder)
        return self._setting


class Attachment:
    """The attachments of one process, a single object even if prefill and decode have different backends.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``), which holds the control.
        shadow: runs the candidate while the control says `shadow`.
        candidate: computes the output of the layers that the control names, or None if the server has no candidate.
        tracer: keeps outputs while the control names a trace.
        faults: seeds the fault that the control names.
        faulty: the shadow of a candidate with that fault.
    """

    def __init__(
        self, folder: Path, shadow: Shadow, candidate: Candidate | None, tracer: Tracer, faults: Faults, faulty: Shadow
    ) -> None:
        self._folder, self._right, self._candidate, self._tracer = folder, shadow, candidate, tracer
        self._faults, self._faulty = faults, faulty
        self._reader = ControlReader(folder)
        self._setting = Setting()
        self._counters: tuple[str, CounterFile] | None = None
        self._off = True
        self._batch: Any = None
        # An engine may compute sequences of both phases in a pass.
        self._of_phase: dict[Phase, ForwardPass] = {}
        # Whether a watched layer ran in Python in this pass: not if it is compiled, or replayed from a CUDA graph.
        self._layers_ran = False
        self._highest = -1
        self._last_layer: int | None = None

    def attached_to(self, name: str) -> None:
        """Record that outputs of the backend of this name are observed."""
        self._right.references.add(name)
        self._faulty.references.add(name)

    def watch(self, layers: Mapping[int, torch.nn.Module]) -> None:
        """Give what each decoder layer returns to the tracer from now on, if the server may be traced."""
        for number, layer in layers.items() if self._tracer.on else ():
            layer.register_forward_hook(partial(self._returned, number))

    def _returned(self, number: int, layer: torch.nn.Module, given: object, returned: object) -> None:
        if torch.compiler.is_compiling() or self._off or not self._setting.control.trace:
            return
        self._layers_ran = True
        self._tracer.keep_layer(number, returned)
        if number == self._last_layer:
            self._tracer.write()

    def observes(self, batch: Any) -> bool:
        """Return True if calls of a batch are observed, which must be known before a layer's output is computed."""
        if self._batch is not batch:
            self._start(batch)
        return not self._off

    def output(self, made: ObservedCall, out: Any, reference: str) -> Any:
        """Return the output that the model uses, after everything that is switched on has received it.

        Args:
            out: the reference's output, [tokens, num_q_heads * head_dim_v]; anything but a tensor is returned as it is.
            reference: name of the backend that computed it.

        Raises:
            KernelRefused: a layer should be substituted, but the pass cannot be.
        """
        observed = self.observes(made.batch)
        self._highest = max(self._highest, made.layer)
        if not observed or not made.is_served:
            return out
        if not isinstance(out, Tensor):
            self._refuse(made, KernelRefused("a call returned parts that are merged later, which are not observed"))
            return out
        return self._observed(made, out, reference)

    def _start(self, batch: Any) -> None:
        """Start a pass: the current control applies until the pass ends."""
        self._batch, self._of_phase, self._layers_ran = batch, {}, False
        if self._highest >= 0:
            self._last_layer = max(self._highest, self._last_layer or 0)
        self._tracer.write()
        before, shadow, self._setting = self._setting.session, self._shadow, self._reader.latest()
        if before and (not self._setting.session or self._shadow is not shadow):
            shadow.write()
        self._faults.switch(self._setting.control.fault, self._setting.token)
        if self._setting.session not in ("", before):
            self._shadow.start_session()
        self._off = not self._setting.control.observes

    @property
    def _shadow(self) -> Shadow:
        """The shadow that the control selects."""
        return self._faulty if self._setting.control.fault else self._right

    def _observed(self, call: ObservedCall, out: Tensor, reference: str) -> Tensor:
        control, number = self._setting.control, call.layer
        try:
            if call.phase not in self._of_phase:
                self._of_phase[call.phase] = call.describe_pass()
        except KernelRefused as error:
            self._refuse(call, error)
        else:
            call.forward_pass = self._of_phase[call.phase]
            if control.shadow:
                self._shadow.observe(call, out)
            if number in control.substitute:
                out = self._substituted(call, out, reference)
            if control.fault and not control.shadow:
                out = self._faults.seeded(call, out)
            if control.trace:
                self._tracer.keep(control.trace, call, out, control.traced)
        if number == self._last_layer and call.is_last_part:
            self._end()
        return out

    def _substituted(self, call: ObservedCall, out: Tensor, reference: str) -> Tensor:
        """Return the candidate's output in the shape of `out`, and count the call; `out` in a phase that it does not compute.

        The reference ran first, so K and V are in the pool. It never falls back silently: a candidate that raises, or returns an
        output of another size or dtype, stops the server.
        """
        if self._candidate is None:
            raise KernelRefused(
                "a layer is to be substituted but the server has no candidate; start it with ASSAY_SHADOW"
            )
        if call.phase not in self._candidate.computes.phases:
            return out
        computed, token = output_of(self._candidate, call, out), self._setting.token
        if self._counters is None or self._counters[0] != token:
            self._counters = token, CounterFile(substitution_folder(self._folder, token), str(os.getpid()))
        row = CounterRow(
            backend=reference, kernel=self._candidate.name, phase=call.phase,
            cached_prefix=call.phase == "decode" or has_cached_prefix(call.forward_pass.prefix),
        )  # fmt: skip
        counters = self._counters[1]
        counters.add(counters.row(row), call.layer)
        return computed.contiguous()

    def _refuse(self, made: ObservedCall, error: KernelRefused) -> None:
        """Record that a call is not observed. Raises the error if its layer should be substituted."""
        control = self._setting.control
        if made.layer in control.substitute:
            raise error
        if control.shadow:
            self._shadow.note_failure(made.layer, made.phase, error)
        if control.trace and (control.traced is None or control.traced.request in made.requests):
            self._tracer.refuse(control.trace, str(error))

    def _end(self) -> None:
        if self._setting.control.fault:
            self._faults.write()
        if self._setting.control.shadow:
            self._shadow.end_pass()
        if not self._layers_ran:  # else the last layer has not returned yet
            self._tracer.write()
