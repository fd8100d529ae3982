"""Computes RoPE as ``config.json`` specifies it, in float64 and without an engine, and compares a table with it.

Formulas: the RoPE paper (arXiv 2104.09864), YaRN (2309.00071), and Meta's reference code for Llama 3.1's scaling. "dynamic" has
two readings: transformers scales only once a sequence exceeds the context, engines with a fixed table scale for the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = ("default", "mrope", "")
"""Scaling types that scale nothing."""
# Largest relative distance of equal frequencies, when they are inferred from a float32 table.
_TOLERANCE = 2.0**-12


@dataclass(frozen=True)
class _Rope:
    """The RoPE that a configuration specifies.

    Attributes:
        kind: scaling type.
        theta: the base.
        factor: scaling factor, or 1 without scaling.
        frequencies: angle per position of each pair of dims.
        scale: factor of cos and sin.
        layers: layer type that it applies to, or empty for all layers.
    """

    kind: str
    theta: float
    factor: float
    frequencies: tuple[float, ...]
    scale: float = 1.0
    layers: str = ""


def asked_ropes(config: Mapping[str, Any]) -> list[_Rope]:
    """Return every reading of a ``config.json``'s RoPE, or nothing if it lacks a base or has an unknown type."""
    config = {**config, **(config.get("text_config") or {})}
    given = config.get("rope_parameters") or {}
    if given and all(isinstance(value, Mapping) for value in given.values()):
        return [rope for layers, own in given.items() for rope in _readings(config, own, layers)]
    scaling = {**(config.get("rope_scaling") or {}), **given}
    local = config.get("rope_local_base_freq")
    if local is None:
        return _readings(config, scaling, "")
    own = {"rope_theta": local, "rope_type": "default"}
    return [*_readings(config, scaling, "full_attention"), *_readings(config, own, "sliding_attention")]


