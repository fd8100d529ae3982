"""A dump of a server → its forward passes: which sequences were computed, and q, k, v and the output of each attention call.

From SGLang 0.5.23: ``debug_utils/dumper.py`` in mode "all", ``debug_utils/tensor_dump_forward_hook.py`` and
``kernels/kernel_api_logging.py`` at level 10. None of them dumps the KV cache: k and v are those of the new tokens.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.ingest.tensors.dump import Dump, StoredTensor
from assay.harness.ingest.tensors.layout import DumpedModel
from assay.harness.ingest.tensors.tensor_files import Unreadable, load_torch
from assay.harness.reading import whole_file

_ATTENTION = "srt.layers.attention.base_attn_backend.AttentionBackend.forward"
_FUSED = "kernels.fused_op.BaseFusedOp.forward"
_BATCH = re.compile(r"forward_mode=<ForwardMode\.(\w+)\b.*?batch_size=(\d+)")


@dataclass(frozen=True)
class SequencePart:
    """One sequence of a forward pass.

    Attributes:
        request: the engine's request id; empty if the dump does not tell.
        prefix: tokens that were in the KV cache.
        rows: of the pass that are its new tokens.
    """

    request: str
    prefix: int
    rows: slice

    @property
    def new(self) -> int:
        """New tokens."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class LayerCall:
    """The inputs of one layer's attention in a pass, for its new tokens only.

    Attributes:
        q: [new, heads, head_dim].
        k: [new, kv_heads, head_dim], after rotary embedding.
        v: [new, kv_heads, head_dim_v].
        out: [new, heads, head_dim_v]; None if it was not dumped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None


@dataclass(frozen=True)
class DumpedPass:
    """One forward pass.

    Attributes:
        number: in the dump.
        sequences: in the order of their rows.
        ids: int64 [new], the new tokens; None if they were not dumped.
        layers: by layer.
    """

    number: int
    sequences: tuple[SequencePart, ...]
    ids: Tensor | None
    layers: dict[int, LayerCall]


class _MissingPart(EvidenceError):
    """A pass lacks what a call needs."""


def _lacking(number: int, what: str, do: str) -> _MissingPart:
    """Make the error for a pass that lacks something."""
    expected = "q, k and v of every attention call, positions and sequence lengths"
    return _MissingPart(f"pass {number} lacks {what}", expected, do)


def _split(
    number: int, positions: Tensor, lens: Sequence[int] | None, requests: Sequence[str], count: int | None = None
) -> tuple[SequencePart, ...]:
    """List the sequences of a pass.

    Args:
        number: of the pass.
        positions: int [rows], of each new token in its sequence.
        lens: all tokens per sequence, cached prefix included; None if they were not dumped: a sequence then ends where the
            positions do not go on.
        requests: ids, or nothing.
        count: sequences, where it is known otherwise.

    Raises:
        MissingPart: the positions do not fit the lengths, or not the count.
    """
    at = positions.tolist()
    rows = list(_by_positions(number, at, count) if lens is None else _by_lengths(number, at, lens))
    named = [*requests[: len(rows)], *[""] * (len(rows) - len(requests))]
    return tuple(SequencePart(name, at[part.start], part) for name, part in zip(named, rows, strict=True))


def _by_positions(number: int, at: Sequence[int], count: int | None) -> Iterator[slice]:
    ends = [i + 1 for i in range(len(at)) if i + 1 == len(at) or at[i + 1] != at[i] + 1]
    if count is not None and count == len(at):
        ends = list(range(1, len(at) + 1))
    if count is not None and count != len(ends):
        what = f"the lengths of its {count} sequences, and its positions show {len(ends)}"
        raise _lacking(number, what, "dump with DUMPER_ENABLE=1, which keeps seq_lens")
    yield from map(slice, [0, *ends[:-1]], ends)


def _by_lengths(number: int, at: Sequence[int], lens: Sequence[int]) -> Iterator[slice]:
    start = 0
    for index, length in enumerate(lens):
        if start >= len(at):
            break
        stop = start + length - at[start]
        if stop <= start or stop > len(at) or at[stop - 1] != length - 1:
            what = f"whole sequences: sequence {index} has {length} tokens and starts at {at[start]}"
            raise _lacking(number, what, "dump the pass again")
        yield slice(start, stop)
        start = stop
    padded = start != len(at) and all(position == at[start] for position in at[start:])  # of a CUDA graph
    if not start or (start != len(at) and not padded):
        raise _lacking(number, "sequence lengths that fit its positions", "dump without padding or CUDA graphs")


def _heads_of(tensor: Tensor, head_dim: int | None, number: int) -> Tensor:
    """Split [rows, heads * head_dim] into [rows, heads, head_dim].

    Raises:
        MissingPart: the head dim is not known, or does not divide the width.
    """
    if tensor.ndim == 3:
        return tensor
    if head_dim is None:
        what = f"the head dim: q, k or v is {list(tensor.shape)}"
        raise _lacking(number, what, "name the model's folder with --model, for its config.json")
    if tensor.shape[-1] % head_dim:
        what = f"heads of {head_dim}: q, k or v has width {tensor.shape[-1]}"
        raise _lacking(number, what, "name the folder of the model that was dumped with --model")
    return tensor.reshape(tensor.shape[0], -1, head_dim)


def passes_of(dump: Dump, model: DumpedModel | None, problems: list[str]) -> Iterator[DumpedPass]:
    """Yield the forward passes of a server's dump, in order. What cannot be used is added to `problems`."""
    made: Iterable[Callable[[], DumpedPass]]
    if dump.format == "kernel-api":
        made = (partial(_api_pass, number, held, model) for number, held in _api_passes(dump, model))
    else:
        read = _dumper_pass if dump.format == "sglang-dumper" else _hooked_pass
        by_step: dict[int, list[StoredTensor]] = defaultdict(list)
        for tensor in dump.tensors:
            if not tensor.place.rank or tensor.place.rank == "TP0_PP0":
                by_step[tensor.place.step].append(tensor)
        made = (partial(read, number, held, model) for number, held in sorted(by_step.items()))
    for make in made:
        try:
            yield make()
        except (_MissingPart, Unreadable) as error:
            problems.append(error.found + (f"; {error.do}" if error.do else ""))


