"""Bugs of the softmax scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from assay.harness.attention.bugs.bug import Bug, Change, changing, code
from assay.harness.attention.oracle import Request

_SCALE = """\
def attend(q, k, v, scale):
    heads, new, keys = q.shape[0], q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = @ * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_EXP2 = """\
def attend(q, k, v, scale):
    new, keys, log2_e = q.shape[1], k.shape[1], 1.4426950408889634
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = (@ * q @@ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    weights = torch.EXP(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @@ v
"""


def scaled(scale: Callable[[Request], float]) -> Change:
    """Set the softmax scale to `scale(request)`."""

    def change(r: Request) -> Request | None:
        wrong = scale(r)
        return None if math.isclose(wrong, r.scale) or r.len_k == 1 else replace(r, scale=wrong)

    return change


def _wrong_scale(id: str, title: str, about: str, does: str, wrong: str, scale: Callable[[Request], float], *reports: str,
                 right: str = "scale") -> Bug:  # fmt: skip
    return Bug(
        id, title, about, does, "softmax-scale", changing(scaled(scale)), code(_SCALE, wrong, right), reports=reports
    )


_OF_HEAD_DIM = "q.shape[2] ** -0.5"
BUGS = (
    _wrong_scale("scale-missing", "scale missing", "scores are not scaled", "does not scale the scores", "1", lambda r: 1.0),
    _wrong_scale("scale-twice", "scale applied twice", "scores are scaled twice", "scales the scores twice", "scale * scale",
                 lambda r: r.scale**2),
    _wrong_scale("scale-doubled", "scale doubled", "scores are scaled by twice the scale",
                 "scales the scores by twice the scale", "2 * scale", lambda r: 2 * r.scale),
    _wrong_scale("scale-of-head-dim-v", "scale of head_dim_v", "the scale uses the values' head dim",
                 "scales the scores by the values' head dim", "v.shape[2] ** -0.5",
                 lambda r: r.v.shape[2] ** -0.5 if r.v.shape[2] != r.q.shape[2] else r.scale, right=_OF_HEAD_DIM),
    _wrong_scale("scale-of-all-heads", "scale of all heads", "the scale uses the dims of all q heads together",
                 "scales the scores by the dims of all q heads", "(heads * q.shape[2]) ** -0.5",
                 lambda r: (r.q.shape[0] * r.q.shape[2]) ** -0.5, "lucidrains/vit-pytorch#65", right=_OF_HEAD_DIM),
    Bug("exp2-without-log2e", "exp2 without log2(e)", "2 is raised to scores that were scaled for e",
        "applies exp2 to scores that lack log2(e)", "softmax-scale", changing(scaled(lambda r: math.log(2) * r.scale)),
        code(_EXP2.replace("EXP", "exp2"), "scale", "log2_e * scale")),
    Bug("exp-with-log2e", "log2(e) applied to exp", "e is raised to scores that were scaled for 2",
        "applies exp to scores that hold log2(e)", "softmax-scale", changing(scaled(lambda r: r.scale / math.log(2))),
        code(_EXP2.replace("EXP", "exp"), "log2_e * scale", "scale")),
)  # fmt: skip