def _readings(config: Mapping[str, Any], given: Mapping[str, Any], layers: str) -> list[_Rope]:
    theta = given.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
    heads = int(config.get("num_attention_heads") or 0)
    head_dim = (
        config.get("qk_rope_head_dim") or config.get("head_dim") or (heads and int(config["hidden_size"]) // heads)
    )
    if theta is None or not head_dim:
        return []
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    dim = int(head_dim) if config.get("qk_rope_head_dim") else int(head_dim * float(part or 1.0))
    kind = str(given.get("rope_type") or given.get("type") or "default")
    factor = float(given.get("factor") or 1.0)
    most = int(given.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    plain = _plain(float(theta), dim)

    def rope(frequencies: Sequence[float], scale: float = 1.0) -> _Rope:
        return _Rope(kind, float(theta), factor, tuple(frequencies), scale, layers)

    if kind in _PLAIN:
        return [rope(plain)]
    if kind == "linear":
        return [rope([f / factor for f in plain])]
    if kind == "dynamic":
        longest = (
            float(theta) * factor**2
            if most == 0
            else float(theta) * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
        )
        return [rope(plain), rope(_plain(longest, dim))]
    if kind == "llama3":
        return [rope(_llama3(plain, factor, given, most))]
    if kind in ("yarn", "deepseek_yarn"):
        return [rope(_yarn(plain, factor, float(theta), given, most), _yarn_scale(factor, given))]
    return []


def _plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2.0 * i / dim) for i in range(dim // 2)]


def _llama3(plain: Sequence[float], factor: float, given: Mapping[str, Any], most: int) -> list[float]:
    """Divide long waves by the factor, keep short ones, and blend those between."""
    low, high = float(given.get("low_freq_factor", 1.0)), float(given.get("high_freq_factor", 4.0))

    def scaled(f: float) -> float:
        wave = 2 * math.pi / f
        if wave < most / high:
            return f
        if wave > most / low:
            return f / factor
        smooth = (most / wave - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    return [scaled(f) for f in plain]


def _yarn(plain: Sequence[float], factor: float, theta: float, given: Mapping[str, Any], most: int) -> list[float]:
    dim = 2 * len(plain)

    def turns(number: float) -> float:
        """Return the dim whose wave turns `number` times within the original context."""
        return dim * math.log(most / (number * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns(float(given.get("beta_fast") or 32)), turns(float(given.get("beta_slow") or 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [f * (1 - ramp) + f / factor * ramp for f, ramp in zip(plain, ramps, strict=True)]


def _yarn_scale(factor: float, given: Mapping[str, Any]) -> float:
    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return of(float(given["mscale"])) / of(float(given["mscale_all_dim"]))
    return of(1.0)


def read_theta(frequencies: Sequence[float]) -> float | None:
    """Infer the base from the frequencies of plain RoPE, or return None if they are not plain."""
    if len(frequencies) < 2 or abs(frequencies[0] - 1) > 0.01 or min(frequencies) <= 0:
        return None
    dim = 2 * len(frequencies)
    theta = float(frequencies[-1] ** (-dim / (dim - 2)))
    return theta if same_frequencies(frequencies, _plain(theta, dim), 2.0**-6) else None


def same_frequencies(left: Sequence[float], right: Sequence[float], tolerance: float = _TOLERANCE) -> bool:
    """Return True if two lists of frequencies are equal within rounding."""
    return len(left) == len(right) and all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(left, right, strict=True)
    )


def nearest(frequencies: Sequence[float], asked: Sequence[_Rope], layers: str = "") -> _Rope | None:
    """Return the closest reading to some frequencies, preferring those for the layer type, or None if none has as many dims."""
    fitting = [rope for rope in asked if len(rope.frequencies) == len(frequencies)]
    own = [rope for rope in fitting if layers and rope.layers == layers] or fitting

    def distance(rope: _Rope) -> float:
        return sum(abs(math.log(max(a, 1e-30) / b)) for a, b in zip(frequencies, rope.frequencies, strict=True))

    return min(own, key=distance, default=None)


def wrong_rope(
    frequencies: Sequence[float],
    scale: float,
    asked: Sequence[_Rope],
    layers: str = "",
    tolerance: float = _TOLERANCE,
    config: str = "config.json",
) -> str:
    """State how frequencies and scale contradict a configuration, or return "" if they agree or it specifies nothing.

    Args:
        frequencies: the table's frequencies.
        scale: the factor of its cos and sin.
        asked: readings of the configuration.
        layers: layer type that uses the table, or empty if unknown.
        tolerance: relative rounding of the table.
        config: name of the configuration in the sentence.
    """
    if not asked:
        return ""
    rope = nearest(frequencies, asked, layers)
    if rope is None:
        dims = " or ".join(sorted({str(2 * len(reading.frequencies)) for reading in asked}))
        return f"RoPE rotates {2 * len(frequencies)} dims per head; {config} says {dims}"
    of = f" for {rope.layers.replace('_', ' ')}" if rope.layers else ""
    if same_frequencies(frequencies, rope.frequencies, tolerance):
        if abs(scale - rope.scale) <= max(tolerance, 2.0**-9) * rope.scale:
            return ""
        return f"cos and sin are scaled by {scale:.4g}; {config} says {rope.scale:.4g}{of}"
    theta, plain = read_theta(frequencies), _plain(rope.theta, 2 * len(frequencies))
    if theta is not None and abs(theta - rope.theta) > 0.01 * rope.theta:
        also = "" if rope.kind in _PLAIN else f", and {rope.kind} scaling by {rope.factor:g} is not applied"
        return f"rope_theta is {_number(theta)}; {config} says {_number(rope.theta)}{of}{also}"
    if theta is not None:
        return f"RoPE is not scaled; {config} says {rope.kind} scaling by {rope.factor:g}{of}"
    ratios = [a / b for a, b in zip(plain, frequencies, strict=True)]
    if max(ratios) - min(ratios) <= 0.01 * max(ratios):
        said = f"{rope.kind} scaling by {rope.factor:g}" if rope.kind not in _PLAIN else "no scaling"
        return f"RoPE is scaled linearly by {ratios[0]:.4g}; {config} says {said}{of}"
    first = next(
        i for i, (a, b) in enumerate(zip(frequencies, rope.frequencies, strict=True)) if abs(a - b) > tolerance * b
    )
    return (
        f"RoPE frequency {first} is {frequencies[first]:.4g}; {config} says {rope.frequencies[first]:.4g}"
        f" ({rope.kind}, rope_theta {_number(rope.theta)}){of}"
    )


def _number(theta: float) -> str:
    """Format a base for people, as "10,000", rounded to four digits."""
    rounded = float(f"{theta:.4g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"
