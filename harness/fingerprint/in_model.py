"""What the modules of a loaded model hold, in any engine: RoPE tables, floats that layers were given, digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.harness.evidence.fingerprint import RopeTable
from assay.harness.fingerprint.rope import asked_ropes, nearest, wrong_rope
from assay.harness.text import ranges

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# Scales of a KV cache, which the part on quantisation has.
_KV_SCALE = re.compile(r"^_?[kqv]_?(?:scale|range)|^prob_scale")
_ROWS_AT_ONCE = 4096
# Names of tables of RoPE: cos and sin by position, or frequencies alone.
_COS_SIN, _FREQUENCIES = "cos_sin_cache", "inv_freq"


def held_floats(model: Any) -> dict[str, str]:
    """Return the floats that a model's modules hold, such as the epsilon of a norm, by class and attribute."""
    settings: dict[str, str] = {}
    held: dict[str, dict[float, list[int]]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and not _KV_SCALE.search(name) and not name.startswith("_"):
                layers = held.setdefault(f"layers.{type(module).__name__}.{name}", {}).setdefault(value, [])
                layers += [] if (number := layer_of(path)) is None else [number]
    for name, values in held.items():
        of = [f"{value!r} (layers {ranges_of(layers)})" if layers else repr(value) for value, layers in values.items()]
        settings[name] = repr(next(iter(values))) if len(values) == 1 else ", ".join(of)
    return settings


def ropes_of(model: Any, config: Mapping[str, Any], called: str = "config.json") -> tuple[RopeTable, ...]:
    """Return the RoPE tables of a model's layers, judged by its configuration, which messages call `called`."""
    asked = asked_ropes(config)
    kinds = {**config, **(config.get("text_config") or {})}.get("layer_types") or []
    users: dict[int, tuple[str, Any, list[int]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _tables_of(module) and not re.search("visual|vision", path):
            _, _, layers = users.setdefault(id(module), (path, module, []))
            number = layer_of(path)
            layers += [] if number is None else [number]
    above = any(not layers and hasattr(module, "inv_freq") for _, module, layers in users.values())
    tables = []
    for path, module, layers in users.values():
        of_layers = next(iter({kinds[n] for n in layers if n < len(kinds)}), "") if layers else ""
        of_layers = "sliding_attention" if path.endswith("_local") else of_layers
        # Gemma 3 computes cos and sin once for all layers, whose own tables are then not read.
        judged = [] if above and layers else asked
        for name in _tables_of(module):
            tables.append(_rope(path, module, name, ranges_of(layers), judged, of_layers, called))
    return tuple(tables)


def _tables_of(module: Any) -> list[str]:
    """Name the attributes of a module that hold RoPE; in transformers, ``sliding_attention_inv_freq`` is of one type of layers."""
    if isinstance(getattr(module, _COS_SIN, None), Tensor):
        return [_COS_SIN]
    held = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return [
        name
        for name, value in held.items()
        if name.endswith(_FREQUENCIES) and "original" not in name and isinstance(value, Tensor)
    ]


def _rope(path: str, module: Any, name: str, layers: str, asked: Any, kind: str, called: str) -> RopeTable:
    table, seen = getattr(module, name), dict[str, Any]()
    if name == _COS_SIN:
        cos, sin = (half[:2].double().cpu() for half in table.chunk(2, dim=-1))
        read, scale = torch.atan2(sin[1], cos[1]), float(cos[0, 0])
    else:
        own = name.removesuffix(_FREQUENCIES)
        read, scale = table.double().cpu(), float(getattr(module, f"{own}attention_scaling", 1.0))
        kind = own.rstrip("_") or kind
    tolerance = max(2.0**-12, 4 * float(torch.finfo(table.dtype).eps))
    wrong = wrong_rope(read.tolist(), scale, asked, kind, tolerance, called)
    if name == _COS_SIN:
        meant = None if wrong else nearest(read.tolist(), asked, kind)
        exact = torch.tensor(meant.frequencies, dtype=torch.float64) if meant else read
        off = _off_by_row(table, exact, meant.scale if meant else scale)
        seen = {"rows": len(off), "error": float(off.max())}
        bad = (off > max(4 * tolerance, len(off) * 2.0**-22)).nonzero().flatten()
        if meant and len(bad):
            at = int(bad[0])
            wrong = (
                f"cos and sin are off by {float(off[at]):.2g} at position {at:,}, the first that is wrong, and by up to "
                f"{seen['error']:.2g} within {len(off):,} positions, though their frequencies are right"
            )
    return RopeTable(
        name=path if name in (_COS_SIN, _FREQUENCIES) else f"{path}.{kind}",
        layers=layers,
        kind=type(module).__name__,
        dtype=dtype_name(table.dtype),
        frequencies=tuple(read.tolist()),
        scale=scale,
        digest=digest(table),
        wrong=wrong,
        **seen,
    )


def _off_by_row(table: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """Return the largest distance of each row of a table from cos and sin in float64; a NaN counts as 4, more than any distance."""
    off, exact = [], frequencies.to(table.device)
    for start in range(0, table.shape[0], _ROWS_AT_ONCE):
        part = table[start : start + _ROWS_AT_ONCE].double()
        at = torch.arange(start, start + len(part), dtype=torch.float64, device=table.device)
        angles = at[:, None] * exact
        off.append((part - scale * torch.cat([angles.cos(), angles.sin()], -1)).abs().amax(-1))
    return torch.cat(off).nan_to_num(nan=4.0, posinf=4.0).cpu()


def layer_of(path: str) -> int | None:
    """Return the number of the layer that a module's path names, or None."""
    numbers = _LAYER.findall(path)
    return int(numbers[-1]) if numbers else None


def ranges_of(layers: Collection[int]) -> str:
    """Return layers as ranges, or an empty string for none."""
    return ranges(set(layers)) if layers else ""


def dtype_name(dtype: Any) -> str:
    """Return a dtype's name: "bfloat16"."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
