"""Forms of a feature: K and V are stored in various formats and scales, and a kernel may declare which of them it supports.

A declaration names a feature as a whole, ``stored_kv``, or its forms one by one, ``stored_kv: e4m3 per tensor``. A call's tensors
determine its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING

from assay.harness.attention.call import FEATURES, AttentionCall

if TYPE_CHECKING:  # see assay.harness.attention.call
    from torch import Tensor

BLOCK = 16
"""Tokens of a block that shares a scale: a page of vLLM's."""
_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
_SCALES = ("tensor", "head", f"block of {BLOCK} tokens", "token")
FORMS = tuple(f"{name} per {scales}" for name, scales in product(_FORMATS.values(), _SCALES))
"""Forms of stored K and V: a format, and the granularity of its scales."""
# The feature that has forms.
_STORED = "stored_kv"


def feature_of(declared: str) -> str:
    """Return the name of a feature without its form."""
    return declared.partition(":")[0]


def feature_in(value: str) -> str:
    """Return the feature of a value: "window" for "window 4096"."""
    return value.split(" ", 1)[0]


def longest_window(values: Sequence[str]) -> int:
    """Return the longest window among values, or 0."""
    return max((int(value.split()[1]) for value in values if feature_in(value) == "window"), default=0)


def unknown(features: Iterable[str]) -> list[str]:
    """List names that are neither features nor forms of one."""
    known = {*FEATURES, *(f"{_STORED}: {form}" for form in FORMS)}
    return sorted(set(features) - known)


def forms_of(features: Iterable[str], feature: str) -> list[str]:
    """List the declared forms of a feature, or an empty list if it is declared as a whole, or not at all."""
    declared = list(features)
    begins = f"{feature}: "
    return [] if feature in declared else [entry.removeprefix(begins) for entry in declared if entry.startswith(begins)]


def lacking(features: Sequence[str], call: AttentionCall) -> list[str]:
    """List the undeclared features that a call asks for, such as "softcap", "stored_kv in int8 per token"."""
    names = set(map(feature_of, features))
    lacks = []
    for feature in call.features:
        if feature not in names:
            lacks.append(feature)
        elif forms := forms_of(features, feature):
            others = [stored for stored in _forms_in(call) if not set(stored) & set(forms)]
            lacks += [f"{feature} in {stored[0]}" for stored in others[:1]]
    return lacks


def form_of(call: AttentionCall) -> str:
    """Return the narrowest form of stored K: "e4m3 per tensor"."""
    return _forms_in(call)[0][0]


def _forms_in(call: AttentionCall) -> list[list[str]]:
    """List the forms of K, and the forms of V, narrowest first: equal scales fit several forms."""
    by_tensor = []
    assert call.stored is not None
    for stored, scale in ((call.stored.k, call.stored.k_scale), (call.stored.v, call.stored.v_scale)):
        dtype = str(stored.dtype).removeprefix("torch.")
        shared = [f"per {scales}" for scales in _SCALES if _is_per(scales, stored, scale)]
        scaled = shared or [f"with scales {list(scale.shape)}"]
        by_tensor.append([f"{_FORMATS.get(dtype, dtype)} {scales}" for scales in scaled])
    return by_tensor


def _is_per(scales: str, stored: Tensor, scale: Tensor) -> bool:
    """Return True if scales, broadcasting to stored values [tokens, heads, dim], have this granularity."""
    tokens, heads, _ = stored.shape
    if scales in ("tensor", "head"):
        return scale.shape == (1, 1 if scales == "tensor" else heads, 1)
    if scale.shape != (tokens, heads, 1):
        return False
    if scales == "token":
        return True
    return bool((scale == scale[::BLOCK].repeat_interleave(BLOCK, 0)[:tokens]).all())
