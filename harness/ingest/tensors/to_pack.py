"""A dump → a replay pack, as far as it truthfully goes: what cannot be put together is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Mask, cumulative
from assay.harness.attention.oracle import oracle
from assay.harness.errors import AssayError, EvidenceError
from assay.harness.evidence.pack import CallMetadata, Source, read_manifest
from assay.harness.ingest.tensors.dump import TITLES, Dump, Imported
from assay.harness.ingest.tensors.flashinfer_calls import flashinfer_calls
from assay.harness.ingest.tensors.flashinfer_trace import calls_of
from assay.harness.ingest.tensors.forward_passes import DumpedPass, LayerCall, SequencePart, passes_of
from assay.harness.ingest.tensors.histories import CachedRows, Histories, choose, keys_values
from assay.harness.ingest.tensors.layout import DumpedModel
from assay.harness.ingest.tensors.whole_calls import WholeCall, hooked_calls
from assay.harness.localize.kernel_runs import measure
from assay.harness.server.pack_writer import RESERVOIR, PackWriter

_BUDGET_MB = 256
_ALL = 1 << 30
"""A reservoir that keeps every call: a trace was sampled by whoever recorded it, and does not name layers."""


def to_pack(
    dump: Dump, folder: Path, model: DumpedModel | None = None, model_name: str = "", budget_mb: int = _BUDGET_MB
) -> Imported:
    """Write a pack of a dump's attention calls.

    Args:
        dump: of a server, of FlashInfer's API, or of hooks that hold q, k and v.
        folder: new or empty.
        model: heads of the model, where the dump does not tell them.
        model_name: for the pack's source.
        budget_mb: MiB: calls are sampled by layer, phase, prefix and length.

    Raises:
        UsageError: the folder has other content.
        EvidenceError: the dump holds no call that can be replayed; the message states why.
    """
    made = _Maker(dump.path, TITLES[dump.format], folder, model_name, budget_mb)
    made.problems += [f"not read: {why}" for why in dump.refused]
    if dump.format in ("sglang-dumper", "sglang-passes"):
        made.add_passes(passes_of(dump, model, made.problems))
    elif dump.format == "kernel-api":
        made.add_whole(flashinfer_calls(dump, made.problems))
        if any((tensor.path.parent / "metadata.json").exists() for tensor in dump.tensors[:1]):
            made.add_passes(passes_of(dump, model, made.problems))
    else:
        made.add_whole(hooked_calls(dump, made.problems))
    return made.finish()


def trace_to_pack(trace: Path, folder: Path, budget_mb: int = _BUDGET_MB) -> Imported:
    """Write a pack of a FlashInfer Trace's attention workloads. They hold no outputs: the reference is the oracle.

    Raises:
        UsageError: the folder has other content.
        EvidenceError: the trace holds no attention call that can be replayed; the message states why.
    """
    made = _Maker(trace, "FlashInfer Trace", folder, "", budget_mb, reservoir=_ALL)
    made.add_whole((call, None) for call in calls_of(trace, made.problems))
    return made.finish()


class _Maker:
    """Adds calls to a pack, and counts what it refuses."""

    def __init__(
        self, dump: Path, title: str, folder: Path, model_name: str, budget_mb: int, reservoir: int = RESERVOIR
    ) -> None:
        source = Source(engine=title, model=model_name, model_hash="", reference=f"dump {dump.name}")
        self._dump, self._folder = dump, folder
        self._writer = PackWriter(folder, source, budget_mb << 20, reservoir=reservoir)
        self._refused: Counter[str] = Counter()
        self.problems: list[str] = []
        self.passes = self.kept = self.checked = 0

    def add_passes(self, passes: Iterable[DumpedPass]) -> None:
        """Add the calls of a server's forward passes."""
        known = Histories()
        for pass_ in passes:
            self.passes += 1
            parts: list[tuple[SequencePart, list[CachedRows]]] = []
            for part in pass_.sequences:
                prefix, why = choose(known.prefixes(part), partial(_fits, pass_, part))
                if prefix is None:
                    self._refused[f"a call with a cached prefix: {why}"] += 1
                    continue
                parts.append((part, prefix))
                known.add(part, prefix, pass_)
            if parts:
                for layer in pass_.layers:
                    self._add_layer(pass_, layer, parts)

    def _add_layer(
        self, forward_pass: DumpedPass, layer: int, parts: Sequence[tuple[SequencePart, list[CachedRows]]]
    ) -> None:
        here = [(part, prefix) for part, prefix in parts if keys_values(prefix, layer) is not None]
        if len(here) < len(parts):
            self._refused[f"a sequence of layer {layer}: an earlier pass did not dump that layer"] += len(parts) - len(
                here
            )
        if not here:
            return
        made = _call_of(forward_pass, layer, here)
        out = forward_pass.layers[layer].out
        rows = torch.cat([torch.arange(part.rows.start, part.rows.stop) for part, _ in here])
        self._add(made, None if out is None else out[rows], tuple(part.request for part, _ in here))

    def add_whole(self, calls: Iterable[WholeCall]) -> None:
        """Add calls that a dump holds with all their keys and values."""
        for call, out in calls:
            self.passes += 1
            self._add(_masked_right(call, out), out, tuple("" for _ in call.lens_q))

    def _add(self, call: AttentionCall, out: Tensor | None, requests: tuple[str, ...]) -> None:
        phase = "decode" if call.phase == "decode" else "extend"
        about = CallMetadata(call.layer, phase, tuple(call.lens_q), tuple(call.prefixes), requests)  # type: ignore[arg-type]
        if not self._writer.wants(about):
            return
        try:
            good = out is None or _is_truth(call, out)
        except (AssayError, ValueError) as error:
            self._refused[f"a call: {str(error).splitlines()[0]}"] += 1
            return
        if not good:
            self._refused["a call: its dumped output is not the attention of the q, k and v that were dumped"] += 1
            return
        self.checked += out is not None
        self.kept += 1
        self._writer.add(about, call, oracle(call).to(call.q.dtype) if out is None else out)

    def finish(self) -> Imported:
        """Write the pack.

        Raises:
            EvidenceError: it would have no call.
        """
        for problem in self.problems:
            self._refused[problem] += 1
        refused = tuple(self._refused.most_common())
        if not self.kept:
            why = "; ".join(reason for reason, _ in refused[:3]) or "it has no attention call with q, k and v"
            raise EvidenceError(
                f"{self._dump} cannot become a replay pack: {why}.",
                "q, k and v of attention calls, with those of cached tokens",
                "dump q, k, v and the output of attention, from the server's first request on",
            )
        self._writer.flush()
        manifest = read_manifest(self._folder)
        with_prefix = sum(max(call.prefix) > 0 for call in manifest.calls)
        return Imported(manifest, self.passes, self.checked, with_prefix, refused)


