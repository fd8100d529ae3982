"""What SGLang loads, in every process, before it parses its arguments (entry-point group ``sglang.srt.plugins``).

It registers every published kernel as an attention backend, and meters every attention backend, SGLang's own ones too: calls
are counted by kernel, phase and layer, and each prefill batch is noted, so that a report can prove what ran.

Outside a server that assay started (no ``ASSAY_EVIDENCE``) the kernels can be served all the same; nothing is counted then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from assay.harness.attention import kernels

EVIDENCE = "ASSAY_EVIDENCE"
"""Environment variable: the folder in which a server leaves its counters and admissions."""
DELEGATE = "ASSAY_DELEGATE"
"""Environment variable: the backend that computes the phases which a kernel does not declare."""
KERNEL = "ASSAY_KERNEL"
"""Environment variable: a kernel to register besides the published ones, as ``module:function``."""

SHADOW = "ASSAY_SHADOW"
"""Environment variable: the candidate that stands beside whatever backend serves, to run in its shadow or in its place; needs
`EVIDENCE`. It does nothing until the control tells it to (`assay.harness.server.control`)."""
RECORD = "ASSAY_RECORD"
"""Environment variable: byte budget of the replay pack that is recorded while the control says `watch`; needs `EVIDENCE`."""
TRACE = "ASSAY_TRACE"
"""Environment variable: bytes that each process may keep in traces of attention outputs; needs `EVIDENCE`. It lets a server without
candidate be traced; one with a candidate can be traced without it, within `assay.harness.evidence.trace.BUDGET_BYTES`."""
MODEL_HASH = "ASSAY_MODEL_HASH"
"""Environment variable: hash of the model's files, to be noted in the replay pack."""


def register() -> None:
    """Entry point of the plugin group."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    names = set(kernels.published())
    if extra := os.environ.get(KERNEL):
        names.add(extra)
    for name in sorted(names - set(ATTENTION_BACKENDS)):
        ATTENTION_BACKENDS[name] = _factory(name)
    _add_choices(sorted(names))
    if folder := os.environ.get(EVIDENCE):
        _meter_all(ATTENTION_BACKENDS, Path(folder))
        if any(os.environ.get(name) for name in (SHADOW, RECORD, TRACE)):
            _attach_all(ATTENTION_BACKENDS, Path(folder))


def _factory(name: str) -> Any:
    def create(runner: Any) -> Any:
        from assay.harness.server.sglang_backend import serve_kernel

        return serve_kernel(name, kernels.load(name), runner, os.environ.get(DELEGATE, ""))

    return create


def _add_choices(names: list[str]) -> None:
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as CHOICES
    except ImportError:  # before 0.5.18 the list lived with the server arguments
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES as CHOICES
    CHOICES.extend(name for name in names if name not in CHOICES)


def _meter_all(backends: dict[str, Any], folder: Path) -> None:
    """Wrap every backend's factory, so that whatever it builds is metered."""

    def metered(name: str, create: Any) -> Any:
        def build(runner: Any) -> Any:
            from assay.harness.server.meter import meter

            return meter(create(runner), name, folder, str(runner.device))

        build.__dict__["assay_unmetered"] = create
        return build

    for name, create in list(backends.items()):
        backends[name] = metered(name, create)


def _attach_all(backends: dict[str, Any], folder: Path) -> None:
    """Wrap every backend's factory, so that shadow, substitution and trace stand beside whatever SGLang builds. What a candidate
    builds has none.
    """

    def beside(name: str, create: Any) -> Any:
        def build(runner: Any) -> Any:
            from assay.harness.evidence.trace import BUDGET_BYTES
            from assay.harness.server.attach import attach

            return attach(
                create(runner),
                name,
                runner,
                folder,
                candidate=os.environ.get(SHADOW, ""),
                record_bytes=int(os.environ.get(RECORD) or 0),
                trace_bytes=int(os.environ.get(TRACE) or BUDGET_BYTES),
                model_hash=os.environ.get(MODEL_HASH, ""),
            )

        build.__dict__["assay_unmetered"] = create.assay_unmetered
        return build

    for name, create in list(backends.items()):
        backends[name] = beside(name, create)
