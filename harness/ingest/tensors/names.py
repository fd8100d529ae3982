"""Names of tensors -> the layer and the boundary of a model, by the module names that Hugging Face models and SGLang share."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Place:
    """The place in a forward pass where a tensor was taken.

    Attributes:
        step: number of the forward pass; 0 if passes are not counted.
        layer: None for what lies outside of the layers.
        boundary: such as "attention", "o_proj", "mlp"; "other" if the name does not tell.
        name: the name without its layer, for example "self_attn.attn.output".
    """

    step: int
    layer: int | None
    boundary: str
    name: str

    @property
    def depth(self) -> tuple[int, int, int]:
        """Sort key: pass, layer, boundary. No file keeps the order of execution."""
        depth = _DEPTH.index(self.boundary) if self.boundary in _DEPTH else len(_DEPTH)
        layer = self.layer if self.layer is not None else (-1 if self.boundary == "embedding" else 1 << 30)
        return self.step, layer, depth

    def __str__(self) -> str:
        """Describe the place, such as "layer 3, attention (self_attn.attn.output)"."""
        where = f"layer {self.layer}" if self.layer is not None else "outside of the layers"
        return f"{where}, {self.boundary} ({self.name}){f', pass {self.step}' if self.step else ''}"


def place_of(name: str, step: int = 0) -> Place:
    """Return the place that the name of a module or a tensor stands for, such as "model.layers.3.self_attn.attn"."""
    match = _LAYER.search(name)
    rest = (name[match.end() :].lstrip("._") or "layer") if match else name
    return Place(step, int(match[1]) if match else None, _boundary_of(rest), rest)


def _boundary_of(name: str) -> str:
    """Return the boundary that a name without its layer stands for; "other" if it does not tell."""
    if name in ("layer", "output", "layer.output"):
        return "layer"
    lower = name.lower()
    for boundary, pattern in _BOUNDARIES:
        if re.search(pattern, lower):
            return boundary
    return "attention" if _SIDES.search(lower) else "other"


def has_heads(name: str) -> bool:
    """Return True if the last dimension of such a tensor holds heads: q, k, v, or the output of attention, before o_proj."""
    return _boundary_of(name) in ("attention", "rotary") or bool(_SIDES.search(name.lower()))
