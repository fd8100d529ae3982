"""Describes conditions: where a rule shows ("only in decode and where p mod 16 = 0"), and the keys it concerns ("keys j < 16").

Features with their own letter are compared as symbols; `legend` explains the symbols of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from assay.harness.localize import features
from assay.harness.readout.conditions import Condition, Literal, Term
from assay.harness.readout.features import Pairs, tried_condition
from assay.harness.text import listed

_LETTERS = {
    "i": "query i: the i-th new token of its sequence", "p": "p: its position, cached prefix included",
    "j": "key j: the j-th of the sequence", "r": "r: a packed row of q", "h": "h: a q head",
    "b": "b: the index of a sequence in its batch", "G": "G: the number of q heads per kv head",
}  # fmt: skip
_LENGTHS = {"prefix": "cached", "new": "new", "total": "all"}
# Names for the new tokens of a tile in a sentence.
_TILE_WORDS = {
    **{str(size): str(size) for size in (16, 32, 64, 128)},
    **{f"packed_{rows}": f"{rows} // (q heads per kv head)" for rows in (64, 128)},
}
SYMBOLS = {
    "i": "i", "pos": "p", "j": "j", "row": "r", "head": "h", "seq": "b", "prefix": "prefix", "new": "new", "total": "total",
    "after": "(new - 1 - i)", "left": "(total - 1 - j)", "fresh": "(j - prefix)", "ahead": "(j - i)", "back": "(p - j)",
    "kv": "the kv head",
    "member": "h mod G", "layer": "the layer", "from_last": "the number of later sequences", "seqs": "the number of sequences",
    "window": "the window", "group": "G",
    "heads": "the number of q heads", "kv_heads": "the number of kv heads", "head_dim": "head_dim", "decode": "decode",
    "causal": "causal",
    "other": "the offset of its sequence", "key_seq": "the index of its sequence", "key_row": "its packed row",
    "peers_after": "the number of later q heads of its group",
    "k_start": "cu_seqlens_k[b]", "q_start": "cu_seqlens_q[b]", "previous_start": "cu_seqlens_k[b - 1]",
    "next_start": "cu_seqlens_k[b + 1]", "second_previous_start": "cu_seqlens_k[b - 2]",
    "ranked_total": "total of the sequence whose index is this one's rank, longest first",
    **{f"{key}_{length}": f"{length} of {whose}" for key, whose in {
        "previous": "the previous sequence", "next": "the next sequence", "first": "the first sequence",
    }.items() for length in ("new", "total", "prefix")},
    **{f"most_{length}": f"the largest {length} of the batch" for length in ("new", "total", "prefix")},
    "least_prefix": "the smallest prefix of the batch",
    **{f"{end}_{name}": f"p of the {end} query in its tile of {words}"
       for end in ("first", "last") for name, words in _TILE_WORDS.items()},
    **{f"low_{name}": f"first key in the window of the last query in its tile of {words}" for name, words in _TILE_WORDS.items()},
}  # fmt: skip
"""Names of the features in an expression of a sentence."""
_FLAGS = frozenset({"decode", "causal"})
# Features whose values are names.
_PLACES = {"layer": "layer", "head": "q head", "kv": "kv head"}
# The usual words for some comparisons.
_FIXED = {
    ("decode", "==", 1): "in decode", ("decode", "==", 0): "in extend",
    ("causal", "==", 1): "under a causal mask", ("causal", "==", 0): "without a causal mask",
    ("prefix", "==", 0): "where no prefix is cached", ("prefix", ">=", 1): "where a prefix is cached",
    ("seqs", "==", 1): "in calls of one sequence", ("seqs", ">=", 2): "in batches",
    ("seq", "==", 0): "in the first sequence of a batch", ("from_last", "==", 0): "in the last sequence of a batch",
}  # fmt: skip
# Operators with their sides exchanged.
_FLIPPED = {">=": "<=", "<": ">", "==": "==", "!=": "!=", "<=": ">=", ">": "<"}


def legend(sentence: str) -> str:
    """Explain the letters and lengths in a sentence, or return an empty string if it has none."""
    words = set(re.findall(r"(?<![\w.])[a-zG](?![\w.])", sentence))
    letters = [text for letter, text in _LETTERS.items() if letter in words]
    lengths = [
        f"{name}: its number of {kind} tokens" for name, kind in _LENGTHS.items()
        if re.search(rf"[-+<>=(] ?{name}\b|\b{name} (mod|//|rounded|[-+<>=])", sentence)
    ]  # fmt: skip
    return "; ".join((*letters, *lengths, *("all from 0" for _ in letters[:1])))


# Expressions


def _bracketed(text: str) -> str:
    """Put brackets around a text of several words unless it has some."""
    return f"({text})" if " " in text and not text.startswith("(") else text


def plus(text: str, number: int) -> str:
    """Format a sum: "p - 16", "p", or only the number if the text is empty."""
    if not text:
        return str(number)
    return f"{text} {'+' if number > 0 else '-'} {abs(number)}" if number else text


def _term_words(term: Term) -> str:
    """Format a term: "(p - j) mod 4"."""
    text = _blocks(term.name, term.block)
    if term.minus:
        text = f"{text} - {_subtracted(term)}"
    if not term.modulo:
        return text
    return f"({text}) mod {term.modulo}" if term.minus or term.block > 1 else f"{text} mod {term.modulo}"


def _subtracted(term: Term) -> str:
    """Format the subtrahend of a term: "prefix", "(i mod 128)", "(total rounded up to 16)", or an empty string."""
    if not term.minus:
        return ""
    if term.rounding == "mod":
        return f"({SYMBOLS[term.minus]} mod {term.size})"
    if term.rounding:
        return f"({SYMBOLS[term.minus]} rounded {term.rounding} to {term.size})"
    return _blocks(term.minus, term.block)


def _blocks(name: str, block: int) -> str:
    return f"{_bracketed(SYMBOLS[name])} // {block}" if block > 1 else SYMBOLS[name]


def _compared(literal: Literal) -> str:
    """Format a comparison: "total mod 16 = 0", "prefix > new"; a key comes first: "j // 32 > i // 32"."""
    term, op, value = literal.term, literal.op, literal.value
    if term.modulo or not term.minus:
        return " ".join((_term_words(term), *map(str, _plainest(op, value, False))))
    left, right = _blocks(term.name, term.block), _subtracted(term)
    if term.minus in Pairs.OF_KEY and term.name not in Pairs.OF_KEY:
        plain, gap = _plainest(_FLIPPED[op], -value, True)
        return f"{right} {plain} {plus(left, gap)}"
    plain, gap = _plainest(op, value, True)
    return f"{left} {plain} {plus(right, gap)}"


def _plainest(op: str, gap: int, symbolic: bool) -> tuple[str, int]:
    """Return the operator and gap that read best for integers: "> p" for ">= p + 1", "<= p" for "< p + 1"."""
    if op == "<" and symbolic and gap:
        op, gap = "<=", gap - 1
    if op == ">":
        op, gap = ">=", gap + 1
    if op == "<=" and (not symbolic or gap == -1):
        op, gap = "<", gap + 1
    if op == ">=" and symbolic and gap == 1:
        op, gap = ">", 0
    return {"==": "="}.get(op, op), gap


# Where a rule shows


def only(conditions: Sequence[Condition]) -> str:
    """Describe where conditions on queries hold: "only in decode and where a prefix is cached", or "" if they always do."""
    holding = _phrases([literal for condition in conditions if not condition.negated for literal in condition.literals])
    phrases = [f"only {listed(holding)}"] if holding else []
    phrases += [
        f"except {' and '.join(_phrases(condition.literals))}"
        for condition in conditions if condition.negated and condition.literals
    ]  # fmt: skip
    return ", ".join(dict.fromkeys(phrases))


def _phrases(literals: Sequence[Literal]) -> list[str]:
    """Describe each literal; comparisons come last, after one "where", and two bounds on one amount make a range."""
    phrases = list(dict.fromkeys(_phrase(literal) for literal in literals if not _second(literal, literals)))
    ranges = {low: high for low in literals if (high := _upper(low, literals)) is not None}
    phrases += [f"where {low.value} <= {_term_words(low.term)} < {high.value}" for low, high in ranges.items()]
    where = [phrase.removeprefix("where ") for phrase in phrases if phrase.startswith("where ")]
    plain = [phrase for phrase in phrases if not phrase.startswith("where ")]
    return plain + ([f"where {' and '.join(where)}"] if where else [])


def _upper(literal: Literal, literals: Sequence[Literal]) -> Literal | None:
    """Return the upper bound on the term of a lower bound, or None if there is none."""
    term = literal.term
    if literal.op != ">=" or term.minus:
        return None
    return next((other for other in literals if (other.term, other.op) == (term, "<")), None)


def _second(literal: Literal, literals: Sequence[Literal]) -> bool:
    """Return True if a literal is one of two bounds that are described together."""
    return any(literal in (low, _upper(low, literals)) for low in literals if _upper(low, literals) is not None)


def _phrase(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    plain = term.block == 1 and not (term.modulo or term.minus)
    if term.name == "tried" and (tried := tried_condition.get()) is not None:
        holding = (op, value) in (("==", 1), (">=", 1), ("!=", 0))
        return f"{'where' if holding else 'except where'} {features.words(tried.rule, tried.context)}"
    if (term.name, term.minus, op, value) == ("heads", "head", "==", 1):
        return "in the last q head"
    if term.name in _FLAGS and op == "!=":
        op, value = "==", 1 - value
    if plain and op == "<" and value == 1 + (term.name in ("seqs", "new", "total")):
        op, value = "==", value - 1
    if plain and (words := _FIXED.get((term.name, op, value))):
        return words
    if plain and op == "==" and term.name in _PLACES:
        return f"in {_PLACES[term.name]} {value}"
    return f"where {_compared(Literal(term, op, value))}"


# Keys that a rule concerns

ALL_BUT = "all keys but "
_KEY = {
    "p": "its own key", "0": "key 0", "prefix": "the first new key", "prefix - 1": "the last cached key",
    "total - 1": "the last key",
}  # fmt: skip
# Usual names of one key, and of several keys.
_SOME = {("<", "prefix"): "cached keys", (">=", "prefix"): "new keys"}
_SEQUENCES = {
    ("==", -1): "of the previous sequence", ("==", 1): "of the next sequence", ("<", 0): "of earlier sequences",
    (">=", 1): "of later sequences", ("==", 0): "of its own sequence", ("!=", 0): "of other sequences",
}  # fmt: skip
Keys = tuple[str, bool]
"""A description of keys, and whether it is a plural."""


@dataclass(frozen=True)
class _Bound:
    """A comparison of j with ``base + gap``, or with a number if there is no base."""

    op: str
    base: str
    gap: int

    @property
    def words(self) -> tuple[str, str]:
        op, gap = _plainest(self.op, self.gap, bool(self.base))
        return op, plus(self.base, gap)


def of_keys(literal: Literal) -> bool:
    """Return True if a literal refers to a key, not only to a query."""
    return not {literal.term.name, literal.term.minus}.isdisjoint(Pairs.OF_KEY)


def keys(literals: Sequence[Literal], universe: str = "seen") -> Keys:
    """Describe the keys of a universe (see `KeyFactor`) for which literals on keys hold."""
    bounds, clauses, sequence = list[_Bound](), list[str](), ""
    for literal in literals:
        term = literal.term
        if (some := _bounds(literal)) is not None:
            bounds += some
        elif term.name == "other" and (literal.op, literal.value) in _SEQUENCES and not (term.modulo or term.minus):
            sequence = _SEQUENCES[literal.op, literal.value]
        else:
            clauses.append(f"with {_compared(literal)}")
    if universe == "hidden":
        bounds = _after_own(bounds)
    if universe == "outside":
        bounds = bounds or [_Bound("<=", "p - window", 0)]
    if universe == "foreign":
        sequence = sequence or "of other sequences"
    noun, plural, rest = _noun(bounds)
    if not bounds and not clauses:
        noun = "all keys"
    return " ".join(filter(None, (noun, rest, " and ".join(clauses), sequence))), plural


def _bounds(literal: Literal) -> list[_Bound] | None:
    """Rewrite a literal as comparisons of j, or return None if that is not possible."""
    term, op, value = literal.term, literal.op, literal.value
    if term.modulo or op == "!=":
        return None
    if term.name == "j" and not term.minus and term.block > 1 and op == "==":
        return [_Bound(">=", "", value * term.block), _Bound("<", "", (value + 1) * term.block)]
    if term.block > 1:
        return None
    base = _subtracted(term)
    if term.name == "back":
        return [_Bound(_FLIPPED[op], f"p - {base}" if base else "p", -value)]
    if term.minus == "j":
        return [_Bound(_FLIPPED[op], SYMBOLS[term.name], -value)]
    if term.name in ("j", "fresh", "ahead"):
        start = {"j": "", "fresh": "prefix", "ahead": "i"}[term.name]
        return [_Bound(op, " + ".join(filter(None, (start, base))), value)]
    if term.name == "left":
        return [_Bound(_FLIPPED[op], f"total - {base}" if base else "total", -1 - value)]
    return None


def _after_own(bounds: list[_Bound]) -> list[_Bound]:
    """Return the bounds of keys that should be hidden, which all come after the query's own."""
    if not bounds:
        return [_Bound(">", "p", 0)]
    if len(bounds) == 1 and bounds[0].base == "p" and bounds[0].op in ("<", "<="):
        last = bounds[0].gap - (bounds[0].op == "<")
        return [_Bound("==", "p", 1)] if last == 1 else [_Bound(">", "p", 0), _Bound("<=", "p", last)]
    return bounds