def _layer_call(
    number: int, model: DumpedModel | None, tensors: Sequence[Tensor], out: StoredTensor | None
) -> LayerCall:
    q, k, v = (_heads_of(tensor, model.head_dim if model else None, number) for tensor in tensors)
    return LayerCall(q, k, v, None if out is None else out.map().reshape(q.shape[0], q.shape[1], v.shape[-1]))


def _dumper_pass(number: int, held: list[StoredTensor], model: DumpedModel | None) -> DumpedPass:
    outside = {tensor.place.name: tensor for tensor in held if tensor.place.layer is None}

    def value(name: str) -> Any:
        if name not in outside:
            raise _lacking(number, name, "dump with DUMPER_NON_INTRUSIVE_MODE=all and without a filter")
        return load_torch(outside[name].path)["value"]

    positions, lens = value("positions"), value("seq_lens").tolist()
    requests = [str(x) for x in value("rids")] if "rids" in outside else []
    ids = value("input_ids") if "input_ids" in outside else None
    inside: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in held:
        if tensor.place.layer is not None:
            inside[tensor.place.layer][tensor.place.name] = tensor
    layers = {}
    for layer, names in inside.items():
        attention = (n for n in names if n.endswith(".inputs.2") and "rotary" not in n and f"{n[:-1]}1" in names)
        module = next(attention, "").removesuffix(".inputs.2")
        if module:
            inputs = [names[f"{module}.inputs.{i}"].map() for i in range(3)]
            layers[layer] = _layer_call(number, model, inputs, names.get(f"{module}.output"))
    return _checked(number, _split(number, positions, lens, requests), ids, layers)


def _hooked_pass(number: int, held: list[StoredTensor], model: DumpedModel | None) -> DumpedPass:
    names = {tensor.key.split("/", 2)[2]: tensor for tensor in held}
    info = {name.rpartition(".")[2]: tensor for name, tensor in names.items() if ".forward_batch_info." in name}
    if not {"positions", "seq_lens"} <= set(info):
        raise _lacking(number, "forward_batch_info", "dump with --debug-tensor-dump-output-folder of SGLang 0.5.23")
    layers = {}
    # SGLang's rotary embedding is one module for all layers, and each layer's hook keeps its latest output: the last layer's.
    rotary = {
        tensor.place.layer: (name.removesuffix("rotary_emb.0"), tensor.map())
        for name, tensor in names.items()
        if name.endswith("self_attn.rotary_emb.0") and tensor.place.layer is not None
    }
    last = max(rotary, default=0)
    for layer, (base, q) in rotary.items():
        if layer != last and torch.equal(q, rotary[last][1]):
            continue
        if {f"{base}rotary_emb.1", f"{base}qkv_proj"} <= set(names):
            k, qkv = names[f"{base}rotary_emb.1"].map(), names[f"{base}qkv_proj"].map()
            v = qkv[:, q[0].numel() + k[0].numel() :]
            layers[layer] = _layer_call(number, model, (q, k, v), names.get(f"{base}attn"))
    sequences = _split(number, info["positions"].map(), info["seq_lens"].map().tolist(), ())
    return _checked(number, sequences, info["input_ids"].map() if "input_ids" in info else None, layers)