def _call_of(
    forward_pass: DumpedPass, layer: int, parts: Sequence[tuple[SequencePart, list[CachedRows]]]
) -> AttentionCall:
    """Make the call of one layer for some of a pass's sequences, each with its prefix."""
    tensors: LayerCall = forward_pass.layers[layer]
    q, k, v, lens_q, lens_k = [], [], [], [], []
    for part, prefix in parts:
        cached = keys_values(prefix, layer)
        assert cached is not None
        q.append(tensors.q[part.rows])
        k += [*cached[0], tensors.k[part.rows]]
        v += [*cached[1], tensors.v[part.rows]]
        lens_q.append(part.new)
        lens_k.append(part.prefix + part.new)
    decode = all(part.new == 1 and part.prefix for part, _ in parts)
    return AttentionCall(
        torch.cat(q).contiguous(), torch.cat(k).contiguous(), torch.cat(v).contiguous(), cumulative(lens_q), cumulative(lens_k),
        CallSpec(tensors.q.shape[-1] ** -0.5, layer=layer, phase="decode" if decode else "extend"),
    )  # fmt: skip


def _masked_right(call: AttentionCall, out: Tensor | None) -> AttentionCall:
    """Give the call the mask that its output has: engines set it after what is dumped (FlashInfer's ``forward(causal=...)``)."""
    other = call.with_spec(mask=Mask(causal=not call.causal))
    return call if out is None or _is_truth(call, out) or not _is_truth(other, out) else other


def _fits(forward_pass: DumpedPass, part: SequencePart, pieces: list[CachedRows]) -> bool | None:
    """Return True if this prefix gives the dumped output of the first layer that has one; None if none has."""
    for layer, tensors in forward_pass.layers.items():
        if tensors.out is not None and keys_values(pieces, layer) is not None:
            return _is_truth(_call_of(forward_pass, layer, [(part, pieces)]), tensors.out[part.rows])
    return None


def _is_truth(call: AttentionCall, out: Tensor) -> bool:
    """Return True if an output is the attention of its call, within the bound of a kernel of its dtype."""
    return measure(call, out.contiguous()).worst <= 1.0
