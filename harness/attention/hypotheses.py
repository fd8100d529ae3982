"""The family of hypotheses: the oracle with one named bug each.

A candidate that disagrees with the oracle and agrees with a hypothesis, up to its numerical noise, has that bug. A hypothesis gives
None for a call on which its bug cannot show, such as a dropped prefix where nothing is cached. In its output, NaN means that the
bug leaves the value undefined (a query that sees no key); infinity means that the value is expected not to be finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from assay.harness.attention import bugs
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import attend, requests

Severity = Literal["warning", "serious"]

LEAK = "leak"
"""The kind of every hypothesis in which one request reads another's data. It is reported first, even if others fit better."""


class Compute(Protocol):
    """(call, packed query rows or None for all) -> what a kernel with a bug answers; see `Hypothesis`."""

    def __call__(self, call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None: ...


@dataclass(frozen=True)
class Hypothesis:
    """One named bug.

    Attributes:
        id: stable, unique name, kebab-case.
        title: name in prose.
        about: what goes wrong, as a sentence without its full stop.
        kind: id of a group of variants, such as all sizes of a sliding window.
        severity: "serious", or "warning" for a bug that only costs precision.
        compute: (call, rows) -> output of a kernel with the bug, float64 [rows, num_q_heads, head_dim_v]; None where the bug
            cannot show on the call. The rows are packed query rows, int64, in increasing order; without them all are computed.
    """

    id: str
    title: str
    about: str
    kind: str
    severity: Severity
    compute: Compute


def changed_output(change: bugs.Change, call: AttentionCall, rows: Tensor | None = None) -> Tensor | None:
    """Compute the output of a call on which a bug shows; None where it shows in no sequence. See `Hypothesis.compute`."""
    batch = requests(call, rows)
    changed = [change(batch, b) if r.len_q else None for b, r in enumerate(batch)]  # no query, no output to differ
    if all(c is None for c in changed):
        return None
    outs = [c if isinstance(c, Tensor) else attend(r if c is None else c) for r, c in zip(batch, changed, strict=True)]
    return torch.cat(outs, dim=1).transpose(0, 1)


def _all(kind: str, severity: Severity, *variants: tuple[str, str, str, bugs.Change]) -> tuple[Hypothesis, ...]:
    return tuple(
        Hypothesis(id, title, about, kind, severity, partial(changed_output, change))
        for id, title, about, change in variants
    )


_SIDES = (("previous", -1), ("next", 1))
_PARTS = (("keys", "k"), ("values", "v"), ("keys and values", "kv"))
_LIMITS = (("fp8 e4m3", bugs.E4M3_MAX), ("fp16", bugs.FP16_MAX))

FAMILY: tuple[Hypothesis, ...] = (
    *_all(
        LEAK, "serious",
        *((f"leak-{part.replace(' and ', '-')}-{side}", f"{part} of the {side} request",
           f"a sequence attends to the {part} of the {side} one in its batch", partial(bugs.leak, by, what, False))
          for side, by in _SIDES for part, what in _PARTS),
        *((f"leak-prefix-{side}", f"cached prefix of the {side} request",
           f"a sequence attends to the cached prefix of the {side} one in its batch", partial(bugs.leak, by, "kv", True))
          for side, by in _SIDES),
        ("leak-last-key-previous", "last key of the previous request seen",
         "every query also sees the last key of the sequence before", partial(bugs.boundary, -1, False)),
        ("leak-first-key-next", "first key of the next request seen",
         "every query also sees the first key of the sequence after", partial(bugs.boundary, 1, False)),
        ("leak-all-keys-previous", "all keys of the previous request seen",
         "every query also sees every key of the sequence before", partial(bugs.boundary, -1, True)),
    ),
    *_all(
        "mask", "serious",
        ("mask-top-left", "causal mask top-left", "query i of the new tokens sees keys 0 to i of the whole sequence",
         bugs.top_left),
        ("mask-one-key-too-many", "mask one key too many", "each query also sees the key after its own",
         partial(bugs.diagonal, 1)),
        ("mask-one-key-too-few", "mask one key too few", "no query sees its own key", partial(bugs.diagonal, -1)),
        ("mask-missing", "no mask", "each query sees every key, later ones too", bugs.no_mask),
    ),
    *_all(
        "cached-prefix", "serious",
        ("prefix-dropped", "prefix dropped", "no query sees a cached key", bugs.prefix_dropped),
        ("prefix-one-token-late", "prefix shifted one token late", "cached keys and values are read one token too far",
         partial(bugs.prefix_shifted, 1, "kv")),
        ("prefix-one-token-early", "prefix shifted one token early", "cached keys and values are read one token too soon",
         partial(bugs.prefix_shifted, -1, "kv")),
        ("prefix-values-shifted", "prefix values shifted against keys",
         "cached values are read one token too far, keys are not", partial(bugs.prefix_shifted, 1, "v")),
    ),
    *_all(
        "sliding-window", "serious",
        *((f"sliding-window-{n}", f"sliding window of {n}", f"each query sees its last {n} keys only", partial(bugs.window, n))
          for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
    ),
    *_all(
        "softmax-scale", "serious",
        ("scale-missing", "scale missing", "scores are not scaled", partial(bugs.scaled, lambda r: 1.0)),
        ("scale-twice", "scale applied twice", "scores are scaled twice", partial(bugs.scaled, lambda r: r.scale**2)),
        ("scale-doubled", "scale doubled", "scores are scaled by twice the scale", partial(bugs.scaled, lambda r: 2 * r.scale)),
        ("scale-of-head-dim-v", "scale of head_dim_v", "the scale is that of the values' head dim",
         partial(bugs.scaled, lambda r: r.v.shape[2] ** -0.5 if r.v.shape[2] != r.q.shape[2] else r.scale)),
        ("scale-of-all-heads", "scale of all heads", "the scale is that of the dims of all q heads together",
         partial(bugs.scaled, lambda r: (r.q.shape[0] * r.q.shape[2]) ** -0.5)),
        ("exp2-without-log2e", "exp2 without log2(e)", "2 is raised to scores that were scaled for e",
         partial(bugs.scaled, lambda r: math.log(2) * r.scale)),
        ("exp-with-log2e", "log2(e) applied to exp", "e is raised to scores that were scaled for 2",
         partial(bugs.scaled, lambda r: r.scale / math.log(2))),
    ),
    *_all(
        "kv-heads", "serious",
        ("kv-heads-interleaved", "GQA heads interleaved", "q head h reads kv head h mod num_kv_heads", bugs.interleaved),
        ("kv-head-next-group", "kv head of the next group", "q heads read the kv head after theirs", partial(bugs.kv_head, 1)),
        ("kv-head-previous-group", "kv head of the previous group", "q heads read the kv head before theirs",
         partial(bugs.kv_head, -1)),
    ),
    *_all(
        "quantisation-scale", "serious",
        *((f"{what}-scale-{side}-block", f"{what.upper()} scale of the {side} block",
           f"int8 {what.upper()} is dequantised with the scale of its {side} block", partial(bugs.neighbours_scale, what, by))
          for what in "kq" for side, by in _SIDES),
    ),
    *_all(
        "k-smoothing", "serious",
        ("k-smoothed-by-block", "K smoothed by block",
         f"each block of {bugs.K_BLOCK} keys loses its own mean instead of one common mean", bugs.smoothed_by_block),
        ("k-smoothed-new-only", "K smoothed in new keys only", "the mean of K is subtracted from new keys but not from cached ones",
         bugs.new_keys_smoothed),
        ("k-smoothing-lost", "K smoothing lost", "K is quantised to int8 without its mean subtracted", bugs.not_smoothed),
    ),
    *_all(
        "last-block-lost", "serious",
        *((f"last-block-lost-{n}", f"last partial block of {n} lost", f"keys beyond the last full block of {n} are not seen",
           partial(bugs.last_block_lost, n)) for n in (16, 32, 64, 128)),
    ),
    *_all(
        "newest-token", "serious",
        ("newest-token-stale", "newest token stale", "the newest key and value are those of the token before",
         partial(bugs.newest, True)),
        ("newest-token-zero", "newest token zero", "the newest key and value are zero", partial(bugs.newest, False)),
    ),
    *_all(
        "accumulator", "warning",
        *((f"accumulator-{name}", f"{name} accumulator", f"sums over values are kept in {name}, rounded every {bugs.K_BLOCK} keys",
           partial(bugs.accumulator, dtype)) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))),
    ),
    *_all(
        "saturation", "serious",
        *((f"values-saturate-{name.replace(' ', '-')}", f"values saturate at {name}", f"values beyond {limit:g} are clamped",
           partial(bugs.values_saturate, limit)) for name, limit in _LIMITS),
        *((f"scores-saturate-{name.replace(' ', '-')}", f"scores saturate at {name}", f"q k products beyond {limit:g} are clamped",
           partial(bugs.scores_saturate, limit)) for name, limit in _LIMITS),
    ),
    *_all(
        "overflow", "serious",
        ("scores-overflow-fp16", "scores overflow fp16", f"q k products beyond {bugs.FP16_MAX:g} become infinite",
         bugs.scores_overflow),
        ("values-overflow-fp16", "values overflow fp16", f"values beyond {bugs.FP16_MAX:g} become infinite",
         bugs.values_overflow),
    ),
)  # fmt: skip
"""Every hypothesis, leaks first; ids are unique."""

BY_ID = {h.id: h for h in FAMILY}
