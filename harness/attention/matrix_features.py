"""Features of the op-level matrix's calls beyond plain attention: the values of each feature of `FEATURES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.forms import BLOCK, FORMS, feature_of, forms_of
from assay.harness.attention.noise import FORMATS

MLA = "MLA"
"""The value of the feature "mla", which all calls in 576 dims have."""
_STORED_AS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _asking_for(fields: Callable[[AttentionCall], dict[str, Any]], call: AttentionCall) -> AttentionCall:
    """Set fields of the spec that depend on the call."""
    return call.with_spec(**fields(call))


def _sinks(near: float, call: AttentionCall) -> dict[str, Any]:
    # Above the log-sum-exp of as many small scores as a sequence has keys: a fixed sink would be lost among many. FlashAttention
    # takes sinks in bfloat16, which holds these halves exactly; sinks that it had to round cost a correct kernel 3 %.
    middle = near + round(2 * math.log(max(1.0, call.k.shape[0] / max(1, len(call.lens_k))))) / 2
    return {"sinks": tuple(middle + 0.5 * (7 * h % 5) for h in range(call.heads.q_heads))}


def _padded(rows: int, call: AttentionCall) -> AttentionCall:
    """Append this many rows to q that belong to no sequence: NaN, like unwritten memory."""
    more = call.q.new_full((rows, *call.q.shape[1:]), float("nan"))
    return replace(call.with_spec(padded_rows=rows), q=torch.cat([call.q[: call.rows], more]))


# Factors on the numbers of heads, and of tokens or blocks where these have scales of their own: neighbours' scales differ.
_FACTORS = (1.0, 4.0, 1 / 8)


def _uneven(x: torch.Tensor, per: str, first: int) -> torch.Tensor:
    """Multiply x [tokens, heads, dim] by factors that differ between parts with separate scales."""
    factors = torch.tensor(_FACTORS, device=x.device)
    tokens, heads = (torch.arange(count, device=x.device) for count in x.shape[:2])
    if per == "tensor":
        return x
    of_tokens = tokens // (BLOCK if per.startswith("block") else 1) if per != "head" else 0 * tokens
    return x * factors[(heads + first) % 3][:, None] * factors[of_tokens % 3][:, None, None]


def _largest(x: torch.Tensor, per: str) -> torch.Tensor:
    """Compute the largest magnitude of each part with one scale in x [tokens, heads, dim], broadcasting to it."""
    if per == "block of 16 tokens":
        blocks = torch.arange(len(x), device=x.device) // BLOCK
        tops = [x[blocks == block].abs().amax((0, 2)) for block in range(-(-len(x) // BLOCK))]
        return torch.stack(tops)[blocks][..., None]
    return x.abs().amax({"tensor": (0, 1, 2), "head": (0, 2), "token": (2,)}[per], keepdim=True)


def _stored(name: str, per: str, call: AttentionCall) -> AttentionCall:
    """Store k and v in 8 bits, and replace them by the stored values: scales have two bits at most, so that no dtype rounds them,
    and one that is kept as a power of two is another."""
    format = FORMATS[name]
    tensors: dict[str, torch.Tensor] = {}
    for what in ("k", "v"):
        x = _uneven(getattr(call, what).float(), per, first=what == "v")
        top = _largest(x, per).clamp(min=2.0**-20)
        scale = (top / format.largest).log2().ceil().exp2()
        if (
            name != "int8" or call.q.dtype != torch.bfloat16
        ):  # whose 8 bits do not hold such a multiple of an 8-bit integer
            scale = 1.5 * scale
        if what == "v":  # or one of K's that is taken for V's would not show
            scale = 2 * scale
        x = x / scale
        stored = x.round().to(torch.int8) if name == "int8" else x.to(_STORED_AS[name])
        tensors |= {f"stored_{what}": stored, f"{what}_scale": scale, what: (stored.float() * scale).to(call.q.dtype)}
    if call.spec.layout == "v in k":
        values = {name: tensors[name][..., : call.v.shape[2]] for name in ("stored_k", "k")}
        tensors |= {"stored_v": values["stored_k"], "v_scale": tensors["k_scale"], "v": values["k"]}
    return call.with_tensors(tensors)


STORED: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    f"K and V in {form}": partial(_stored, name, per) for form in FORMS for name, _, per in (form.partition(" per "),)
}
"""Values of "stored_kv": every form that a kernel can declare."""
ASKED: dict[str, dict[str, Callable[[AttentionCall], AttentionCall]]] = {
    "window": {
        f"window {n}": partial(_asking_for, partial(lambda n, call: {"mask": Mask(window=n)}, n))
        for n in (64, 1, 16, 17, 65, 128, 129)
    },
    "softcap": {
        f"softcap {n:g}": partial(_asking_for, partial(lambda n, call: {"softcap": n}, n)) for n in (30.0, 1.5, 50.0)
    },
    "temperature": {
        f"temperature {n}": partial(_asking_for, partial(lambda n, call: {"temperature": n}, n)) for n in (64, 2)
    },
    "sinks": {f"sinks near {n:g}": partial(_asking_for, partial(_sinks, n)) for n in (0.0, 4.0, -4.0)},
    "padding": {f"{n} padded rows": partial(_padded, n) for n in (7, 1, 64, 300)},
    "not_causal": {
        name: partial(_asking_for, lambda call: {"mask": Mask(causal=False)})
        for name in ("not causal", "cross attention")
    },
    "mla": {MLA: lambda call: call.with_spec(scale=call.scale * 3**0.5)},  # of 192 dims, and not of 576
    "stored_kv": {
        f"K and V in {form}": STORED[f"K and V in {form}"]
        for form in (
            "e4m3 per tensor",
            "int8 per token",
            "e5m2 per head",
            "int8 per head",
            "e4m3 per token",
            "e4m3 per block of 16 tokens",
        )
    },
}
"""Values of each feature that a call may ask for; longer windows: `LONG_WINDOWS`.

