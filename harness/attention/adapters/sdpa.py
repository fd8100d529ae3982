"""``torch.nn.functional.scaled_dot_product_attention``: one sequence at a time, heads before tokens.

Its ``is_causal`` aligns the mask top-left, so it is asked for only where a sequence has no cached prefix. Any other mask is passed
as ``attn_mask``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import WITHOUT_SCALE, Adapter, Attend, Parameters, scaled
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import sequences


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    grouped, plain = call.heads.group > 1, not call.spec.mask.window
    passed_in_turn = []
    for rows, keys in sequences(call):
        if rows.start == rows.stop:
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (call.q[rows], call.k[keys], call.v[keys]))
        passed: dict[str, Any] = {"query": q, "key": k, "value": v, **scaled(call, "scale")}
        mask = _mask(call, q.shape[2], k.shape[2])
        simple = plain and mask is not None and q.shape[2] == k.shape[2]
        passed |= {"is_causal": simple, "attn_mask": None if simple else mask}
        if grouped and "enable_gqa" in parameters.names:
            passed["enable_gqa"] = True
        elif grouped:
            passed |= {name: passed[name].repeat_interleave(call.heads.group, 1) for name in ("key", "value")}
        passed_in_turn.append(passed)

    def attend() -> Tensor:
        return torch.cat([function(**passed)[0].transpose(0, 1) for passed in passed_in_turn])

    return attend


def _mask(call: AttentionCall, len_q: int, len_k: int) -> Tensor | None:
    """Return flags of the keys that each query of a sequence sees, bool [len_q, len_k], or None if all see all."""
    seen = call.spec.mask.visible(torch.arange(len_q, device=call.q.device), len_q, len_k)
    return None if bool(seen.all()) else seen


SDPA = Adapter(
    "sdpa",
    ("query", "key", "value", "attn_mask", "is_causal", "scale"),
    dict.fromkeys(("window", "not_causal"), ()),
    _lay_out,
    also=("enable_gqa",),
    ways={WITHOUT_SCALE: ("scale",)},
)
