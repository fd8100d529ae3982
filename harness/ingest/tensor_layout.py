"""A tensor's place in a model, by the module names that Hugging Face models and SGLang share, and its dimensions, as named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from assay.harness.errors import UsageError

_LAYER = re.compile(r"(?:^|[._])(?:layers?|blocks?|h)[._](\d+)(?=[._]|$)")
# Boundaries by the first pattern that a name matches. Names of projections contain "attn" too, so it comes late.
_BOUNDARIES = (
    ("embedding", r"embed|wte|tok_emb"),
    ("attention norm", r"input_layernorm|attention_norm|ln_1|pre_attn"),
    ("qkv", r"qkv|q_proj|k_proj|v_proj|q_norm|k_norm|c_attn"),
    ("rotary", r"rotary|rope"),
    ("o_proj", r"o_proj|out_proj|wo\b|self_attn\.dense"),
    ("mlp norm", r"post_attention_layernorm|ffn_norm|ln_2|pre_mlp"),
    ("mlp", r"mlp|feed_forward|ffn|moe|expert|gate_up|down_proj|act_fn"),
    ("attention", r"attn|attention"),
    ("logits", r"lm_head|logits"),
    ("final norm", r"model\.norm|final_layernorm|ln_f|^norm"),
)
_DEPTH = (
    "embedding", "attention norm", "qkv", "rotary", "attention", "o_proj", "mlp norm", "mlp", "layer", "final norm", "logits",
)  # fmt: skip
_SIDES = re.compile(r"(?:^|[._])(q|k|v|query|key|value)(?:[._]|$)")


def place_of(name: str) -> tuple[int | None, str, str]:
    """Return the layer, the boundary and the remaining name of a tensor, such as "model.layers.3.self_attn.attn".

    The layer is None outside the layers; the boundary, such as "o_proj", is "other" if the name does not say.
    """
    match = _LAYER.search(name)
    rest = (name[match.end() :].lstrip("._") or "layer") if match else name
    return int(match[1]) if match else None, _boundary_of(rest), rest


def depth_of(layer: int | None, boundary: str) -> tuple[int, int]:
    """Return a sort key: layer, then boundary. Files do not keep the order of execution."""
    outside = -1 if boundary == "embedding" else 1 << 30
    return outside if layer is None else layer, _DEPTH.index(boundary) if boundary in _DEPTH else len(_DEPTH)


def _boundary_of(name: str) -> str:
    """Return the boundary for a name without its layer, or "other" if the name does not say."""
    if name in ("layer", "output", "layer.output"):
        return "layer"
    lower = name.lower()
    for boundary, pattern in _BOUNDARIES:
        if re.search(pattern, lower):
            return boundary
    return "attention" if _SIDES.search(lower) else "other"


# Letters of a layout: sequence of a batch, token, head, and the dimension that a cell sums over.
_AXES = "bthd"


class Layout(NamedTuple):
    """The leading dimensions of a tensor. A cell sums over the last dimension.

    Attributes:
        axes: a letter of "bth" for each leading dimension, or empty if nobody named them.
        lead: their sizes.
        dim: elements per cell.
    """

    axes: str
    lead: tuple[int, ...]
    dim: int

    @property
    def heads(self) -> int:
        """Number of heads, or 1 if no dimension was named so."""
        return self.lead[self.axes.index("h")] if "h" in self.axes else 1


def layout_of(shape: Sequence[int], axes: str = "") -> Layout:
    """Return the layout of a tensor. Its shape does not say what a dimension means, so only `axes` names them.

    Args:
        shape: its shape. Each element of a vector is a cell.
        axes: letters of `_AXES` for all dimensions, such as "bhtd"; used if the number of dimensions fits.
    """
    if len(shape) <= 1:
        return Layout("", tuple(shape), 1)
    return Layout(axes.removesuffix("d") if len(axes) == len(shape) else "", tuple(shape[:-1]), shape[-1])


def check_axes(axes: str) -> str:
    """Return `axes` if it is a valid layout.

    Raises:
        UsageError: `axes` is not a layout.
    """
    good = len(set(axes)) == len(axes) and set(axes) <= set(_AXES) and "t" in axes and axes.endswith("d")
    if axes and not good:
        raise UsageError(
            f"--layout is {axes!r}.",
            "each of b, t, h at most once, with t, and d at the end, such as bhtd",
            "name the dimensions in order",
        )
    return axes
