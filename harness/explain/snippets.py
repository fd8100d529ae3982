"""Each bug as code: the wrong function and the right one, minimal and runnable. Tests run them all against the hypotheses.

A function computes one sequence: q is [heads, new tokens, dim], k and v are [heads, cached prefix + new tokens, dim]. K and V
have a head for each q head, except where heads are the subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["sequence", "heads", "batch"]
"""What a function takes: "sequence", (q, k, v, scale); "heads", the same with fewer kv heads than q heads; "batch", (q, k, v,
starts, b, scale) with k and v of the whole batch, of which sequence b has the rows starts[b] to starts[b + 1]."""


@dataclass(frozen=True)
class Code:
    """The same function, wrong and right.

    Attributes:
        wrong: source of a function ``attend`` with the bug; torch is imported.
        right: the same without it.
        form: what the function takes.
    """

    wrong: str
    right: str
    form: Form = "sequence"


FORM_WORDS: dict[Form, str] = {
    "sequence": "One sequence: q is [heads, new, dim]; k and v are [heads, cached + new, dim].",
    "heads": "One sequence: q is [heads, new, dim]; k and v are [kv heads, cached + new, dim].",
    "batch": "Sequence b of a batch: q is [heads, new, dim]; k and v are those of the whole batch, [heads, tokens, dim].",
}
"""What the functions take, in words."""
_HOLE = "@"
"""Where wrong and right code differ in a template."""

_MASK = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool)@
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_CACHE = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    slots = torch.arange(keys)  # of each token in the KV cache
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
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
_HEADS = """\
def attend(q, k, v, scale):
    (heads, new, _), (kv_heads, keys, _) = q.shape, k.shape
    kv_head = @  # of each q head
    k, v = k[kv_head], v[kv_head]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_INT8 = """\
def int8(x, block, by=0):  # quantised by block, and dequantised with the scale of the block `by` further
    parts = x.split(block, 1)
    scales = [part.abs().amax((1, 2), keepdim=True) / 127 for part in parts]
    used = [scales[min(max(n + by, 0), len(parts) - 1)] for n in range(len(parts))]
    return torch.cat([(x / own).round() * its for x, own, its in zip(parts, scales, used)], 1)


def attend(q, k, v, scale):
    q, k = @
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_SMOOTH = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    mean = k.mean(1, keepdim=True)
    k = @
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_BLOCKS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    read = BLOCK * (@)  # keys that the loop over blocks reads
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[:, :read]
    scores = scale * q @@ k[:, :read].transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v[:, :read]
"""
_NEWEST = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    k, v = (torch.cat([x[:, :-1], @], 1) for x in (k, v))  # what the cache holds
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_ACCUMULATOR = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = (scale * q @@ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.@)
    for start in range(0, keys, 64):
        part = slice(start, start + 64)
        total = (total + weights[..., part] @@ v[:, part]).to(total.dtype)
    return total / weights.sum(-1, keepdim=True)
"""
_VALUES = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_PRODUCTS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    products = q @@ k.transpose(1, 2)
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    return (scale * products).masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_BATCH = """\
def attend(q, k, v, starts, b, scale):  # k and v of the whole batch, q of sequence b
    own, last = slice(starts[b], starts[b + 1]), len(starts) - 2
@    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""


def _code(template: str, wrong: str, right: str, form: Form = "sequence") -> Code:
    """Fill a template's hole with both contents."""

    def filled(put: str) -> str:
        return template.replace(_HOLE * 2, "\0").replace(_HOLE, put).replace("\0", _HOLE)

    return Code(filled(wrong), filled(right), form)


def _lines(*lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines)


_RIGHT_MASK, _GATHER = ".tril(keys - new)", "k, v = k[:, slots], v[:, slots]"
_SMOOTHED = "int8(q, 128), int8(k - k.mean(1, keepdim=True), 64)"
_OWN = _lines("k, v = k[:, own], v[:, own]")
_OTHER = {"previous": "max(b - 1, 0)", "next": "min(b + 1, last)"}


def _cache(wrong: str, gather: str = _GATHER) -> Code:
    return _code(_CACHE, _lines(wrong, gather), _lines(_GATHER))


def _leaks() -> dict[str, Code]:
    found = {}
    for side, other in _OTHER.items():
        rows = f"rows = slice(starts[{other}], starts[{other}] + own.stop - own.start)"
        for part, (k, v) in {
            "keys": ("rows", "own"),
            "values": ("own", "rows"),
            "keys-values": ("rows", "rows"),
        }.items():
            wrong = _lines(rows, f"k, v = k[:, {k}], v[:, {v}]")
            found[f"leak-{part}-{side}"] = _code(_BATCH, wrong, _OWN, "batch")
        prefix = "prefix = own.stop - own.start - q.shape[1]"
        mixed = "k, v = (torch.cat([x[:, rows][:, :prefix], x[:, own][:, prefix:]], 1) for x in (k, v))"
        found[f"leak-prefix-{side}"] = _code(_BATCH, _lines(rows, prefix, mixed), _OWN, "batch")
    for id_, rows in (("last-key", "starts[b] - (b > 0)"), ("all-keys", "starts[max(b - 1, 0)]")):
        wrong = _lines(f"rows = slice({rows}, own.stop)", "k, v = k[:, rows], v[:, rows]")
        found[f"leak-{id_}-previous"] = _code(_BATCH, wrong, _OWN, "batch")
    longer = _BATCH.replace(".tril(k.shape[1] - q.shape[1])", ".tril(k.shape[1] - (b < last) - q.shape[1])")
    longer = longer.replace("    scores =", "    seen[:, own.stop - own.start :] = True\n    scores =")
    wrong = _lines("rows = slice(own.start, own.stop + (b < last))", "k, v = k[:, rows], v[:, rows]")
    found["leak-first-key-next"] = Code(
        _code(longer, wrong, "").wrong, _code(_BATCH, "", _OWN).right, "batch"
    )  # the wrong loop forgets the mask of its last block as well
    return found


