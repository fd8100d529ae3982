"""Attachments of a server's attention backends: shadow, layer substitution and trace, switched by the control.

Attaching wraps a backend's ``forward_extend`` and ``forward_decode``. The control (`assay.harness.server.control`) is read when a
forward pass starts. While everything is off, a call costs one more comparison.
"""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.faults import SENSITIVITY
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.manifest import engine_label
from assay.harness.evidence.nonce import nonce_of_process
from assay.harness.evidence.pack import Source, rank_folder
from assay.harness.server.candidates import make_candidate
from assay.harness.server.control import CONTROL, Setting, read_setting
from assay.harness.server.eager_passes import run_eagerly_while
from assay.harness.server.envelope_tally import EnvelopeTally
from assay.harness.server.faults import Faults, FaultyCandidate
from assay.harness.server.forward_pass import EngineCall, ForwardPass, Phase
from assay.harness.server.graph_counts import capturing
from assay.harness.server.kv_pool import Pages
from assay.harness.server.pack_writer import PackWriter
from assay.harness.server.shadow import Shadow
from assay.harness.server.substitution import Substitution
from assay.harness.server.tracer import Tracer


class ControlReader:
    """The server's side: the latest setting. While the file does not change, reading it costs one ``stat``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[int, int] | None = None
        self._setting = Setting()

    def latest(self) -> Setting:
        """Read the setting that applies now.

        Raises:
            EvidenceError: the file is damaged.
        """
        try:
            status = os.stat(self._folder / CONTROL)
            found = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            found = None
        if found != self._read:
            self._read, self._setting = found, read_setting(self._folder)
        return self._setting


class Attachment:
    """The attachment of one process. There is one, even where prefill and decode have different backends.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``), which holds the control.
        shadow: runs the candidate while the control says `shadow`.
        substitution: computes the output of the layers that the control names.
        tracer: keeps outputs while the control names a trace.
        faults: seeds the fault that the control names.
        faulty: the shadow of a candidate with that fault.
    """

    def __init__(
        self, folder: Path, shadow: Shadow, substitution: Substitution, tracer: Tracer, faults: Faults, faulty: Shadow
    ) -> None:
        self._right, self._substitution, self._tracer = shadow, substitution, tracer
        self._faults, self._faulty = faults, faulty
        self._reader = ControlReader(folder)
        self._setting = Setting()
        self._off = True
        self._batch: Any = None
        self._pass: ForwardPass | None = None
        self._passes = 0
        self._highest = -1
        self._last_layer: int | None = None

    def attach(self, backend: Any, name: str) -> Any:
        """Wrap every call of an SGLang backend object from now on, and return the object."""
        self._right.references.add(name)
        self._faulty.references.add(name)

        def attached(phase: Phase, forward: Any) -> Any:
            def call(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
                if torch.compiler.is_compiling():
                    return out  # compiled code is captured in CUDA graphs, which cannot be observed
                if self._batch is not forward_batch:
                    self._start(forward_batch)
                self._highest = max(self._highest, layer.layer_id)
                # Batches without a request are SGLang's own: warm-up and capture of CUDA graphs.
                if self._off or not isinstance(out, Tensor) or not getattr(forward_batch, "rids", None) or capturing():
                    return out
                return self._output(phase, (q, k, v), layer, forward_batch, kwargs, out, name)

            return call

        backend.forward_extend = attached("extend", backend.forward_extend)
        backend.forward_decode = attached("decode", backend.forward_decode)
        return backend

    def _start(self, batch: Any) -> None:
        """Start a pass: what the control says now applies until the pass ends."""
        self._batch, self._pass = batch, None
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
        """The shadow that the control speaks of."""
        return self._faulty if self._setting.control.fault else self._right

    def _output(
        self, phase: Phase, qkv: tuple[Any, Any, Any], layer: Any, batch: Any, kwargs: dict[str, Any], out: Tensor,
        reference: str,
    ) -> Tensor:  # fmt: skip
        """Return the output that the model uses, after everything that is switched on has received it."""
        control, number = self._setting.control, layer.layer_id
        substitute = number in control.substitute
        try:
            if self._pass is None:
                self._pass = ForwardPass.of(self._passes, phase, batch, out.shape[0])
                self._passes += 1
        except KernelRefused as error:
            if substitute:
                raise
            if control.shadow:
                self._shadow.note_failure(number, phase, error)
            if control.trace:
                self._tracer.refuse(control.trace, str(error))
        else:
            extra = {key: value for key, value in kwargs.items() if key != "save_kv_cache"}
            call = EngineCall(phase, *qkv, layer, batch, self._pass, extra)
            if control.shadow:
                self._shadow.observe(call, out)
            if substitute:
                out = self._substitution.output(call, out, reference, self._setting)
            if control.fault and not control.shadow and phase in control.fault_phases:
                out = self._faults.seeded(call, out)
            if control.trace:
                self._tracer.keep(control.trace, call, out)
        if number == self._last_layer:
            self._end()
        return out

    def _end(self) -> None:
        if self._setting.control.fault:
            self._faults.write()
        if self._setting.control.shadow:
            self._shadow.end_pass()
        self._tracer.write()


def _limits(runner: Any) -> EngineLimits:
    """Return what the engine cannot exceed, as SGLang resolved its arguments."""
    arguments = runner.server_args
    chunk = getattr(arguments, "chunked_prefill_size", None) or -1
    return EngineLimits(
        chunk_tokens=chunk if chunk > 0 else None,
        context_tokens=int(runner.model_config.context_len),
        page_tokens=int(getattr(arguments, "page_size", None) or 1),
        batch=getattr(runner, "max_running_requests", None),
        prefix_cache=not getattr(arguments, "disable_radix_cache", False),
        mixed=bool(getattr(arguments, "enable_mixed_chunk", False)),
    )


@cache
def _attachment(
    runner: Any, folder: Path, candidate: str, record_bytes: int, trace_bytes: int, model_hash: str
) -> Attachment:
    """Return the one attachment of a server process."""
    import sglang
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    pages, rank, new_writer = Pages(runner), int(get_tensor_model_parallel_rank()), None
    if record_bytes:
        source = Source(
            engine=engine_label(sglang.__version__, runner.device),
            model=str(runner.server_args.model_path),
            model_hash=model_hash,
            reference=str(runner.server_args.attention_backend),
            candidate=candidate,
            run=nonce_of_process(),
        )
        share = record_bytes // int(get_tensor_model_parallel_world_size())
        new_writer = partial(PackWriter, rank_folder(folder / PACK_FOLDER, rank), source, share)
    built = make_candidate(candidate, runner, pages) if candidate else None
    ranks, faults = int(get_tensor_model_parallel_world_size()), Faults(folder, pages)
    shadow = Shadow(folder, built, new_writer, pages, rank, ranks)
    reader = ControlReader(folder)
    run_eagerly_while(lambda: reader.latest().control.observes)
    shadow.tally = EnvelopeTally(folder, _limits(runner))
    faulty = FaultyCandidate(built, faults) if built else None
    return Attachment(
        folder,
        shadow,
        Substitution(folder, built),
        Tracer(folder, trace_bytes, rank, ranks),
        faults,
        Shadow(folder / SENSITIVITY, faulty, None, pages, rank, ranks),
    )


def attach(
    backend: Any, name: str, runner: Any, folder: Path, candidate: str, record_bytes: int, trace_bytes: int,
    model_hash: str,
) -> Any:  # fmt: skip
    """Attach to an SGLang backend object, and return it.

    Args:
        backend: the reference. The model uses its outputs unless the control says otherwise.
        name: name of the reference.
        runner: SGLang's ModelRunner.
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: a published kernel, a ``module:function`` or an SGLang backend; empty to only record and trace.
        record_bytes: byte budget of the replay pack; 0 records nothing. Under tensor parallelism each process records its own
            heads.
        trace_bytes: byte budget of all traces of a process.
        model_hash: hash of the model, noted in the pack.

    Raises:
        KernelRefused: no candidate has this name.
        UsageError: the pack's folder holds something else.
    """
    if getattr(runner, "is_draft_worker", False):
        return backend  # the kernel contract does not cover the calls of a speculative draft model
    return _attachment(runner, folder, candidate, record_bytes, trace_bytes, model_hash).attach(backend, name)
