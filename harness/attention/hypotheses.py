"""The family of hypotheses: the oracle with one named bug each.

A candidate that disagrees with the oracle and agrees with a hypothesis, to its numerical noise, has that bug. A hypothesis says
None of a call on which its bug cannot show (a mask that forgets the prefix, on a call without one). In its output NaN
means that the bug leaves the value undefined (a query that sees no key), infinity that the value is expected not to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from assay.harness.attention import bugs
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import attend, requests

Severity = Literal["warning", "serious"]

LEAK = "leak across requests"
"""The kind of every hypothesis in which one request reads another: named first, whatever else fits."""


@dataclass(frozen=True)
class Hypothesis:
    """One named bug.

    Attributes:
        name: unique name, as findings say it.
        title: what goes wrong, as a sentence without its full stop.
        kind: group of variants of one bug, such as all sizes of a sliding window.
        severity: "serious", or "warning" for what costs precision only.
        compute: the output that a kernel with the bug gives, float64 [total_q, num_q_heads, head_dim_v], or None if the bug
            cannot show on the call.
    """

    name: str
    title: str
    kind: str
    severity: Severity
    compute: Callable[[AttentionCall], Tensor | None]


def _compute(change: bugs.Change, call: AttentionCall) -> Tensor | None:
    batch = requests(call)
    changed = [change(batch, b) for b in range(len(batch))]
    if all(c is None for c in changed):
        return None
    outs = [c if isinstance(c, Tensor) else attend(r if c is None else c) for r, c in zip(batch, changed, strict=True)]
    return torch.cat(outs, dim=1).transpose(0, 1)


def _all(kind: str, severity: Severity, *variants: tuple[str, str, bugs.Change]) -> tuple[Hypothesis, ...]:
    return tuple(Hypothesis(name, title, kind, severity, partial(_compute, change)) for name, title, change in variants)


_SIDES = (("previous", -1), ("next", 1))
_PARTS = (("keys", "k"), ("values", "v"), ("keys and values", "kv"))

FAMILY: tuple[Hypothesis, ...] = (
    *_all(
        LEAK, "serious",
        *((f"{part} of the {side} request", f"a sequence attends to the {part} of the {side} one in its batch",
           partial(bugs.leak, by, what, False)) for side, by in _SIDES for part, what in _PARTS),
        *((f"cached prefix of the {side} request", f"a sequence attends to the cached prefix of the {side} one in its batch",
           partial(bugs.leak, by, "kv", True)) for side, by in _SIDES),
        ("last key of the previous request seen", "every query also sees the last key of the sequence before",
         partial(bugs.boundary, -1, False)),
        ("first key of the next request seen", "every query also sees the first key of the sequence after",
         partial(bugs.boundary, 1, False)),
        ("all keys of the previous request seen", "every query also sees every key of the sequence before",
         partial(bugs.boundary, -1, True)),
    ),
    *_all(
        "causal mask", "serious",
        ("causal mask top-left", "query i of the new tokens sees keys 0 to i of the whole sequence", bugs.top_left),
        ("mask one key too many", "each query also sees the key after its own", partial(bugs.diagonal, 1)),
        ("mask one key too few", "no query sees its own key", partial(bugs.diagonal, -1)),
        ("no mask", "each query sees every key, later ones too", bugs.no_mask),
    ),
    *_all(
        "cached prefix", "serious",
        ("prefix dropped", "no query sees a cached key", bugs.prefix_dropped),
        ("prefix shifted one token late", "cached keys and values are read one token too far",
         partial(bugs.prefix_shifted, 1, "kv")),
        ("prefix shifted one token early", "cached keys and values are read one token too soon",
         partial(bugs.prefix_shifted, -1, "kv")),
        ("prefix values shifted against keys", "cached values are read one token too far, keys are not",
         partial(bugs.prefix_shifted, 1, "v")),
    ),
    *_all(
        "sliding window", "serious",
        *((f"sliding window of {n}", f"each query sees its last {n} keys only", partial(bugs.window, n))
          for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
    ),
    *_all(
        "softmax scale", "serious",
        ("scale missing", "scores are not scaled", partial(bugs.scaled, lambda r: 1 / r.scale)),
        ("scale applied twice", "scores are scaled twice", partial(bugs.scaled, lambda r: r.scale)),
        ("scale doubled", "scores are scaled by twice the scale", partial(bugs.scaled, lambda r: 2.0)),
        ("scale of head_dim_v", "the scale is that of the values' head dim",
         partial(bugs.scaled, lambda r: r.v.shape[2] ** -0.5 / r.scale if r.v.shape[2] != r.q.shape[2] else 1.0)),
        ("scale of all heads", "the scale is that of all q heads' dims together",
         partial(bugs.scaled, lambda r: (r.q.shape[0] * r.q.shape[2]) ** -0.5 / r.scale)),
        ("exp2 without log2(e)", "2 is raised to scores meant for e", partial(bugs.scaled, lambda r: math.log(2))),
        ("log2(e) applied to exp", "e is raised to scores meant for 2", partial(bugs.scaled, lambda r: 1 / math.log(2))),
    ),
    *_all(
        "kv heads", "serious",
        ("GQA heads interleaved", "q head h reads kv head h mod num_kv_heads", bugs.interleaved),
        ("kv head of the next group", "q heads read the kv head after theirs", partial(bugs.kv_head, 1)),
        ("kv head of the previous group", "q heads read the kv head before theirs", partial(bugs.kv_head, -1)),
    ),
    *_all(
        "quantisation scale", "serious",
        *((f"{what.upper()} scale of the {side} block", f"int8 {what.upper()} is scaled back with its {side} block's scale",
           partial(bugs.neighbours_scale, what, by)) for what in "kq" for side, by in _SIDES),
    ),
    *_all(
        "K smoothing", "serious",
        ("K smoothed by block", f"each block of {bugs.K_BLOCK} keys loses its own mean instead of one common mean",
         bugs.smoothed_by_block),
        ("K smoothed in new keys only", "new keys lose the mean of K and cached ones do not", bugs.new_keys_smoothed),
        ("K smoothing lost", "K is quantised to int8 without its mean taken off", bugs.not_smoothed),
    ),
    *_all(
        "last block lost", "serious",
        *((f"last partial block of {n} lost", f"keys beyond the last whole block of {n} are not seen",
           partial(bugs.last_block_lost, n)) for n in (16, 32, 64, 128)),
    ),
    *_all(
        "stale newest token", "serious",
        ("newest token stale", "the newest key and value are those of the token before", partial(bugs.newest, True)),
        ("newest token zero", "the newest key and value are zero", partial(bugs.newest, False)),
    ),
    *_all(
        "low-precision accumulator", "warning",
        *((f"{name} accumulator", f"sums over values are kept in {name}, rounded every {bugs.K_BLOCK} keys",
           partial(bugs.accumulator, dtype)) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))),
    ),
    *_all(
        "saturation", "serious",
        *((f"values saturate at {name}", f"values beyond {limit:g} are clamped", partial(bugs.values_saturate, limit))
          for name, limit in (("fp8 e4m3", bugs.E4M3_MAX), ("fp16", bugs.FP16_MAX))),
        *((f"scores saturate at {name}", f"q k products beyond {limit:g} are clamped", partial(bugs.scores_saturate, limit))
          for name, limit in (("fp8 e4m3", bugs.E4M3_MAX), ("fp16", bugs.FP16_MAX))),
    ),
    *_all(
        "overflow", "serious",
        ("scores overflow fp16", f"q k products beyond {bugs.FP16_MAX:g} become infinite", bugs.scores_overflow),
        ("values overflow fp16", f"values beyond {bugs.FP16_MAX:g} become infinite", bugs.values_overflow),
    ),
)  # fmt: skip
"""Every hypothesis, leaks first; names are unique."""

BY_NAME = {h.name: h for h in FAMILY}
