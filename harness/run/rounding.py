"""What a declared rounding must cost: the reference's own weights, rounded as the candidate's, in another implementation.

Where one side computes in fewer bits, or its weights are stored or quantised in fewer bits, the sides may differ by what that costs
any implementation, and by no more. Both are computed here without the engine, by ``transformers``, over the shorter probes: the
other side's model in float64, and the same tensors rounded. Of the tensors of the side with fewer bits, only the dtype is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.harness.engines import memory
from assay.harness.engines.arguments import numerics
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ROUNDING, RoundingCost
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.run.side_probes import load_of
from assay.harness.sides import ROLES

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of weights up to which both models are computed in float64.
_MOST_BYTES = 2**30
# Tokens of the longest probe that is scored.
_MOST_TOKENS = 300
# Names of dtypes in safetensors -> in PyTorch; those of quantised tensors are not known.
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
# ``--quantization`` of an engine -> format of weights, one scale per output, and of the inputs of each layer, one per token.
_QUANTISED = {"fp8": "float8_e4m3fn", "w8a8_fp8": "float8_e4m3fn", "w8a8_int8": "int8"}
_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "int8": 7, "float8_e4m3fn": 3}


def measure_rounding(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Record what the rounding that the candidate declares costs, unless it declares none, or it is recorded.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    servers = {server.role: numerics(server) for server in folder.progress().servers}
    if plan.has_url or set(servers) != set(ROLES) or folder.read(ROUNDING) is not None:
        return
    ours, theirs = (_rounding(plan.models[role], servers[role]) for role in ROLES)
    # An engine that quantises nothing has no name for it; a dtype that is not known is not compared.
    known = [name for name in ours if name == "layers" or (ours[name] and theirs[name])]
    fewest = {name: min(ours[name], theirs[name], key=_bits) for name in known if ours[name] != theirs[name]}
    if fewest:
        declared = ", ".join(f"{name} in {value}" for name, value in fewest.items())
        with display.waiting(f"computing what {declared} cost"):
            made = _cost(
                plan, plan.models["candidate" if fewest.get("weights") == ours["weights"] else "reference"], fewest
            )
        folder.write(ROUNDING, made.model_copy(update={"declared": declared}))


def _rounding(model: Path, numbers: Mapping[str, str]) -> dict[str, str]:
    """Return what decides a server's rounding: dtype of its activations, dtype of its stored weights, and quantisation."""
    layers = numbers.get("quantization", "none")
    return {
        "activations": numbers.get("dtype", ""),
        "weights": _stored_dtype(model),
        "layers": "" if layers == "none" else layers,
    }


def _stored_dtype(model: Path) -> str:
    """Return the dtype of most of a model's stored numbers, or an empty string if its files do not say."""
    counts: Counter[str] = Counter()
    for file in model.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            tensors = [about for name, about in header.items() if name != "__metadata__"]
            for about in tensors:
                counts[about["dtype"]] += about["data_offsets"][1] - about["data_offsets"][0]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
    return next((_STORED.get(name, name) for name, _ in counts.most_common(1)), "")


def _bits(rounding: str) -> int:
    """Return the bits of mantissa of a dtype, many for no quantisation, and few for one that is not known."""
    return _BITS.get(_QUANTISED.get(rounding, rounding), 0) if rounding else max(_BITS.values())


def _cost(plan: Plan, model: Path, differing: Mapping[str, str]) -> RoundingCost:
    """Compute the cost, or say why there is no independent path to it."""
    size, quantised = memory.model_bytes(model), differing.get("layers", "")
    unknown = [quantised] if quantised not in _QUANTISED else []
    unknown += [each for name in ("activations", "weights") if (each := differing.get(name, "")) not in _BITS]
    if any(unknown):
        return RoundingCost(not_measured=f"assay does not compute {' or '.join(filter(None, unknown))} by itself")
    if size is None or size > _MOST_BYTES:
        return RoundingCost(not_measured=f"it is computed for models of at most {_MOST_BYTES // 2**20:,} MiB")
    try:
        sequences = [probe.ids for probe in load_of(plan).probes if len(probe.ids) <= _MOST_TOKENS]
        divergences = divergences_of(model, sequences, differing)
    except Exception as error:  # of a model's code in transformers, which may be anything
        return RoundingCost(not_measured=f"transformers cannot compute the model: {' '.join(str(error).split())[:200]}")
    every = [value for each in divergences for value in each]
    return RoundingCost(mean=sum(every) / len(every), worst=max(every), positions=len(every))


def divergences_of(model: Path, sequences: Sequence[Sequence[int]], rounding: Mapping[str, str]) -> list[list[float]]:
    """Compute KL(model || rounded model), in nats, at each position of each sequence.

    Args:
        model: folder of a model that transformers knows.
        sequences: token ids.
        rounding: "activations" -> dtype of the computation; "weights" -> dtype of the stored weights; "layers" -> a quantisation of
            `_QUANTISED` of every linear layer but the head.
    """
    import torch

    from assay.harness.engines.hf.model import Model

    exact, rounded = Model(model, "float64"), Model(model, rounding.get("activations") or "float64")
    with torch.no_grad():
        for parameter in rounded.network.parameters() if rounding.get("weights") else ():
            parameter.copy_(parameter.to(getattr(torch, rounding["weights"])).to(parameter.dtype))
        if to := _QUANTISED.get(rounding.get("layers", "")):
            _quantise(rounded.network, to)
    divergences = []
    for ids in sequences:
        p, q = (each.log_probabilities(ids)[0] for each in (exact, rounded))
        divergences.append((p.exp() * (p - q)).sum(-1).clamp(min=0).tolist())
    return divergences


def _quantise(network: Any, to: str) -> None:
    """Round the weights of linear layers, by output, and their inputs, by token."""
    import torch

    head = network.get_output_embeddings()
    for module in network.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight.copy_(_rounded(module.weight, to))
            module.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0], to), *inputs[1:]))


def _rounded(tensor: Tensor, to: str) -> Tensor:
    """Round a tensor with one scale per row, [..., n], to "int8" or a floating-point dtype."""
    import torch

    most = 127.0 if to == "int8" else float(torch.finfo(getattr(torch, to)).max)
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    scaled = tensor / scale
    return (scaled.round() if to == "int8" else scaled.to(getattr(torch, to)).to(tensor.dtype)) * scale
