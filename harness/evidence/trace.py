"""Traces: the attention outputs that a model used for one request, by layer; what a server's processes write, and how it is read.

At the end of each forward pass a process writes ``trace/<label>/<pid>-<pass>.safetensors``: input tokens and positions of the kept
rows, and per layer their outputs in this process's heads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, deserialize, safe_open

from assay.harness.errors import EvidenceError
from assay.harness.evidence.nonce import RunRecord, check_run
from assay.harness.files import write_whole

if TYPE_CHECKING:  # a report reads traces and must not wait for torch
    from torch import Tensor

FOLDER = "trace"
SCHEMA: Literal["assay.trace/2"] = "assay.trace/2"
_LAYER = "layer."
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}
"""Dtypes in safetensors files -> NumPy dtypes."""
_REFUSED = ".refused"


class TraceHeader(RunRecord):
    """The contents of one file of a trace.

    Attributes:
        request: the engine's request id.
        phase: "extend" or "decode".
        number: index of the pass in the trace, from 0.
        rank: rank of the process, which has its own share of the heads (tensor parallelism).
        ranks: number of those processes.
    """

    schema_id: Literal["assay.trace/2"] = SCHEMA
    request: str
    phase: Literal["extend", "decode"]
    number: int
    rank: int
    ranks: int


@dataclass(frozen=True)
class Trace:
    """Attention outputs of one request, as the model used them. Rows are in the order of the passes.

    Attributes:
        label: the trace's label.
        tokens: input token of each row, int64 [rows].
        positions: position of each row in the request, cached prefix included, int64 [rows].
        phases: "extend" or "decode" for each row.
        outputs: layer -> float32 [rows, heads, head_dim_v].
    """

    label: str
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    phases: tuple[str, ...]
    outputs: dict[int, NDArray[np.float32]]


def write_pass(
    folder: Path, label: str, tokens: Tensor, positions: Tensor, outputs: Mapping[int, Tensor],
    header: TraceHeader,
) -> None:  # fmt: skip
    """Write the rows that one process kept of one pass.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        label: the trace's label.
        tokens: int64 [rows].
        positions: int64 [rows].
        outputs: layer -> [rows, this process's heads, head_dim_v], of any floating dtype.
        header: what they belong to.
    """
    import safetensors.torch

    path = folder / FOLDER / label / f"{os.getpid()}-{header.number:06d}.safetensors"
    tensors = {"tokens": tokens, "positions": positions} | {f"{_LAYER}{n}": out for n, out in outputs.items()}
    content = safetensors.torch.save(tensors, {"header": header.model_dump_json()})
    write_whole(path, content, durable=False)


def write_refusal(folder: Path, label: str, why: str) -> None:
    """Note that a trace is incomplete, and why. Reading it then fails."""
    write_whole(folder / FOLDER / label / f"{os.getpid()}{_REFUSED}", why, durable=False)


def read_trace(folder: Path, label: str, run: str = "") -> Trace:
    """Read the trace that a server's processes wrote under a label.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        label: the label that the control named.
        run: the nonce that each file must carry; empty to accept any.

    Raises:
        EvidenceError: nothing was traced under this label, the trace was refused (over budget, or more than one request), or a
            file is damaged, missing or of another run.
    """
    place = folder / FOLDER / label
    for note in sorted(place.glob(f"*{_REFUSED}")):
        raise EvidenceError(
            f"The trace {label!r} is incomplete: {note.read_text()}.",
            "one request under each label, within the byte budget",
            "trace a shorter request under a new label, or raise ASSAY_TRACE",
        )
    passes: dict[int, list[_Part]] = {}
    for file in sorted(place.glob("*.safetensors")):
        part = _read(file)
        check_run(file, part[0].run, run)
        passes.setdefault(part[0].number, []).append(part)
    if not passes:
        raise EvidenceError(
            f"{place} is empty: no pass was traced.",
            "a request that was sent while the control named this label",
            "check that the server was started with ASSAY_TRACE, and see its log; "
            "passes that are replayed CUDA graphs cannot be traced: start the server without them",
        )
    if len({header.request for parts in passes.values() for header, *_ in parts}) > 1:
        raise EvidenceError(
            f"The trace {label!r} has more than one request.", "one request under each label", "use a new label"
        )
    if sorted(passes) != list(range(len(passes))):
        raise _damaged(place, f"there are {len(passes)} passes, but their numbers go up to {max(passes)}")
    return _joined(place, label, [passes[number] for number in sorted(passes)])


_Part = tuple[TraceHeader, NDArray[np.int64], NDArray[np.int64], dict[int, NDArray[np.float32]]]
"""One file, one process's share of one pass: its header, tokens, positions and outputs."""


def _read(path: Path) -> _Part:
    try:
        with safe_open(path, framework="numpy") as file:
            header = TraceHeader.model_validate_json((file.metadata() or {})["header"])
        views = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        tensors = {name: _array(view) for name, view in views}
        outputs = {
            int(name.removeprefix(_LAYER)): array.astype(np.float32, copy=False)
            for name, array in tensors.items()
            if name.startswith(_LAYER)
        }
        return header, tensors["tokens"], tensors["positions"], outputs
    except (SafetensorError, OSError, KeyError, ValidationError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None


def _array(view: Mapping[str, Any]) -> NDArray[Any]:
    """Convert a tensor of a safetensors file to an array, without importing torch. bfloat16, which NumPy lacks, becomes float32."""
    if view["dtype"] == "BF16":
        bits = np.frombuffer(view["data"], np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(view["shape"])
    return np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])


def _joined(place: Path, label: str, passes: Sequence[Sequence[_Part]]) -> Trace:
    complete = [_heads_joined(place, parts) for parts in passes]
    layers = [set(outputs) for outputs in complete]
    if any(layer != layers[0] for layer in layers):
        raise _damaged(place, "the passes have different layers")
    firsts = [parts[0] for parts in passes]
    return Trace(
        label=label,
        tokens=np.concatenate([tokens for _, tokens, _, _ in firsts]),
        positions=np.concatenate([positions for _, _, positions, _ in firsts]),
        phases=tuple(header.phase for header, tokens, _, _ in firsts for _ in tokens),
        outputs={
            layer: np.concatenate(_widened([outputs[layer] for outputs in complete])) for layer in sorted(layers[0])
        },
    )


def _widened(passes: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Fill a layer's outputs of some passes, [rows, heads, dims], with zeros to the widest.

    Latent attention may be absorbed in some passes alone: then these return latents, and the others the values of heads.
    """
    widest = max(outputs.shape[2] for outputs in passes)
    return [np.pad(outputs, ((0, 0), (0, 0), (0, widest - outputs.shape[2]))) for outputs in passes]


def _heads_joined(place: Path, parts: Sequence[_Part]) -> dict[int, NDArray[np.float32]]:
    """Join the outputs of one pass by layer, with the heads of all processes in rank order."""
    first, *rows, _ = parts[0]
    for _, *others, _ in parts:
        if not all(map(np.array_equal, rows, others)):
            raise _damaged(place, f"the processes kept different rows of pass {first.number}")
    joined = {}
    for layer in {layer for *_, outputs in parts for layer in outputs}:
        shares = {header.rank: outputs[layer] for header, *_, outputs in parts if layer in outputs}
        if sorted(shares) != list(range(first.ranks)):
            raise _damaged(
                place, f"{len(shares)} of {first.ranks} processes wrote layer {layer} of pass {first.number}"
            )
        joined[layer] = np.concatenate([shares[rank] for rank in sorted(shares)], axis=1)
    return joined


def _damaged(path: Path, what: str) -> EvidenceError:
    return EvidenceError(f"{path} is damaged: {what}.", f"files of {SCHEMA}", "trace again under a new label")
