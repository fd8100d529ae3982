from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assay.harness.evidence.trace import Trace
from assay.harness.judge.traces import PartingRow, least_error, parting

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 8
PROMPT, CACHED = 12, 5
"""Tokens up to the last that is traced, and how many of them came from the cache."""
LEAST = least_error("float32")
Spoil = Callable[[Trace], None]


def trace(noise: float = 0.0, cached: int = CACHED, seed: int = 1, with_layers: bool = True) -> Trace:
    """The passes of a request whose first tokens were cached: the same numbers in every trace, and noise of a relative size."""
    rng, own = np.random.default_rng(0), np.random.default_rng(seed)

    def layers(heads: int, rows: int) -> dict[int, np.ndarray]:
        made = {layer: rng.normal(size=(PROMPT, heads, DIM)) for layer in range(LAYERS)}
        return {layer: (out * (1 + noise * own.normal(size=out.shape)))[-rows:].astype(np.float32) for layer, out in made.items()}

    new = PROMPT - cached
    queries, keys, values, outputs = layers(HEADS, new), layers(KV_HEADS, PROMPT), layers(KV_HEADS, PROMPT), layers(HEADS, new)
    positions = np.arange(cached, PROMPT)
    computed = ({layer: tensor[cached:].copy() for layer, tensor in read.items()} for read in (keys, values))
    whole = {layer: out.reshape(new, 1, -1).copy() for layer, out in outputs.items()} if with_layers else {}
    return Trace("t", positions + 50, positions, ("extend",) * new, outputs, queries, *computed, keys, values, whole)


def parted(spoil: Spoil | None = None, floor: float = 0.0, **of: Any) -> PartingRow:
    other = trace(**of)
    if spoil:
        spoil(other)
    return parting(trace(), trace(floor, seed=2), other, LEAST)


def after(layer: int, trace: Trace) -> None:
    """Spoil what follows a layer that computed something else, as it would in a model."""
    for later in range(layer, LAYERS):
        read = (trace.queries, trace.new_keys, trace.new_values, trace.keys, trace.values)
        for tensors in (*read, trace.outputs, trace.layer_outputs):
            if later in tensors:
                tensors[later] *= 1.5


def test_weights_of_a_layer_show_where_it_computes_its_inputs() -> None:
    at = parted(lambda trace: after(1, trace))
    assert (at.place, at.layer, at.names) == ("input", 1, ("q", "k", "v"))
    assert at.error > 0.5
    assert (at.position, at.positions) == (CACHED, PROMPT - CACHED)


def test_a_position_shows_in_q_and_k_alone() -> None:
    def spoil(trace: Trace) -> None:
        trace.queries[0][3:, 2] *= -1  # head 2, from token 8 on
        trace.new_keys[0][3:] *= -1
        trace.keys[0][8:] *= -1
        trace.outputs[0][3:] *= 2
        after(1, trace)

    at = parted(spoil)
    assert (at.place, at.layer, at.names, at.head, at.position, at.positions) == ("input", 0, ("q", "k"), 2, 8, 4)


@pytest.mark.parametrize("key", [3, 7, PROMPT - 1], ids=["of the cached prefix", "of a token that was computed", "of the last"])
def test_a_key_that_changed_in_the_cache_is_named_by_its_token(key: int) -> None:
    def spoil(trace: Trace) -> None:
        trace.keys[0][key, 1] = 0
        trace.outputs[0][-1] *= 1.1
        after(1, trace)

    at = parted(spoil)
    assert (at.place, at.layer, at.names, at.head, at.position, at.positions) == ("cache", 0, ("k",), 1, key, 1)


def test_attention_itself_is_named_with_its_head() -> None:
    def spoil(trace: Trace) -> None:
        trace.outputs[1][4, 3] += 1
        after(2, trace)

    at = parted(spoil)
    assert (at.place, at.layer, at.names, at.head, at.position, at.positions) == ("attention", 1, ("output",), 3, CACHED + 4, 1)


def test_the_rest_of_a_layer_is_named_if_its_attention_agrees() -> None:
    def spoil(trace: Trace) -> None:
        if trace.layer_outputs:
            trace.layer_outputs[1][2:] *= 1.1
        after(2, trace)

    at = parted(spoil)
    assert (at.place, at.layer, at.names, at.head, at.position) == ("layer", 1, ("output",), None, CACHED + 2)
    assert parted(spoil, with_layers=False).place == "input", "without outputs of layers, the next layer's inputs are the first"


@pytest.mark.parametrize(("with_layers", "place"), [(True, "behind layers"), (False, "behind attention")])
def test_what_differs_behind_the_last_layer_is_none_of_attention(with_layers: bool, place: str) -> None:
    at = parted(with_layers=with_layers)
    assert (at.place, at.layer, at.head) == (place, LAYERS - 1, None)


def test_what_the_base_differs_from_itself_by_is_no_difference() -> None:
    def spoil(trace: Trace) -> None:
        trace.outputs[1] *= 1 + 2e-4

    assert parted(spoil).place == "attention"
    assert parted(spoil, floor=1e-4).place == "behind layers"


def shortened(of: Trace) -> Trace:
    return replace(of, positions=of.positions - 1)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (shortened(trace()), "do not end at the same position"),
        (replace(trace(), tokens=np.arange(PROMPT - CACHED)), "do not end at the same position"),
        (replace(trace(), keys={}), "k of other layers"),
        (replace(trace(), values={layer: v[:, :1] for layer, v in trace().values.items()}), "v of layer 0 is"),
    ],
    ids=["ends earlier", "other tokens", "no keys", "fewer heads"],
)
def test_what_cannot_be_compared_is_refused(other: Trace, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parting(trace(), trace(), other, LEAST)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fewer_bits_differ_by_more(dtype: str) -> None:
    assert least_error(dtype) > 100 * LEAST
    assert least_error(dtype, another_kernel=True) == least_error(dtype)


def test_another_kernel_may_multiply_in_fewer_bits_than_float32() -> None:
    assert least_error("float32", another_kernel=True) == least_error("float16")
