"""The features of a sequence of a call by name, and the words for their properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING

from assay.harness.attention.forms import longest_window
from assay.harness.evidence.kernel_result import Property, Value

if TYPE_CHECKING:  # reports say these words without torch
    from assay.harness.attention.shapes import Shape

Known = Mapping[str, Value]
"""Feature -> its value: a number (NaN if there is none) or a word."""
ASKS = {
    "a window": "window ", "a soft cap": "softcap ", "sinks": "sinks", "a temperature": "temperature ", "stored K and V": "K and V",
    "padded rows": "padded", "attention without a causal mask": "not causal", "cross attention": "cross",
}  # fmt: skip
"""Features that calls ask for, phrased to follow "the call asks for" -> a part of the names of their values."""
TILES = (16, 64, 128)
"""Tile sizes in queries, for counting tiles and items."""


def features(shape: Shape, at: int) -> dict[str, Value]:
    """List the features of a sequence of a call: its own, its neighbours' and the call's."""
    (new, prefix), lens = shape.lens[at], [n + p for n, p in shape.lens]
    others = [pair for b, pair in enumerate(shape.lens) if b != at]
    before, first = shape.lens[at - 1] if at else (nan, nan), shape.lens[0] if at else (nan, nan)
    (q_heads, kv_heads), window, ratio = shape.heads, longest_window(shape.asked), shape.heads[0] // shape.heads[1]
    earlier = shape.lens[:at] or ((nan, nan),)
    row, key_row = sum(n for n, _ in shape.lens[:at]), sum(lens[:at])
    known: dict[str, Value] = {
        "new": new, "prefix": prefix, "length": new + prefix, "prefix-new": prefix - new,
        "sequences": len(lens), "index": at, "after": len(lens) - 1 - at,
        "total_new": sum(n for n, _ in shape.lens), "total_keys": sum(lens), "row": row, "row_end": row + new, "key_row": key_row,
        "key_end": key_row + new + prefix, "packed": new * ratio, "longest-length": max(lens) - new - prefix,
        "longest": max(lens), "longest_new": max(n for n, _ in shape.lens),
        "longest_prefix": max(p for _, p in shape.lens), "shortest": min(lens), "least_new": min(n for n, _ in shape.lens),
        "least_prefix": min(p for _, p in shape.lens), "earlier_least_new": min(n for n, _ in earlier),
        "earlier-length": max(n + p for n, p in earlier) - new - prefix, "before_new": before[0], "before_prefix": before[1],
        "first_new": first[0], "first_prefix": first[1], "length-first": new + prefix - sum(first),
        "length-before": new + prefix - sum(before), "new-before": new - before[0], "prefix-before": prefix - before[1],
        "prefix-first": prefix - first[1],
        "q_heads": q_heads, "kv_heads": kv_heads, "ratio": ratio, "kv_heads-ratio": kv_heads - ratio, "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v or nan, "layer": shape.layer, "first_head": shape.first_head,
        "window": window or nan, "length-window": new + prefix - window if window else nan, "items": len(lens) * q_heads,
        "phase": shape.phase, "dtype": str(shape.dtype).removeprefix("torch."), "data": shape.data,
        "layout": shape.layout, "autograd": shape.grad_mode or "as called",
        "softcap": _asked(shape, "softcap"), "sinks": _asked(shape, "sinks near"), "temperature": _asked(shape, "temperature"),
        "stored": next((name for name in shape.asked if name.startswith("K and V")), "none"),
        **{f"asks: {what}": str(any(start in name for name in shape.asked)) for what, start in ASKS.items()},
        "asked": " and ".join(sorted(shape.asked)) or "nothing", "ways": " and ".join(shape.ways) or "none",
        "cached": {0: "none", len(lens): "all"}.get(sum(p > 0 for _, p in shape.lens), "some"),
        "company": "alone" if not others else "alike" if len(set(shape.lens)) == 1 else "unlike",
        "as_long_as_another": str(new + prefix in [n + p for n, p in others]),
        "as_many_new_as_another": str(new in [n for n, _ in others]), "an_empty_one": str(any(not n for n, _ in shape.lens)),
        "one_prefix": str(len({p for _, p in shape.lens}) == 1),
        "another_without_prefix": str(any(not p for _, p in others)), "another_with_prefix": str(any(p for _, p in others)),
    }  # fmt: skip
    for tile in TILES:
        tiles = [-(-n // tile) for n, _ in shape.lens]
        known |= {f"tiles_of_{tile}": sum(tiles), f"items_of_{tile}": sum(tiles[: at + 1]) * q_heads}
    return known


def _asked(shape: Shape, what: str) -> float:
    """Return the number of a feature that a call asks for, or NaN if it does not ask for it."""
    return next((float(name.rpartition(" ")[2]) for name in shape.asked if name.startswith(f"{what} ")), nan)


_NOUNS = {
    "new": "new tokens", "prefix": "cached prefix", "prefix-new": "cached prefix minus new tokens", "sequences": "sequences",
    "index": "place in the batch", "after": "sequences after it", "total_new": "new tokens of the batch",
    "total_keys": "keys of the batch", "row": "first row in q", "key_row": "first row in k",
    "longest": "length of the longest sequence",
    "longest_new": "most new tokens of a sequence", "longest_prefix": "longest cached prefix of the batch",
    "shortest": "length of the shortest sequence", "least_new": "fewest new tokens of a sequence",
    "least_prefix": "shortest cached prefix of the batch", "earlier_least_new": "fewest new tokens of a sequence before it",
    "before_new": "new tokens of the sequence before it", "before_prefix": "cached prefix of the sequence before it",
    "first_new": "new tokens of the first sequence", "first_prefix": "cached prefix of the first sequence",
    "length-first": "length minus the first sequence's length", "length-before": "length minus the previous sequence's length",
    "new-before": "new tokens minus the previous sequence's new tokens",
    "prefix-before": "cached prefix minus the previous sequence's prefix",
    "prefix-first": "cached prefix minus the first sequence's prefix", "q_heads": "q heads", "kv_heads": "kv heads",
    "kv_heads-ratio": "kv heads minus q heads per kv head",
    "ratio": "q heads per kv head", "head_dim_v": "head_dim of v", "first_head": "first head",
    "length-window": "length minus the window",
    "packed": "new tokens x q heads per kv head", "row_end": "last row in q, counted from 1,", "stored": "stored data",
    "key_end": "last row in k, counted from 1,", "softcap": "soft cap", "sinks": "sinks around",
    "items": "sequences x q heads", "autograd": "autograd mode", "asked": "what the call asks for", "ways": "way of calling",
    "query-prefix": "query index minus the cached prefix", "query": "query index", "queries_after": "queries after it",
    "dim": "output dim", "dims_after": "output dims after it", "width": "output dims", "query_row": "row in q",
    "heads_after": "q heads after it", "packed_row": "query index x q heads per kv head + place among these", "head": "q head",
    "kv_head": "kv head", "head_in_group": "place among the q heads of its kv head",
    **{f"tiles_of_{n}": f"tiles of {n} queries in the batch" for n in (16, 64, 128)},
    **{f"items_of_{n}": f"tiles of {n} queries up to its end x q heads" for n in (16, 64, 128)},
}  # fmt: skip
"""Words for the features whose names are not words."""
_YES_OR_NO = {
    **{f"asks: {what}": (f"the call asks for {what}", f"the call does not ask for {what}") for what in ASKS},
    "as_long_as_another": ("another sequence is as long", "no other sequence is as long"),
    "as_many_new_as_another": ("another sequence has as many new tokens", "no other sequence has as many new tokens"),
    "one_prefix": ("all sequences of the batch have the same cached prefix", "cached prefixes of the batch differ"),
    "an_empty_one": ("the batch has a sequence without new tokens", "each sequence has new tokens"),
    "another_without_prefix": ("another sequence has no cached prefix", "all others have a cached prefix"),
    "another_with_prefix": ("another sequence has a cached prefix", "no other sequence has a cached prefix"),
}
_PLAIN: dict[tuple[Value, ...], str] = {
    ("prefix", ">=", 1.0): "a prefix is cached", ("prefix", "<=", 0.0): "no prefix is cached",
    ("new", "<=", 1.0): "the sequence has one new token", ("new", ">=", 2.0): "the sequence has several new tokens",
    ("sequences", "<=", 1.0): "the sequence is alone", ("sequences", ">=", 2.0): "the sequence is in a batch",
    ("queries_after", "<=", 0.0): "the query is the last new token", ("query", "<=", 0.0): "the query is the first new token",
    ("longest-length", ">=", 1.0): "another sequence of the batch is longer",
    ("longest-length", "<=", 0.0): "no sequence of the batch is longer",
    ("index", "<=", 0.0): "the sequence is the first of its batch",
    ("index", ">=", 1.0): "the sequence is not the first of its batch",
    ("after", "<=", 0.0): "the sequence is the last of its batch",
    ("after", ">=", 1.0): "the sequence is not the last of its batch",
    ("before_new", "<=", 0.0): "the sequence before it has no new tokens", ("kv_heads", "<=", 1.0): "there is one kv head",
    ("earlier_least_new", "<=", 0.0): "a sequence before it has no new tokens",
    ("least_prefix", ">=", 1.0): "each sequence of the batch has a cached prefix",
}  # fmt: skip
_COMPANY = {
    "alone": "the sequence is alone", "alike": "all sequences of the batch are alike",
    "unlike": "sequences of the batch are unlike",
}  # fmt: skip
_DIFFERENCES = {
    "kv_heads-ratio": ("number of kv heads", "q heads per kv head"),
    "earlier-length": ("length of the longest sequence before it", "length"),
    "longest-length": ("length of the longest sequence", "length"),
    "prefix-new": ("cached prefix", "new tokens"), "length-first": ("length", "length of the first sequence"),
    "length-before": ("length", "length of the sequence before it"), "new-before": ("new tokens",
    "new tokens of the sequence before it"),
    "prefix-before": ("cached prefix", "cached prefix of the sequence before it"),
    "prefix-first": ("cached prefix", "cached prefix of the first sequence"), "length-window": ("length", "window"),
    "query-prefix": ("query index", "cached prefix"), "position-window": ("position", "window"),
}  # fmt: skip


_USUAL: Known = {
    "asked": "nothing", "data": "normal", "layer": 0, "layout": "packed", "autograd": "as called",
    "first_head": 0,
}  # fmt: skip


def words(rule: Sequence[Property], context: Known | None = None) -> str:
    """Format a rule, phrased to follow "where": "decode, cached prefix >= 129 and head_dim is 128"."""
    held = context or {}
    usual = [name for name, value in _USUAL.items() if len(held) > len(_USUAL) and held.get(name) == value]
    said = [_said(Property(feature=name, kind="in", values=(held[name],))) for name in held if name not in usual]
    said += ["all else is as usual"] * bool(usual)
    said += [_said(prop) for prop in sorted(rule, key=lambda prop: prop.feature != "phase")]
    return ", ".join([*said[:-2], " and ".join(said[-2:])]) if said else "every call"


def _said(prop: Property) -> str:
    """Format a property, with values at which calls were right if no call lies between these and a limit."""
    right = f" ({' and '.join(map(_number, prop.right))} {'are' if len(prop.right) > 1 else 'is'} right)" * bool(
        prop.right
    )
    return f"{_held(prop)}{right}"


def _held(prop: Property) -> str:
    noun, v = _NOUNS.get(prop.feature, prop.feature), [_number(value) for value in prop.values]
    if prop.feature in _YES_OR_NO and prop.kind == "in":
        return _YES_OR_NO[prop.feature][v == ["False"]]
    if prop.feature == "cached":
        return f"{' or '.join(v)} of the batch's sequences have a cached prefix"
    if prop.feature == "phase":
        return " or ".join(v)
    if prop.feature == "company":
        return " or ".join(map(_COMPANY.__getitem__, v))
    if (plain := _PLAIN.get((prop.feature, prop.kind, *prop.values))) is not None:
        return plain
    if prop.feature in _DIFFERENCES and prop.kind in (">=", "<=", "==", "!="):
        return _difference(prop)
    match prop.kind:
        case "==":
            return f"{noun} is {v[0]}"
        case "!=":
            return f"{noun} is not {v[0]}"
        case "between":
            return f"{v[0]} <= {noun} <= {v[1]}"
        case "in":
            return f"{noun} is {', '.join(v[:-1])}{' or ' * (len(v) > 1)}{v[-1]}"
        case "residue":
            return f"{noun} % {v[0]} == {v[1]}"
        case "no residue":
            return f"{noun} % {v[0]} != {v[1]}"
        case "residue between":
            return f"{v[1]} <= {noun} % {v[0]} <= {v[2]}"
        case "power of two" | "no power of two":
            return f"{noun} is {prop.kind.replace('no', 'not a') if prop.kind.startswith('no') else 'a power of two'}"
        case _:
            return f"{noun} {prop.kind} {v[0]}"


def _difference(prop: Property) -> str:
    of, less = _DIFFERENCES[prop.feature]
    limit = int(prop.values[0])
    if prop.kind in ("==", "!="):
        return f"{of} is {'not ' * (prop.kind == '!=')}{less}{f' {limit:+}' * bool(limit)}"
    if prop.kind == ">=":
        return f"{of} > {less}" if limit == 1 else f"{of} >= {less}{f' {limit:+}' * bool(limit)}"
    return f"{of} < {less}" if limit == -1 else f"{of} <= {less}{f' {limit:+}' * bool(limit)}"


def _number(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:g}"