Windows lie around blocks; caps are those of Gemma 2 and Grok, and one that every score feels and that is no whole number. Sinks
near N are N to N + 2 above the logarithm of the mean number of keys.
"""
STRONGEST = {
    "window": "window 17", "softcap": "softcap 1.5", "temperature": "temperature 2", "sinks": "sinks near 4",
    "padding": "300 padded rows", "not_causal": "cross attention", "mla": MLA,
}  # fmt: skip
"""The value of each feature with the largest effect in combination, so that a kernel cannot ignore one of two unnoticed."""


LONG_WINDOWS = (512, 1024)
"""Windows that few calls ask for, of more keys."""


def asking(value: str) -> Callable[[AttentionCall], AttentionCall]:
    """Return a function that makes a call ask for a value: one of `STORED` and `ASKED`, or a number for a feature."""
    known = STORED | {name: make for some in ASKED.values() for name, make in some.items()}
    if value in known:
        return known[value]
    what, _, number = value.rpartition(" ")
    fields: dict[str, Callable[[AttentionCall], dict[str, Any]]] = {
        "window": lambda call: {"mask": Mask(window=int(number))},
        "softcap": lambda call: {"softcap": float(number)},
        "temperature": lambda call: {"temperature": int(number)},
    }
    return partial(_asking_for, fields[what])


def values_of(features: Sequence[str]) -> dict[str, list[str]]:
    """List the values of each declared feature that calls ask for; if it is declared by its forms, these and then the others.

    A declaration excludes the others, so that they are listed as not covered.
    """
    values = {}
    for name in dict.fromkeys(map(feature_of, features)):
        if name in ASKED:
            forms = [f"K and V in {form}" for form in forms_of(features, name)]
            values[name] = list(dict.fromkeys([*forms, *ASKED[name]]))
    return values


def strongest_of(features: Sequence[str]) -> dict[str, str]:
    """Choose the value of each declared feature that stands for it in combinations; for stored K and V, a declared form."""
    values = values_of(features)
    forms = [f"K and V in {form}" for form in forms_of(features, "stored_kv")] or list(ASKED["stored_kv"])
    of_heads = [form for form in forms if form.endswith("per head")]
    return {name: STRONGEST.get(name) or [*of_heads, *forms][0] for name in values}
