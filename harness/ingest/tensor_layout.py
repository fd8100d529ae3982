"""Names of tensors -> the layer and the boundary of a model, by the module names that Hugging Face models and SGLang share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from assay.harness.errors import UsageError

if TYPE_CHECKING:
    from assay.harness.engines.model import ModelShape

_LAYER = re.compile(r"(?:^|[._])(?:layers?|blocks?|h)[._](\d+)(?=[._]|$)")
# Boundaries by the first pattern that a name matches: "attn" is in the names of projections too, so it comes late.
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
    """Return the layer, the boundary and the rest of the name of a tensor, such as "model.layers.3.self_attn.attn".

    The layer is None for what lies outside of the layers; the boundary, such as "o_proj", is "other" if the name does not tell.
    """
    match = _LAYER.search(name)
    rest = (name[match.end() :].lstrip("._") or "layer") if match else name
    return int(match[1]) if match else None, _boundary_of(rest), rest


def depth_of(layer: int | None, boundary: str) -> tuple[int, int]:
    """Return the rank of a place: layer, then boundary. No file keeps the order of execution."""
    outside = -1 if boundary == "embedding" else 1 << 30
    return outside if layer is None else layer, _DEPTH.index(boundary) if boundary in _DEPTH else len(_DEPTH)


def _boundary_of(name: str) -> str:
    """Return the boundary that a name without its layer stands for; "other" if it does not tell."""
    if name in ("layer", "output", "layer.output"):
        return "layer"
    lower = name.lower()
    for boundary, pattern in _BOUNDARIES:
        if re.search(pattern, lower):
            return boundary
    return "attention" if _SIDES.search(lower) else "other"


def _has_heads(name: str) -> bool:
    """Return True if the last dimension of such a tensor holds heads: q, k, v, or the output of attention, before o_proj."""
    return _boundary_of(name) in ("attention", "rotary") or bool(_SIDES.search(name.lower()))


# Letters of a layout: place in the batch, token, head, and the dimension that a cell is summed over.
_AXES = "bthd"


class Layout(NamedTuple):
    """The meaning of a tensor's leading dimensions. Its last dimension is summed over, per cell.

    Attributes:
        axes: a letter of "bth" for each leading dimension; "t" for all of them together where they are ambiguous.
        lead: sizes of the leading dimensions.
        dim: elements of a cell.
        known: whether --layout, a model or the rows of several passes tell them; otherwise they are assumed.
        either: the layouts that are as likely, where they are ambiguous.
    """

    axes: str
    lead: tuple[int, ...]
    dim: int
    known: bool = False
    either: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Heads that it splits a tensor into; 1 if it has no such dimension."""
        return self.lead[self.axes.index("h")] if "h" in self.axes else 1


def layout_of(
    name: str, shape: Sequence[int], model: ModelShape | None = None, axes: str = "", rows: int | None = None
) -> Layout:
    """Infer how to read a tensor.

    Args:
        name: of the tensor, which tells whether it has heads.
        shape: its shape.
        model: splits the last dimension of q, k, v and attention outputs into heads, where it fits.
        axes: letters of `_AXES` for all dimensions, such as "bhtd", instead of a guess; used where the number of dimensions fits.
        rows: the dimension along which passes were put together, which is that of tokens; None for a single pass.
    """
    shape = tuple(shape)
    if axes and len(axes) == len(shape):
        return Layout(axes.removesuffix("d"), shape[:-1], shape[-1], known=True)
    if len(shape) <= 1:  # of tokens, or of a hidden state
        return Layout("t" * len(shape), shape, 1, either=("t", "d") if shape else ())
    if len(shape) > 4:
        return Layout("t", (math.prod(shape[:-1]),), shape[-1], either=("d",))
    heads = _has_heads(name) or len(shape) == 4
    likely = {2: ("t",), 3: ("th", "ht", "bt" if rows != 0 else "tb") if heads else ("bt",), 4: ("bht", "bth")}[
        len(shape)
    ]
    sizes, dim = shape[:-1], shape[-1]

    def fits(lead: str) -> bool:
        """Return True if the heads of the model are where a layout has them."""
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
    """Return `axes`, if it is a layout.

    Raises:
        UsageError: it is not.
    """
    good = len(set(axes)) == len(axes) and set(axes) <= set(_AXES) and "t" in axes and axes.endswith("d")
    if axes and not good:
        raise UsageError(
            f"--layout is {axes!r}.",
            "each of b, t, h at most once, with t, and d at the end, such as bhtd",
            "name the dimensions in order",
        )
    return axes