CODE: dict[str, Code] = {
    **_leaks(),
    "mask-top-left": _code(_MASK, ".tril()", _RIGHT_MASK),
    "mask-one-key-too-many": _code(_MASK, ".tril(keys - new + 1)", _RIGHT_MASK),
    "mask-one-key-too-few": _code(_MASK, ".tril(keys - new - 1)", _RIGHT_MASK),
    "mask-missing": _code(_MASK, "", _RIGHT_MASK),
    "prefix-dropped": _code(_MASK, _RIGHT_MASK + "\n    seen[:, : keys - new] = False", _RIGHT_MASK),
    "prefix-one-token-late": _cache("slots[: keys - new] += 1"),
    "prefix-one-token-early": _cache("slots[1 : keys - new] -= 1"),
    "prefix-values-shifted": _cache("slots[: keys - new] += 1", "v = v[:, slots]"),
    **{
        f"sliding-window-{n}": _code(_MASK, f"{_RIGHT_MASK}.triu(keys - new - {n - 1})", _RIGHT_MASK)
        for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    },
    "scale-missing": _code(_SCALE, "1", "scale"),
    "scale-twice": _code(_SCALE, "scale * scale", "scale"),
    "scale-doubled": _code(_SCALE, "2 * scale", "scale"),
    "scale-of-head-dim-v": _code(_SCALE, "v.shape[2] ** -0.5", "q.shape[2] ** -0.5"),
    "scale-of-all-heads": _code(_SCALE, "(heads * q.shape[2]) ** -0.5", "q.shape[2] ** -0.5"),
    "exp2-without-log2e": _code(_EXP2.replace("EXP", "exp2"), "scale", "log2_e * scale"),
    "exp-with-log2e": _code(_EXP2.replace("EXP", "exp"), "log2_e * scale", "scale"),
    "kv-heads-interleaved": _code(
        _HEADS, "torch.arange(heads) % kv_heads", "torch.arange(heads) // (heads // kv_heads)", "heads"
    ),
    **{
        f"kv-head-{which}-group": _code(
            _HEADS,
            f"(torch.arange(heads) // (heads // kv_heads) {by}) % kv_heads",
            "torch.arange(heads) // (heads // kv_heads)",
            "heads",
        )
        for which, by in (("next", "+ 1"), ("previous", "- 1"))
    },
    **{
        f"{what}-scale-{side}-block": _code(
            _INT8,
            f"int8(q, 128{q}), int8(k - k.mean(1, keepdim=True), 64{k})",
            _SMOOTHED,
        )
        for side, by in (("previous", -1), ("next", 1))
        for what, q, k in (("k", "", f", {by}"), ("q", f", {by}", ""))
    },
    "k-smoothed-by-block": _code(
        _SMOOTH, "torch.cat([part - part.mean(1, keepdim=True) for part in k.split(64, 1)], 1)", "k - mean"
    ),
    "k-smoothed-new-only": _code(
        _SMOOTH, "torch.cat([k[:, : keys - new], k[:, keys - new :] - mean], 1)", "k - mean"
    ),
    "k-smoothing-lost": _code(_INT8, "int8(q, 128), int8(k, 64)", _SMOOTHED),
    **{
        f"last-block-lost-{n}": _code(_BLOCKS.replace("BLOCK", str(n)), f"keys // {n}", f"-(-keys // {n})")
        for n in (16, 32, 64, 128)
    },
    "newest-token-stale": _code(_NEWEST, "x[:, -2:-1]", "x[:, -1:]"),
    "newest-token-zero": _code(_NEWEST, "0 * x[:, -1:]", "x[:, -1:]"),
    "accumulator-fp16": _code(_ACCUMULATOR, "float16", "float32"),
    "accumulator-bf16": _code(_ACCUMULATOR, "bfloat16", "float32"),
    **{
        f"{what}-saturate-{name}": _code(template, _lines(f"{x} = {x}.clamp(-{limit}, {limit})"), "")
        for what, x, template in (("values", "v", _VALUES), ("scores", "products", _PRODUCTS))
        for name, limit in (("fp8-e4m3", 448), ("fp16", 65504))
    },
    "scores-overflow-fp16": _code(
        _PRODUCTS, _lines('products = products.masked_fill(products > 65504, float("inf"))'), ""
    ),
    "values-overflow-fp16": _code(_VALUES, _lines('v = v.masked_fill(v.abs() > 65504, float("inf"))'), ""),
}  # fmt: skip
"""Every hypothesis by id."""
