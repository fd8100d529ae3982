"""The symbols of rules, and integer expressions in them."""

from __future__ import annotations

import math
import re

from assay.harness.readout.mining import Term, Value

_LETTERS = {
    "i": "query i: the i-th new token of its sequence", "p": "p: its position, cached prefix included",
    "j": "key j: the j-th of the sequence", "r": "r: a packed row of q", "h": "h: a q head",
    "b": "b: the index of a sequence in its batch",
    "G": "G: the number of q heads per kv head",
}  # fmt: skip
_LENGTHS = {"prefix": "cached", "new": "new", "total": "all"}


def legend(sentence: str) -> str:
    """What the letters and lengths in a sentence stand for; empty if it has none."""
    words = set(re.findall(r"(?<![\w.])[a-zG](?![\w.])", sentence))
    letters = [text for letter, text in _LETTERS.items() if letter in words]
    lengths = [
        f"{name}: its number of {kind} tokens" for name, kind in _LENGTHS.items()
        if re.search(rf"[-+<>=(] ?{name}\b|\b{name} (mod|//|rounded|[-+<>=])", sentence)
    ]  # fmt: skip
    return "; ".join((*letters, *lengths, *("all from 0" for _ in letters[:1])))


TILE_WORDS = {
    **{str(size): str(size) for size in (16, 32, 64, 128)},
    **{f"packed_{rows}": f"{rows} // (q heads per kv head)" for rows in (64, 128)},
}
"""How a sentence calls the new tokens of a tile."""
SYMBOLS = {
    "i": "i", "pos": "p", "j": "j", "row": "r", "head": "h", "prefix": "prefix", "new": "new", "total": "total",
    "after": "(new - 1 - i)", "left": "(total - 1 - j)", "fresh": "(j - prefix)", "ahead": "(j - i)",
    "kv": "the kv head", "member": "h mod (q heads per kv head)", "layer": "the layer", "seq": "the index of the sequence",
    "from_last": "the number of later sequences", "seqs": "the number of sequences", "call": "the number of earlier calls",
    "nth": "the number of earlier calls of the layer and phase", "group": "the number of q heads per kv head",
    "heads": "the number of q heads", "kv_heads": "the number of kv heads", "head_dim": "head_dim",
    "other": "the offset of the sequence", "key_seq": "the index of its sequence", "key_row": "its packed row",
    "decode": "decode", "causal": "causal",
    "previous_total": "total of the previous sequence", "previous_prefix": "prefix of the previous sequence",
    "next_total": "total of the next sequence",
    "next_prefix": "prefix of the next sequence", "first_total": "total of the first sequence",
    "first_prefix": "prefix of the first sequence", "most_total": "the largest total of the batch",
    "most_new": "the largest new of the batch",
    "least_prefix": "the smallest prefix of the batch",
    **{f"{end}_{name}": f"p of the {end} query in its tile of {words}"
       for end in ("first", "last") for name, words in TILE_WORDS.items()},
    **{f"tile_{name}": f"the index of its tile of {words} in the batch" for name, words in TILE_WORDS.items()},
    **{f"tiles_{name}": f"the number of tiles of {words} of the batch" for name, words in TILE_WORDS.items()},
    **{f"grid_{name}": f"cdiv(total_q, {words})" for name, words in TILE_WORDS.items()},
    "peers_after": "the number of later q heads of its group", "most_prefix": "the largest prefix of the batch",
    "k_start": "cu_seqlens_k[b]", "q_start": "cu_seqlens_q[b]", "previous_start": "cu_seqlens_k[b - 1]",
    "next_start": "cu_seqlens_k[b + 1]", "second_previous_start": "cu_seqlens_k[b - 2]", "first_new": "new of the first sequence",
    "ranked_total": "total of the sequence whose place is the rank of this one, the longest first",
    "alike_new": "new of its place in the first call with as many sequences",
    "alike_total": "total of its place in the first call with as many sequences",
    "alike_prefix": "prefix of its place in the first call with as many sequences",
    "initial_new": "new of the first call", "initial_total": "total of the first call",
    "initial_prefix": "prefix of the first call", "last_new": "new of the previous call",
    "last_total": "total of the previous call", "last_prefix": "prefix of the previous call",
    "lse": "lse", "maximum": "m", "score": "s", "top": "the key of the largest score",
    "same_layer": "whether the previous call was of this layer", "same_phase": "whether the previous call was of this phase",
}  # fmt: skip
"""How a sentence calls each feature in an expression."""
OF_KEY = frozenset({"j", "left", "other", "key_seq", "key_row", "fresh", "ahead", "score"})
"""Features of a key rather than a query."""


