"""Which keys a rule speaks of, in words: "cached keys", "key p + 1", "even keys j <= p - 16 of the previous sequence"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.harness.readout.mining import Literal, Term
from assay.harness.readout.symbols import (
    FLIPPED,
    OF_KEY,
    bracketed,
    compared,
    minus_words,
    nth,
    plainest,
    plus,
    real_words,
    small,
    symbol_of,
    term_words,
    weight_words,
)


@dataclass(frozen=True)
class Keys:
    """Some keys in words.

    Attributes:
        text: in words.
        plural: whether they are several.
    """

    text: str
    plural: bool = True


@dataclass(frozen=True)
class _Bound:
    """A comparison of j with ``base + gap``; without a base, with a number."""

    op: str
    base: str
    gap: int

    @property
    def text(self) -> str:
        return plus(self.base, self.gap)


def of_keys(literal: Literal) -> bool:
    """Whether a literal speaks of a key, not of a query alone."""
    return bool({*literal.term.name.split(), *literal.term.minus.split()} & OF_KEY)


def keys(literals: Sequence[Literal], universe: str = "seen") -> Keys:
    """The keys for which literals hold.

    Args:
        literals: literals that speak of keys.
        universe: see `Part.universe`.
    """
    bounds, leads, clauses, sequence = list[_Bound](), list[str](), list[str](), ""
    for literal in literals:
        if (some := _bounds(literal)) is not None:
            bounds += some
        elif literal.term.name == "other" and not literal.term.modulo and not literal.term.minus:
            sequence = _sequence(literal.op, literal.value)
        elif literal.term.name == "key_seq" and not literal.term.modulo and not literal.term.minus:
            sequence = _absolute(literal.op, literal.value)
        elif literal.term.name == "key_row" and literal.op == "<" and not literal.term.modulo:
            sequence = (
                f"in the first {small(literal.value)} packed rows" if literal.value > 1 else "in the first packed row"
            )
        elif parity := _parity(literal):
            leads.append(parity)
        else:
            clauses.append(_clause(literal))
    if universe == "hidden":
        bounds = _after_own(bounds)
    if universe == "foreign":
        sequence = sequence or "of other sequences"
    return _spelled(bounds, leads, clauses, sequence)


def _spelled(bounds: Sequence[_Bound], leads: Sequence[str], clauses: Sequence[str], sequence: str) -> Keys:
    noun, plural, rest = _noun(bounds)
    if not bounds and not leads and len(clauses) == 1 and clauses[0].startswith("in every"):
        return Keys(" ".join(filter(None, (clauses[0].removeprefix("in "), sequence))))
    if not bounds and not clauses and not leads:
        noun = "all keys"
    return Keys(" ".join(filter(None, (*leads, noun, rest, " and ".join(clauses), sequence))), plural)


# Ranges of j


def _bounds(literal: Literal) -> list[_Bound] | None:
    """A literal as comparisons of j; None if it is none."""
    term, op, value = literal.term, literal.op, literal.value
    if term.modulo or op == "!=":
        return None
    if term.name == "j" and not term.minus and term.block > 1 and op == "==":
        return [_Bound(">=", "", value * term.block), _Bound("<", "", (value + 1) * term.block)]
    if term.block > 1:
        return None
    base = minus_words(term)
    if term.minus == "j":
        return [_Bound(FLIPPED[op], symbol_of(term.name), -value)]
    if term.name == "j":
        return [_Bound(op, base, value)]
    if term.name in ("fresh", "ahead"):
        start = {"fresh": "prefix", "ahead": "i"}[term.name]
        return [_Bound(op, f"{start} + {base}" if base else start, value)]
    if term.name == "left":
        return [_Bound(FLIPPED[op], f"total - {base}" if base else "total", -1 - value)]
    return None


def _after_own(bounds: list[_Bound]) -> list[_Bound]:
    """Bounds of keys that should be hidden, which all come after the query's own."""
    if not bounds:
        return [_Bound(">", "p", 0)]
    if len(bounds) == 1 and bounds[0].base == "p" and bounds[0].op in ("<", "<="):
        last = bounds[0].gap - (bounds[0].op == "<")
        return [_Bound("==", "p", 1)] if last == 1 else [_Bound(">", "p", 0), _Bound("<=", "p", last)]
    return bounds


