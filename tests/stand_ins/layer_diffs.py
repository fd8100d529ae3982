"""Synthetic shadow runs of any size for the tests of the layer diff, and reports with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from assay.harness.conditions import CACHED_PREFIX, PHASES, PLACE, POSITION
from assay.harness.evidence.error_table import DISTANCE, SUMS, ErrorTable, Floats, RoleErrors
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors, ShadowHeader
from assay.harness.judge.error_grids import layers_result
from assay.harness.judge.logits import LogitsRow
from assay.harness.judge.report import LayersResult

Sum = Callable[[int, int, str, str, str, str], float | None]
"""Layer, head, phase, prefix, position and place in the batch -> relative L1; None for a cell that was not observed."""
INFINITE = float("inf")


def cells(
    layers: int,
    heads: int,
    error: Sum,
    phases: tuple[str, ...] = PHASES[:1],
    errors: tuple[FailedCalls, ...] = (),
    unrecorded: dict[int, str] | None = None,
    gain: float = 0.0,
    reference: float = 1e-6,
    noise: str = "int8_qk",
) -> ShadowErrors:
    """A shadow run with the given errors, against the reference and against the truth alike. A cell has 64 elements whose reference
    sums up to 10. Honest implementations are off by `HONEST`.
    """
    index, sums = [], []
    for layer in range(layers):
        for head in range(heads):
            for p, phase in enumerate(PHASES):
                for x, prefix in enumerate(CACHED_PREFIX.labels):
                    for q, position in enumerate(POSITION.labels):
                        for b, place in enumerate(PLACE):
                            value = error(layer, head, phase, prefix, position, place)
                            if value is None:
                                continue
                            index.append((layer, head, p, x, q, b))
                            finite = np.isfinite(value)
                            made = {
                                "size": 10.0,
                                "difference": 10 * value if finite else 0.0, "compared": 64.0 if finite else 60.0,
                                "nonfinite": 0.0 if finite else 4.0,
                            }  # fmt: skip
                            sums.append([made.get(name, 0.0) for name in DISTANCE])
    legend = ShadowHeader(
        reference="torch_native", candidate="sage_attn_as_shipped", phases=phases, passes=62,
        failed=errors, unrecorded=unrecorded or {}, candidate_noise=noise, heads=dict.fromkeys(range(layers), heads),
        rows=640, sampled_rows=640,
    )  # fmt: skip
    cells, added = np.array(index, np.int64).reshape(-1, 6), np.array(sums).reshape(-1, len(DISTANCE))
    roles = against_truth(added[:, DISTANCE.index("difference")] / 10, added[:, DISTANCE.index("nonfinite")], gain, reference)
    return ShadowErrors(ErrorTable(cells, added, *roles), (legend,))


HONEST = 0.016
"""Relative L1 of the honest implementations of the stand-ins, on average: int8 QK."""


def against_truth(own: Floats, nonfinite: Floats, gain: float = 0.0, reference: float = 1e-6) -> list[RoleErrors]:
    """Errors against the truth by cell. The reference is exact; the candidate's honest implementations are off by about `HONEST`.

    Args:
        own: the candidate's relative L1.
        nonfinite: elements of the candidate that are not finite.
        gain: the candidate's gain in every cell.
        reference: the reference's relative L1.
    """
    rng, count = np.random.default_rng(0), len(own)

    def sums(off: Floats, along: Floats) -> Floats:
        made = {"difference": 10 * off, "size": 10.0, "compared": 64.0, "along": 2 * along, "square": 2.0}
        return np.stack([np.broadcast_to(made.get(name, 0.0), off.shape) for name in SUMS], -1)

    candidate = sums(own, np.full(count, gain))
    candidate[:, SUMS.index("nonfinite")] = nonfinite
    members = (count, 16)
    honest = sums(HONEST * rng.lognormal(0, 0.1, members), 1e-4 * rng.normal(size=members))
    exact = sums(1e-6 * rng.lognormal(0, 0.1, members), 1e-8 * rng.normal(size=members))
    served = sums(np.full(count, reference), np.zeros(count))
    none = RoleErrors.none(count)
    return [replace(none, own=candidate, honest=honest), replace(none, own=served, honest=exact)]


def noise(layers: int, heads: int, seed: int = 0) -> Floats:
    """Own errors as a quantised kernel has them, [layers, heads]: some heads and the last layers have more."""
    rng = np.random.default_rng(seed)
    by_head, by_layer = rng.lognormal(0, 0.35, heads), 1 + np.linspace(-0.3, 0.8, layers) ** 2
    rough = 0.006 * by_layer[:, None] * by_head * rng.lognormal(0, 0.15, (layers, heads))
    return np.minimum(rough, 0.035).astype(np.float64)


@cache
def seed_case() -> LayersResult:
    """The example of the README: 4 layers, 4 heads, a causal mask that is misaligned with a cached prefix."""
    base = noise(4, 4)
    places = {"0": 0.3, "1-15": 0.9, "16-63": 1.0, "64-255": 0.95}

    def error(layer: int, head: int, phase: str, prefix: str, position: str, place: str) -> float | None:
        if phase != "extend" or position not in places or place not in ("only", "first", "last"):
            return None
        if prefix == ">= 16":
            return float(1.1 + 0.3 * base[layer, head] / base.max() + 0.1 * (position == "0"))
        return float(base[layer, head] * places[position]) if prefix == "0" and place == "only" else None

    run = cells(4, 4, error)
    bounds = {(layer, "extend"): 0.0468 + 0.0013 * layer for layer in range(4)}
    free = {0: (1.21, math.nan), 1: (1.34, 0.61), 2: (1.29, 0.7), 3: (1.4, 0.85)}
    return layers_result(run, bounds, free, pack="runs/20261120-121002/inside/server/pack")


def sound() -> LayersResult:
    """A correct kernel: noise everywhere, below its bound."""
    base = noise(4, 4)
    run = cells(4, 4, lambda layer, head, phase, prefix, position, place: float(base[layer, head]))
    return layers_result(run, {(layer, phase): 0.047 for layer in range(4) for phase in PHASES})


@cache
def one_head(layers: int = 32, heads: int = 32, phases: tuple[str, ...] = PHASES) -> LayersResult:
    """A fault in one layer and one head with a cached prefix, an output that is not finite, a layer that was not observed."""
    base = noise(layers, heads, 1)
    faulty, unfinite, unseen = (layers // 2 + 1, heads // 6), (layers - 3, heads - 2), layers // 4
    positions = ("0", "1-15")

    def error(layer: int, head: int, phase: str, prefix: str, position: str, place: str) -> float | None:
        cached = prefix == ">= 16"
        if place != "only" or prefix not in ("0", ">= 16") or position not in positions[: 2 if phase == "extend" else 1]:
            return None
        if phase == "decode" and (not cached or layer == unseen):
            return None
        if (layer, head) == faulty and cached and phase == "extend":
            return 0.62 if position == "0" else 0.01
        if (layer, head) == unfinite and cached and phase == "extend":
            return INFINITE
        return float(base[layer, head] * (1.0 if phase == "extend" else 0.4))

    failed = FailedCalls(layer=2, phase="extend", calls=3, text="RuntimeError: no kernel image\nfor this device")
    run = cells(layers, heads, error, phases, (failed,), {5: "it is larger than the budget"})
    rng = np.random.default_rng(2)
    bounds = {
        (layer, phase): float(0.047 * rng.uniform(0.95, 1.15)) for layer in range(layers) for phase in PHASES
    }  # fmt: skip
    total = {layer: float(0.02 * (1 + layer) ** 0.5 + 0.5 * (layer >= faulty[0])) for layer in range(layers)}
    inherited = {layer: max(total[layer] - (0.6 if layer == faulty[0] else 0.0), 0.01) for layer in range(1, layers)}
    return layers_result(run, bounds, {layer: (own, inherited.get(layer, math.nan)) for layer, own in total.items()})


def logits_row(condition: str, kl: float, same: float) -> LogitsRow:
    return LogitsRow(
        condition=condition, positions=1_024, sequences=16, mean_kl=kl, median=kl / 2, p99=kl * 3,
        p999=kl * 5, max=kl * 8, max_at="question mmlu-017, token 12", same_top=same,
        top_k=20, mass=0.9931, floor_mean_kl=2.1e-7,
    )  # fmt: skip
