"""Maps tensor names to a model's layer and boundary, by the module names that Hugging Face models and SGLang share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from assay.harness.errors import UsageError

if TYPE_CHECKING:
    from assay.harness.engines.model import ModelShape

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


def _has_heads(name: str) -> bool:
    """Return True if the tensor's last dimension holds heads: q, k, v, or the attention output before o_proj."""
    return _boundary_of(name) in ("attention", "rotary") or bool(_SIDES.search(name.lower()))


# Letters of a layout: index in the batch, token, head, and the dimension that a cell sums over.
_AXES = "bthd"


class Layout(NamedTuple):
    """The meaning of a tensor's leading dimensions. A cell sums over the last dimension.

    Attributes:
        axes: a letter of "bth" for each leading dimension, or "t" for all together if they are ambiguous.
        lead: sizes of the leading dimensions.
        dim: elements per cell.
        known: whether --layout, a model or the rows of several passes determine the layout; otherwise it is assumed.
        either: the equally likely layouts, if the layout is ambiguous.
    """

    axes: str
    lead: tuple[int, ...]
    dim: int
    known: bool = False
    either: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Number of heads, or 1 if there is no head dimension."""
        return self.lead[self.axes.index("h")] if "h" in self.axes else 1


def layout_of(
    name: str, shape: Sequence[int], model: ModelShape | None = None, axes: str = "", rows: int | None = None
) -> Layout:
    """Infer the layout of a tensor.

    Args:
        name: the tensor's name, which shows whether it has heads.
        shape: its shape.
        model: the model's shape; it splits the last dimension of q, k, v and attention outputs into heads if it fits.
        axes: letters of `_AXES` for all dimensions, such as "bhtd", instead of a guess; used if the number of dimensions fits.
        rows: the token dimension, along which passes were concatenated, or None for a single pass.
    """
    shape = tuple(shape)
    if axes and len(axes) == len(shape):
        return Layout(axes.removesuffix("d"), shape[:-1], shape[-1], known=True)
    if len(shape) <= 1:  # tokens, or a hidden state
        return Layout("t" * len(shape), shape, 1, either=("t", "d") if shape else ())
    if len(shape) > 4:
        return Layout("t", (math.prod(shape[:-1]),), shape[-1], either=("d",))
    heads = _has_heads(name) or len(shape) == 4
    likely = {2: ("t",), 3: ("th", "ht", "bt" if rows != 0 else "tb") if heads else ("bt",), 4: ("bht", "bth")}[
        len(shape)
    ]
    sizes, dim = shape[:-1], shape[-1]

    def fits(lead: str) -> bool:
        """Return True if the layout's head dimension has the model's number of heads."""
        counts = (model.q_heads, model.kv_heads) if model and heads else ()
        split = sizes[lead.index("h")] if "h" in lead else 0
        return any((dim, split) in ((model.head_dim, count), (count * model.head_dim, 0)) for count in counts if model)

    left = [lead for lead in likely if rows is None or lead[rows : rows + 1] == "t"] or likely
    told = [lead for lead in left if fits(lead)] or left
    if len(told) > 1:
        return Layout("t", (math.prod(sizes),), dim, either=tuple(f"{lead}d" for lead in told))
    lead, known = told[0], len(told) == 1 and (len(likely) > 1 or rows is not None or fits(told[0]))
    if model and "h" not in lead and fits(lead):
        return Layout(lead + "h", (*sizes, dim // model.head_dim), model.head_dim, known)
    return Layout(lead, sizes, dim, known)


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
