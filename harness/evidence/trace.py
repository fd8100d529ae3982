"""Traces: the attention outputs that a model used for one request, by layer, as a server's processes write them.

At the end of each forward pass, a process writes ``trace/<label>/<pid>-<pass>.safetensors``: the input tokens and positions of the
kept rows, and per layer their outputs for this process's heads. For a request that the control names, there are also q, K and V of
these rows as computed, K and V of the whole sequence as the last row reads them, and the output of the whole decoder layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.errors import EvidenceError
from assay.harness.evidence.run_file import RunRecord, damaged, read_arrays, write_arrays
from assay.harness.files import write_whole

if TYPE_CHECKING:  # reports read traces and must not wait for torch
    from torch import Tensor

FOLDER = "trace"
OUTPUT, QUERY = "layer.", "q."
"""Names of a file's tensors, before the layer number: outputs and queries of the kept rows, [rows, heads, dims]."""
NEW = ("new_k.", "new_v.")
"""The same for K and V of the kept rows, as computed, [rows, kv heads, dims]."""
READ = ("k.", "v.")
"""The same for K and V as the last query reads them, [tokens, kv heads, dims]. The last token is the query's own."""
LAYER_OUTPUT = "after."
"""The same for what the decoder layer returns, its residual included: [rows, 1, hidden size]."""
_REFUSED = ".refused"
_DO = "trace again under a new label"


class TraceHeader(RunRecord):
    """The contents of one file of a trace.

    Attributes:
        request: the engine's request id.
        phase: "extend" or "decode".
        number: index of the pass in the trace, from 0.
        rank: rank of the process, which has its own share of the heads (tensor parallelism).
        ranks: number of ranks.
    """

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
        queries: layer -> float32 [rows, heads, head_dim], or empty if only outputs were kept.
        new_keys: layer -> float32 [rows, kv heads, head_dim], as computed, without layers that read another layer's keys.
        new_values: as `new_keys`.
        keys: layer -> float32 [tokens, kv heads, head_dim], as the query at the last of `positions` reads them, with its own last;
            empty if they were not kept.
        values: as `keys`.
        layer_outputs: layer -> float32 [rows, 1, hidden size], what the whole decoder layer returns, its residual included; without
            layers that were compiled or shared by several processes in some pass.
    """

    label: str
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    phases: tuple[str, ...]
    outputs: dict[int, NDArray[np.float32]]
    queries: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    new_keys: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    new_values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    keys: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    layer_outputs: dict[int, NDArray[np.float32]] = field(default_factory=dict)


def write_pass(
    folder: Path, label: str, tokens: Tensor, positions: Tensor, kept: Mapping[str, Tensor],
    header: TraceHeader,
) -> None:  # fmt: skip
    """Write the rows that a process kept from a pass.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        tokens: int64 [rows].
        positions: int64 [rows].
        kept: tensors of this process's heads, in any floating dtype, by `OUTPUT`, `QUERY`, `NEW`, `READ` or `LAYER_OUTPUT` and the
            layer number. They are written as float32, since NumPy does not have bfloat16.
    """
    path = folder / FOLDER / label / f"{os.getpid()}-{header.number:06d}.safetensors"
    tensors = {"tokens": tokens.long(), "positions": positions} | {name: part.float() for name, part in kept.items()}
    write_arrays(path, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}, header, durable=False)


def write_refusal(folder: Path, label: str, why: str) -> None:
    """Note that a trace is incomplete, and why. Reading it then fails."""
    write_whole(folder / FOLDER / label / f"{os.getpid()}{_REFUSED}", why, durable=False)


def read_trace(folder: Path, label: str, run: str = "") -> Trace:
    """Read the trace that a server's processes wrote under a label.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        label: the trace's label in the control.
        run: the nonce that each file must carry, or empty to accept any.

    Raises:
        EvidenceError: nothing was traced under this label, the trace was refused (over budget, or several requests), or a file is
            damaged, missing or of another run.
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
        header, arrays = read_arrays(file, TraceHeader, run, _DO)
        if not {"tokens", "positions"} <= arrays.keys():
            raise damaged(file, "tokens or positions are missing", _DO)
        passes.setdefault(header.number, []).append((header, arrays))
    if not passes:
        raise EvidenceError(
            f"{place} is empty: the server traced no pass.",
            "a request sent while the control named this label",
            "check that the server was started with ASSAY_TRACE, and see its log",
        )
    if len({header.request for parts in passes.values() for header, _ in parts}) > 1:
        raise EvidenceError(
            f"The trace {label!r} has more than one request.", "one request under each label", "use a new label"
        )
    if sorted(passes) != list(range(len(passes))):
        raise damaged(place, f"there are {len(passes)} passes, but their numbers go up to {max(passes)}", _DO)
    joined = [_heads_joined(place, passes[number]) for number in sorted(passes)]

    def rows(prefix: str, some: bool = False) -> dict[int, NDArray[np.float32]]:
        by_pass = [_layers(kept, prefix) for kept in joined]
        of_all = set.intersection(*map(set, by_pass))
        if not some and any(layers.keys() != of_all for layers in by_pass):
            raise damaged(place, "the passes have different layers", _DO)
        return {layer: np.concatenate(_widened([layers[layer] for layers in by_pass])) for layer in sorted(of_all)}

    return Trace(
        label=label,
        tokens=np.concatenate([kept["tokens"] for kept in joined]),
        positions=np.concatenate([kept["positions"] for kept in joined]),
        phases=tuple(passes[number][0][0].phase for number, kept in enumerate(joined) for _ in kept["tokens"]),
        outputs=rows(OUTPUT), queries=rows(QUERY), new_keys=rows(NEW[0]), new_values=rows(NEW[1]),
        keys=_layers(joined[-1], READ[0]), values=_layers(joined[-1], READ[1]), layer_outputs=rows(LAYER_OUTPUT, some=True),
    )  # fmt: skip