_IN_EXPRESSIONS = {
    "group": "G", "heads": "(q heads)", "kv_heads": "(kv heads)", "seqs": "(sequences)", "head": "h", "seq": "b",
    "member": "(h mod G)",
}  # fmt: skip
"""How an expression of two features calls some of them, which have no symbol of their own."""


def symbol_of(name: str) -> str:
    """How a sentence calls a feature, or an expression of two: "i // G"; see `assay.harness.readout.mining.column`."""
    if " " not in name:
        return SYMBOLS[name]
    first, operation, second = name.split(" ")
    a, b = (_IN_EXPRESSIONS.get(one) or SYMBOLS.get(one, one) for one in (first, second))
    return f"{bracketed(a)} {'mod' if operation == '%' else operation} {bracketed(b)}"


def plus(text: str, number: int) -> str:
    """A sum in words: "p - 16", "p"; the number alone without a text."""
    if not text:
        return str(number)
    return f"{text} {'+' if number > 0 else '-'} {abs(number)}" if number else text


def minus_words(term: Term) -> str:
    """What a term subtracts: "prefix", "i mod 128", "(total rounded up to 16)"; empty for nothing."""
    if not term.minus:
        return ""
    if term.rounding == "mod":
        return f"i mod {term.size}" if term.minus == "i" else f"({symbol_of(term.minus)} mod {term.size})"
    if term.rounding:
        return f"({symbol_of(term.minus)} rounded {term.rounding} to {term.size})"
    return _blocks(term.minus, term.block)


def term_words(term: Term) -> str:
    """A term as an expression: "(p - j) mod 4"."""
    text = _blocks(term.name, term.block)
    if term.minus:
        text = f"{text} - {minus_words(term)}"
    if not term.modulo:
        return text
    return f"({text}) mod {term.modulo}" if term.minus or term.block > 1 else f"{text} mod {term.modulo}"


def real_words(value: int, unit: float) -> str:
    """A number that is counted in units: "2.5"."""
    return f"{value * unit:.7g}"


def weight_words(value: int, unit: float) -> str:
    """A weight whose log is counted in units, as a power of two if it is one: "2^-6", "0.01"."""
    power = value * unit / math.log(2)
    if abs(value) > 1 and abs(power - round(power)) < 2 * unit:
        return f"2^{round(power)}"
    return f"{math.exp(value * unit):.4g}"


def value_words(value: Value) -> str:
    """An integer as an expression: "16 - total mod 16"."""
    if value.term is None:
        return str(value.plus)
    text = term_words(value.term)
    if value.times > 0:
        return plus(text, value.plus)
    text = f"({text})" if value.term.minus and not value.term.modulo else text
    return f"{value.plus} - {text}" if value.plus else f"-{text}"


def _blocks(name: str, block: int) -> str:
    return f"{bracketed(symbol_of(name))} // {block}" if block > 1 else symbol_of(name)


def bracketed(text: str) -> str:
    """A text in brackets, if it has several words and none yet."""
    return f"({text})" if " " in text and not text.startswith("(") else text


def compared(a: str, op: str, b: str, gap: int) -> str:
    """A comparison of a with b + gap, with the plainest operator: "j > p" for "j >= p + 1"."""
    op, gap = plainest(op, gap, bool(b))
    return f"{a} {op} {plus(b, gap)}"


def plainest(op: str, gap: int, symbolic: bool = True) -> tuple[str, int]:
    """The operator and gap that read best for integers: "> p" for ">= p + 1", "< p" for "<= p - 1", "< 5" for "<= 4"."""
    if op == "<" and symbolic and gap:
        op, gap = "<=", gap - 1
    if op == ">":
        op, gap = ">=", gap + 1
    if op == "<=" and (not symbolic or gap == -1):
        op, gap = "<", gap + 1
    if op == ">=" and symbolic and gap == 1:
        op, gap = ">", 0
    return {"==": "="}.get(op, op), gap


FLIPPED = {">=": "<=", "<": ">", "==": "==", "!=": "!=", "<=": ">=", ">": "<"}
"""Operators with their sides exchanged."""
_SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def nth(number: int) -> str:
    """An ordinal: "third", "12th"."""
    words = ("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
    if number < len(words):
        return words[number]
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def small(number: int) -> str:
    """A small number in words."""
    return _SMALL[number] if 0 <= number < len(_SMALL) else str(number)
