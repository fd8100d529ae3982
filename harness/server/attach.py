"""What stands beside a server's attention backends: shadow, layer substitution and trace, each switched by the control.

A backend is attached to by wrapping its ``forward_extend`` and ``forward_decode``. When a forward pass begins the control is
looked at (`assay.harness.server.control`); while everything is off, a call costs one comparison more.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.evidence.pack import Source
from assay.harness.evidence.pack_writer import PackWriter
from assay.harness.server.candidates import make_candidate
from assay.harness.server.control import Control, ControlReader, Setting
from assay.harness.server.graph_counts import capturing
from assay.harness.server.paging import Pages
from assay.harness.server.passes import EngineCall, Pass, Phase, pass_of
from assay.harness.server.shadow import PACK_FOLDER, Shadow
from assay.harness.server.substitution import Substitution
from assay.harness.server.tracer import Tracer


class Attachment:
    """What one process has beside its backends: one, also where prefill and decode have backends of their own.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``), in which the control lies.
        shadow: runs the candidate while the control says `watch`.
        substitution: gives the output of the layers that the control names.
        tracer: keeps outputs while the control names a label.
    """

    def __init__(self, folder: Path, shadow: Shadow, substitution: Substitution, tracer: Tracer) -> None:
        self._shadow, self._substitution, self._tracer = shadow, substitution, tracer
        self._reader = ControlReader(folder)
        self._setting = Setting()
        self._off = True
        self._batch: Any = None
        self._pass: Pass | None = None
        self._passes = 0
        self._highest = -1
        self._last_layer: int | None = None

    def attach(self, backend: Any, name: str) -> Any:
        """Stand beside every call of an SGLang backend object from now on, and return it."""
        self._shadow.references.add(name)

        def attached(phase: Phase, forward: Any) -> Any:
            def call(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
                out = forward(q, k, v, layer, forward_batch, *args, **kwargs)
                if torch.compiler.is_compiling():
                    return out  # compiled code is captured, and what is captured is not looked into
                if self._batch is not forward_batch:
                    self._begin(forward_batch)
                self._highest = max(self._highest, layer.layer_id)
                # Batches of no request are SGLang's own: warm-up and capture of CUDA graphs.
                if self._off or not isinstance(out, Tensor) or not getattr(forward_batch, "rids", None) or capturing():
                    return out
                return self._use(phase, (q, k, v), layer, forward_batch, kwargs, out, name)

            return call

        backend.forward_extend = attached("extend", backend.forward_extend)
        backend.forward_decode = attached("decode", backend.forward_decode)
        return backend

    def _begin(self, batch: Any) -> None:
        """A pass begins: what the control says now holds until it ends."""
        self._batch, self._pass = batch, None
        if self._highest >= 0:
            self._last_layer = max(self._highest, self._last_layer or 0)
        self._tracer.write()
        before, self._setting = self._setting.watch, self._reader.latest()
        if before and not self._setting.watch:
            self._shadow.write()
        if self._setting.watch not in ("", before):
            self._shadow.begin()
        self._off = self._setting.control == Control()

    def _use(
        self, phase: Phase, qkv: tuple[Any, Any, Any], layer: Any, batch: Any, kwargs: dict[str, Any], out: Tensor,
        reference: str,
    ) -> Tensor:  # fmt: skip
        """What the model uses of a call; what is switched on sees it."""
        control, number = self._setting.control, layer.layer_id
        substitute = number in control.substitute
        try:
            if self._pass is None:
                self._pass = pass_of(self._passes, phase, batch, out.shape[0])
                self._passes += 1
        except KernelRefused as error:
            if substitute:
                raise
            if control.watch:
                self._shadow.note(number, phase, error)
            if control.trace:
                self._tracer.refuse(control.trace, str(error))
        else:
            extra = {key: value for key, value in kwargs.items() if key != "save_kv_cache"}
            call = EngineCall(phase, *qkv, layer, batch, self._pass, extra)
            if control.watch:
                self._shadow.observe(call, out)
            if substitute:
                out = self._substitution.output(call, out, reference, self._setting)
            if control.trace:
                self._tracer.keep(control.trace, call, out)
        if number == self._last_layer:
            self._end()
        return out

    def _end(self) -> None:
        if self._setting.control.watch:
            self._shadow.end_pass()
        self._tracer.write()


@cache
def _attachment(
    runner: Any, folder: Path, candidate: str, record_bytes: int, trace_bytes: int, model_hash: str
) -> Attachment:
    """What a server's process has: one."""
    import sglang
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    pages, rank, new_writer = Pages(runner), int(get_tensor_model_parallel_rank()), None
    if record_bytes and rank == 0:
        source = Source(
            engine=f"SGLang {sglang.__version__} on {runner.device}",
            model=str(runner.server_args.model_path),
            model_hash=model_hash,
            reference=str(runner.server_args.attention_backend),
            candidate=candidate,
        )
        new_writer = partial(PackWriter, folder / PACK_FOLDER, source, record_bytes)
    built = make_candidate(candidate, runner, pages) if candidate else None
    return Attachment(
        folder,
        Shadow(folder, built, new_writer, pages, rank),
        Substitution(folder, built),
        Tracer(folder, trace_bytes, rank, int(get_tensor_model_parallel_world_size())),
    )


def attach(
    backend: Any, name: str, runner: Any, folder: Path, candidate: str, record_bytes: int, trace_bytes: int,
    model_hash: str,
) -> Any:  # fmt: skip
    """Attach to an SGLang backend object, and return it.

    Args:
        backend: the reference, whose outputs the model uses unless the control says otherwise.
        name: its name.
        runner: SGLang's ModelRunner.
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: a published kernel, a ``module:function`` or a backend of SGLang's; empty only to record and trace.
        record_bytes: budget of the replay pack; 0 records nothing. Under tensor parallelism the first process records its heads.
        trace_bytes: what each process may keep in traces.
        model_hash: of the model, for the pack.

    Raises:
        KernelRefused: nothing has the candidate's name.
        UsageError: the replay pack's folder holds something else.
    """
    if getattr(runner, "is_draft_worker", False):
        return backend  # a speculative draft model, whose calls no kernel of the contract serves
    return _attachment(runner, folder, candidate, record_bytes, trace_bytes, model_hash).attach(backend, name)