ALL_BUT = "all keys but "
_ONE = {
    "p": "its own key",
    "0": "key 0",
    "prefix": "the first new key",
    "prefix - 1": "the last cached key",
    "total - 1": "the last key",
}
"""Usual names of one key."""
_SOME = {("<", "prefix"): "cached keys", (">=", "prefix"): "new keys"}
"""Usual names of several keys."""


def _noun(bounds: Sequence[_Bound]) -> tuple[str, bool, str]:
    """A noun for the keys within bounds, whether it is a plural, and what follows it."""
    equal = [one for one in bounds if one.op == "==" or (one.op == "<" and not one.base and one.gap == 1)]
    if equal:
        text = plus(equal[0].base, equal[0].gap) if equal[0].op == "==" else "0"
        rest = [one for one in bounds if one is not equal[0]]
        return _one(text), False, f"where {_relations(rest)}" if rest else ""
    if len(bounds) == 1:
        one = bounds[0]
        if (words := _SOME.get((one.op, one.text))) is not None:
            return words, True, ""
        if words := _from_end(one):
            return words, not words.startswith("the last key"), ""
    return "keys", True, _relations(bounds)


def _one(text: str) -> str:
    return _ONE.get(text, f"key {text}")


def _from_end(one: _Bound) -> str:
    """A bound that counts from the end, in words; empty if it does not."""
    left = -one.gap - (one.op in (">", "<="))  # j >= total - left, or j < total - left
    if one.base != "total" or left < 1:
        return ""
    last = "the last key" if left == 1 else f"the last {small(left)} keys"
    return last if one.op in (">", ">=") else ALL_BUT + last


def _relations(bounds: Sequence[_Bound]) -> str:
    """Bounds in one expression: "prefix <= j < p - 2"."""
    plain = [(op, plus(one.base, gap)) for one in bounds for op, gap in (plainest(one.op, one.gap, bool(one.base)),)]
    low, high = [one for one in plain if one[0] in (">", ">=")], [one for one in plain if one[0] in ("<", "<=")]
    other = [f"j {op} {text}" for op, text in plain if op not in (">", ">=", "<", "<=")]
    found = ""
    for (op, texts), name in ((_tightest(low), "max"), (_tightest(high), "min")):
        if op:
            bound = texts[0] if len(texts) == 1 else f"{name}({', '.join(texts)})"
            lower = f"{bound} {FLIPPED[op]} j" if high else f"j {op} {bound}"
            found = lower if name == "max" else f"{found or 'j'} {op} {bound}"
    rest = [f"j {op} {text}" for side in (low, high) for op, text in side if op != side[0][0]]
    return " and ".join(filter(None, [found, *rest, *other]))


