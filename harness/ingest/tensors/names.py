"""The meaning of a dumped tensor's name: layer, boundary, pass and process, and which tensor of another dump it pairs with.

Names as written by SGLang 0.5.23 (``debug_utils/dumper.py``: ``step=0___rank=0___dump_index=7___name=...___layer_id=3.pt``;
``debug_utils/tensor_dump_forward_hook.py``: module names such as ``model.layers.3.self_attn.attn``) and by forward hooks on Hugging
Face models, which use the same module names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|[._])(?:layers?|blocks?|h)[._](\d+)(?=[._]|$)")
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
"""Boundaries by the first pattern that a name matches."""
_DEPTH = {
    name: depth
    for depth, name in enumerate(
        ("embedding", "attention norm", "qkv", "rotary", "attention", "o_proj", "mlp norm", "mlp", "layer", "final norm", "logits")
    )
}  # fmt: skip
_SIDES = re.compile(r"(?:^|[._])(q|k|v|query|key|value)(?:[._]|$)")
_TAG = "___"
"""Between the tags of a file name of SGLang's dumper."""
_UNSTABLE = frozenset({"dump_index"})


@dataclass(frozen=True)
class Place:
    """The place in a forward pass where a tensor was taken.

    Attributes:
        step: number of the forward pass in the dump; 0 if the dump does not count them.
        rank: the process; empty if the dump has only one.
        layer: None for what lies outside of the layers.
        boundary: such as "attention", "o_proj", "mlp"; "other" if the name does not tell.
        name: the name without its layer, for example "self_attn.attn.output".
    """

    step: int
    rank: str
    layer: int | None
    boundary: str
    name: str

    @property
    def depth(self) -> tuple[int, int, int]:
        """Sort key of places of formats that do not keep the order of execution: pass, layer, boundary."""
        depth = _DEPTH.get(self.boundary, len(_DEPTH))
        before = _DEPTH["attention norm"] > depth
        layer = self.layer if self.layer is not None else (-1 if before else 1 << 30)
        return self.step, layer, depth

    def __str__(self) -> str:
        """Describe the place, such as "layer 3, attention (self_attn.attn.output)"."""
        where = f"layer {self.layer}" if self.layer is not None else "outside of the layers"
        step = f", pass {self.step}" if self.step else ""
        return f"{where}, {self.boundary} ({self.name}){step}{f', {self.rank}' if self.rank else ''}"


def place_of(name: str, step: int = 0, rank: str = "", layer: int | None = None) -> Place:
    """Return the place that a module's or tensor's name stands for.

    Args:
        name: such as "model.layers.3.self_attn.attn".
        step: number of the forward pass.
        rank: the process.
        layer: where something else than the name tells it.
    """
    match = _LAYER.search(name)
    rest = name
    if match:
        layer = int(match.group(1)) if layer is None else layer
        rest = name[match.end() :].lstrip("._") or "layer"
    return Place(step, rank, layer, _boundary_of(rest), rest)


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


def tags_of(stem: str) -> dict[str, str]:
    """Parse the tags in a file name of SGLang's dumper, without ".pt"; empty if it is no such name."""
    parts = [part.partition("=") for part in stem.split(_TAG)]
    return {key: value for key, equals, value in parts if equals} if parts[0][0] == "step" else {}


def pairing_key(tags: dict[str, str]) -> str:
    """Keep the tags that the same tensor of another dump has too: not its number in the dump."""
    return _TAG.join(f"{key}={value}" for key, value in tags.items() if key not in _UNSTABLE)