# A file, with a process's share of a pass: its header, and by name the tokens, the positions, and each layer's kept tensors.
_Part = tuple[TraceHeader, dict[str, NDArray[Any]]]


def _layers(kept: Mapping[str, NDArray[Any]], prefix: str) -> dict[int, NDArray[np.float32]]:
    """Return the tensors of one kind by layer."""
    return {int(name.removeprefix(prefix)): array for name, array in kept.items() if name.startswith(prefix)}


def _widened(passes: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Pad a layer's outputs from several passes, [rows, heads, dims], with zeros to the widest."""
    # Latent attention may be absorbed in only some passes, which then return latents while the others return the heads' values.
    widest = max(outputs.shape[2] for outputs in passes)
    return [np.pad(outputs, ((0, 0), (0, 0), (0, widest - outputs.shape[2]))) for outputs in passes]


def _heads_joined(place: Path, parts: Sequence[_Part]) -> dict[str, NDArray[Any]]:
    """Join the kept tensors of a pass, with the heads of all processes in rank order."""
    first, kept = parts[0]
    joined = {name: kept[name] for name in ("tokens", "positions")}
    if not all(np.array_equal(rows, other[name]) for _, other in parts for name, rows in joined.items()):
        raise damaged(place, f"the processes kept different rows of pass {first.number}", _DO)
    for name in sorted({name for _, kept in parts for name in kept} - joined.keys()):
        shares = {header.rank: kept[name] for header, kept in parts if name in kept}
        if sorted(shares) != list(range(first.ranks)):
            layer = name.rpartition(".")[2]
            wrote = f"{len(shares)} of {first.ranks} processes wrote layer {layer} of pass {first.number}"
            raise damaged(place, wrote, _DO)
        joined[name] = np.concatenate([shares[rank] for rank in sorted(shares)], axis=1)
    return joined