def _noun(bounds: Sequence[_Bound]) -> tuple[str, bool, str]:
    """Return a noun for the keys within bounds, whether it is a plural, and the text after it."""
    equal = [bound for bound in bounds if bound.op == "==" or (bound.op, bound.base, bound.gap) == ("<", "", 1)]
    if equal:
        text = plus(equal[0].base, equal[0].gap) if equal[0].op == "==" else "0"
        rest = [bound for bound in bounds if bound is not equal[0]]
        return _KEY.get(text, f"key {text}"), False, f"where {_relations(rest)}" if rest else ""
    if len(bounds) == 1 and (words := _SOME.get((bounds[0].op, plus(bounds[0].base, bounds[0].gap)))) is not None:
        return words, True, ""
    return "keys", True, _relations(bounds)


def _relations(bounds: Sequence[_Bound]) -> str:
    """Format bounds as one expression: "prefix <= j < p - 2"."""
    plain = [bound.words for bound in bounds]
    low, high = ([words for words in plain if words[0] in ops] for ops in ((">", ">="), ("<", "<=")))
    rest = [f"j {op} {text}" for op, text in (*low[1:], *high[1:], *(words for words in plain if words[0] == "="))]
    if low and high:
        both = f"{low[0][1]} {_FLIPPED[low[0][0]]} j {high[0][0]} {high[0][1]}"
    else:
        both = "".join(f"j {op} {text}" for op, text in (*low[:1], *high[:1]))
    return " and ".join(filter(None, [both, *rest]))