def _api_passes(dump: Dump, model: DumpedModel | None) -> Iterator[tuple[int, Any]]:
    """Yield calls of attention, a layer each: passes begin with layer 0. Positions are the preceding rotary embedding's."""
    calls: list[tuple[Path, Path | None]] = []
    rotary: Path | None = None
    for folder in sorted({tensor.path.parent for tensor in dump.tensors}):
        function = re.sub(r"^\d{8}_\d{6}_\d+_pid\d+_|_call\d+$", "", folder.name)
        if function == _FUSED and _is_rotary(folder):
            rotary = folder
        elif function == _ATTENTION:
            calls.append((folder, rotary))
            rotary = None
    layers = model.layers if model else 0
    if calls and not layers:
        unnamed = "kernel API logs do not name the layer of a call."
        raise _MissingPart(unnamed, "the number of layers", "name the model's folder with --model")
    for start in range(0, len(calls) - layers + 1, max(layers, 1)):
        yield start // layers, calls[start : start + layers]


def _is_rotary(folder: Path) -> bool:
    """Return True if a call is a rotary embedding: it takes positions, q and k, and gives q and k."""
    try:
        about = json.loads(whole_file(folder / "metadata.json"))
        takes, gives = about["input_tensor_keys"][:3], about["output_tensor_keys"]
        if (takes, gives) != (["arg_0", "arg_1", "arg_2"], ["result_0", "result_1"]):
            return False
        first = load_torch(folder / "inputs.pt")["arg_0"]
        return bool(first.ndim == 1 and not first.dtype.is_floating_point)
    except (OSError, ValueError, KeyError, Unreadable):
        return False


def _api_pass(number: int, held: list[tuple[Path, Path | None]], model: DumpedModel | None) -> DumpedPass:
    layers, positions, batch = {}, None, None
    for layer, (folder, rotary) in enumerate(held):
        about = json.loads(whole_file(folder / "metadata.json"))["input_metadata"].get("arg_4")
        given = load_torch(folder / "inputs.pt")
        if not {"arg_0", "arg_1", "arg_2"} <= set(given):
            raise _lacking(number, f"k and v of layer {layer}", "dump a model that is not MLA")
        batch = _BATCH.search(str(about.get("repr", "")) if isinstance(about, dict) else "") or batch
        k, v = given["arg_1"], given["arg_2"]
        q = _heads_of(given["arg_0"], k.shape[-1] if k.ndim == 3 else model.head_dim if model else None, number)
        outputs = folder / "outputs.pt"
        out = load_torch(outputs)["result"].reshape(q.shape[0], q.shape[1], v.shape[-1]) if outputs.exists() else None
        layers[layer] = LayerCall(q, k, v, out)
        if rotary is not None:
            positions = load_torch(rotary / "inputs.pt")["arg_0"]
    if positions is None:
        raise _lacking(number, "positions", "let SGLANG_KERNEL_API_DUMP_INCLUDE admit kernels.fused_op.*")
    count = int(batch.group(2)) if batch else None
    return _checked(number, _split(number, positions, None, (), count), None, layers)


def _checked(
    number: int, sequences: tuple[SequencePart, ...], ids: Tensor | None, layers: dict[int, LayerCall]
) -> DumpedPass:
    if not layers:
        do = "dump the inputs of attention, of all layers that are of interest"
        raise _lacking(number, "attention calls with q, k and v", do)
    rows = sequences[-1].rows.stop
    for layer, call in layers.items():
        if min(call.q.shape[0], call.k.shape[0], call.v.shape[0]) < rows or call.q.shape[1] % call.k.shape[1]:
            raise _lacking(number, f"{rows} rows of q, k and v in layer {layer}", "dump the pass again")
    return DumpedPass(number, sequences, None if ids is None else ids.to(torch.int64), dict(sorted(layers.items())))