def _tightest(side: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
    """The bounds with the operator of the first; the others are said apart."""
    if not side:
        return "", []
    return side[0][0], [text for op, text in side if op == side[0][0]]


# What is not a range


def _sequence(op: str, value: int) -> str:
    """Keys of which sequences of the batch, from that of the query on."""
    fixed = {
        ("==", -1): "of the previous sequence", ("==", 1): "of the next sequence", ("<", 0): "of earlier sequences",
        (">=", 1): "of later sequences", ("==", 0): "of its own sequence", ("!=", 0): "of other sequences",
    }  # fmt: skip
    if (op, value) in fixed:
        return fixed[op, value]
    place = f"{'next' if value > 0 else 'previous'} {small(abs(value))} sequences"
    if op == "==":
        return f"of the {nth(abs(value))} sequence {'after' if value > 0 else 'before'} its own"
    if op == "<" and value > 1:
        return f"of sequences up to the {nth(value - 1)} after its own"
    if op == ">=" and value < 0:
        return f"of the {place} and later ones" if value < -1 else "of the previous sequence and later ones"
    return f"of sequences whose offset is {op} {value}"


def _absolute(op: str, value: int) -> str:
    """Keys of which sequences of the batch, from the first on."""
    if op == "==" or (op == "<" and value == 1):
        return f"of the {nth(value + 1 if op == '==' else 1)} sequence of the batch"
    first = "sequence" if value == 1 else f"{small(value)} sequences"
    return {
        "<": f"of the first {first} of the batch", ">=": f"of all but the first {first} of the batch",
        "!=": f"of all sequences but the {nth(value + 1)} of the batch",
    }[op]  # fmt: skip


def _parity(literal: Literal) -> str:
    term = literal.term
    if term.name != "j" or term.minus or term.block > 1 or term.modulo != 2:
        return ""
    return ("even", "odd")[(literal.value + (literal.op == "!=")) % 2]


def _clause(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    if term.unit:
        return _scored(term, op, value)
    if term.modulo:
        return _residue(term, op, value)
    if term.block > 1:
        return _block(term, op, value)
    if op == "!=" and term.name == "j":
        return f"other than {_one(plus(minus_words(term), value))}"
    return f"with {compared(symbol_of(term.name), op, minus_words(term), value)}"


def _scored(term: Term, op: str, value: int) -> str:
    """A threshold on the score of a key, in words."""
    if term.minus == "lse":
        return f"with a softmax weight {op} {weight_words(value, term.unit)}"
    if term.minus != "maximum":
        return f"with a scaled score {op} {real_words(value, term.unit)}"
    weight = weight_words(value, term.unit)
    if weight.startswith("2^") or float(weight) == float(f"{float(weight):.1g}"):
        return f"with exp(score - maximum) {op} {weight}"
    return f"with score - maximum {op} {real_words(value, term.unit)}"


def _residue(term: Term, op: str, value: int) -> str:
    no, size = op == "!=", term.modulo
    if no and size == 2:
        no, value = False, 1 - value
    if term.block > 1 and not term.minus and term.name == "j":
        from_ = f" (from block {value})" if value else ""
        return f"{'not ' * no}in every {nth(size)} block of {term.block} keys{from_}"
    if term.name == "j" and not term.minus and not value:
        return f"whose index j is {'not ' * no}a multiple of {size}"
    if (term.name, term.minus) == ("pos", "j") and term.block == 1:
        distance = f"{('even', 'odd')[value]}" if size == 2 else f"{'not ' * no}a multiple of {size}"
        if size == 2 or not value:
            return f"whose distance p - j is {distance}"
    return f"with {term_words(term)} {'!=' if no else '='} {value}"


def _block(term: Term, op: str, value: int) -> str:
    name, other, size = term.name, term.minus, term.block
    if name == "j" and not other and op == "!=":
        return f"outside {value * size} <= j < {(value + 1) * size}"
    if op != "!=" and not (op == "<" and value == 0):
        if (name, other) == ("pos", "j") and (op, value) in (("==", 0), (">=", 1), ("==", 1)):
            return {
                ("==", 0): f"in the query's own block of {size}",
                (">=", 1): f"in blocks of {size} before the query's own",
                ("==", 1): f"in the block of {size} before the query's own",
            }[op, value]
        if (name, other, op, value) == ("fresh", "i", "==", 0):
            return f"in the query's own block of {size} new tokens"
        if (name, other, value) == ("j", "total", 0):
            return f"in the last, incomplete block of {size}"
        if (name, other, op, value) == ("j", "prefix", "==", 0):
            return f"in the block of {size} in which the prefix ends"
    a, b = (f"{bracketed(symbol_of(one))} // {size}" if one else "" for one in (name, other))
    if other == "j":
        a, b, op, value = b, a, FLIPPED[op], -value
    return f"with {compared(a, op, b, value)}"
