"""Where a rule shows, in words: "only in decode and where a prefix is cached"."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.readout.features import HISTORY
from assay.harness.readout.mining import Condition, Literal, Term
from assay.harness.readout.symbols import TILE_WORDS, compared, nth, real_words, symbol_of, term_words, weight_words
from assay.harness.text import listed

_FROM_0 = frozenset(
    {"prefix", "i", "pos", "after", "seq", "from_last", "layer", "head", "kv", "call", "nth", "row", "member"}
)
_FROM_1 = frozenset({"new", "total", "seqs", "group", "kv_heads", "heads", "most_total", "most_new", "first_total"})
"""Features whose least value is 0, and 1: below the next value means equal to it."""
_FLAGS = frozenset({"decode", "causal", "same_layer", "same_phase"})

_FIXED = {
    ("seqs", "==", 1): "in calls of one sequence",
    ("decode", "==", 1): "in decode", ("decode", "==", 0): "in extend",
    ("causal", "==", 1): "behind a causal mask", ("causal", "==", 0): "without a causal mask",
    ("prefix", "==", 0): "where no prefix is cached", ("prefix", ">=", 1): "where a prefix is cached",
    ("seq", "==", 0): "in the first sequence of a batch", ("seq", ">=", 1): "except in the first sequence of a batch",
    ("from_last", "==", 0): "in the last sequence of a batch", ("from_last", ">=", 1): "except in the last sequence of a batch",
    ("i", "==", 0): "for the first query of a sequence", ("i", ">=", 1): "except for the first query of a sequence",
    ("after", "==", 0): "for the last query of a sequence", ("after", ">=", 1): "except for the last query of a sequence",
    ("same_layer", "==", 1): "where the previous call was of the same layer",
    ("same_layer", "==", 0): "where the previous call was of another layer",
    ("same_phase", "==", 1): "where the previous call was of the same phase",
    ("same_phase", "==", 0): "where the previous call was of the other phase",
    ("previous_total", ">=", 1): "except in the first sequence of a batch",
    ("next_total", ">=", 1): "except in the last sequence of a batch",
    ("most_prefix", ">=", 1): "where any sequence of the batch has a cached prefix",
    ("most_prefix", "==", 0): "where no sequence of the batch has a cached prefix",
    ("call", "==", 0): "in the first call", ("call", ">=", 1): "except in the first call",
    ("nth", "==", 0): "in the first call of a layer and phase",
    ("nth", ">=", 1): "except in the first call of a layer and phase",
    ("member", "==", 0): "in the first q head of each group",
}  # fmt: skip
"""The usual words for one comparison."""
_FIXED |= {
    (name, ">=", 1): "except in the first call"
    for name in HISTORY
    if name.startswith(("initial", "last")) and not name.endswith("prefix")
}

_AMOUNTS: dict[str, tuple[str, str, str]] = {
    "prefix": ("where {n} tokens are cached", "where {n} or more tokens are cached", "where fewer than {n} tokens are cached"),
    "new": ("where {n} tokens are new", "where {n} or more tokens are new", "where fewer than {n} tokens are new"),
    "total": ("in sequences of {n} tokens", "in sequences of {n} or more tokens", "in sequences of fewer than {n} tokens"),
    "seqs": ("in batches of {n} sequences", "in batches of {n} or more sequences", "in batches of fewer than {n} sequences"),
    "pos": ("at position p = {n}", "at positions p >= {n}", "at positions p < {n}"),
    "i": ("for query i = {n}", "for queries i >= {n}", "for queries i < {n}"),
    "row": ("for packed row r = {n}", "for packed rows r >= {n}", "for packed rows r < {n}"),
    "after": ("for query i = new - 1 - {n}", "except for the last {n} queries of a sequence",
              "for the last {n} queries of a sequence"),
    "top": ("where the largest score is that of key j = {n}", "where the running maximum still rises at a key j >= {n}",
            "where the running maximum no longer rises from key j = {n} on"),
    "seq": ("in the {nth} sequence of a batch", "except in the first {n} sequences of a batch",
            "in the first {n} sequences of a batch"),
    "from_last": ("in the sequence with {n} sequences after it", "except in the last {n} sequences of a batch",
                  "in the last {n} sequences of a batch"),
    "layer": ("in layer {n}", "in layers {n} and up", "in layers below {n}"),
    "head": ("in q head {n}", "in q heads {n} and up", "in q heads below {n}"),
    "kv": ("in kv head {n}", "in kv heads {n} and up", "in kv heads below {n}"),
    "member": ("in q head {n} of each group", "in q heads {n} and up of each group", "in q heads below {n} of each group"),
    "group": ("with {n} q heads per kv head", "with {n} or more q heads per kv head", "with fewer than {n} q heads per kv head"),
    "heads": ("with {n} q heads", "with {n} or more q heads", "with fewer than {n} q heads"),
    "kv_heads": ("with {n} kv heads", "with {n} or more kv heads", "with fewer than {n} kv heads"),
    "head_dim": ("with head_dim {n}", "with head_dim {n} or more", "with head_dim below {n}"),
    "call": ("in the {nth} call", "except in the first {n} calls", "in the first {n} calls"),
    "nth": ("in the {nth} call of a layer and phase", "except in the first {n} calls of a layer and phase",
            "in the first {n} calls of a layer and phase"),
}  # fmt: skip
"""Equal to n, n or more, and fewer than n."""
_LENGTHS = {
    "previous_total": ("the previous sequence has", "tokens"), "previous_prefix": ("the previous sequence has", "cached tokens"),
    "next_total": ("the next sequence has", "tokens"),
    "next_prefix": ("the next sequence has", "cached tokens"), "first_total": ("the first sequence has", "tokens"),
    "first_prefix": ("the first sequence has", "cached tokens"),
    "most_total": ("the longest sequence of the batch has", "tokens"),
    "most_new": ("the sequence with the most new tokens has", "of them"),
    "most_prefix": ("the longest prefix of the batch has", "tokens"),
    "alike_new": ("the same place in the first call with as many sequences had", "new tokens"),
    "alike_total": ("the same place in the first call with as many sequences had", "tokens"),
    "alike_prefix": ("the same place in the first call with as many sequences had", "cached tokens"),
    "initial_new": ("the first call began with", "new tokens"),
    "initial_total": ("the first call began with a sequence of", "tokens"),
    "initial_prefix": ("the first call began with", "cached tokens"), "last_new": ("the previous call began with", "new tokens"),
    "last_total": ("the previous call began with a sequence of", "tokens"),
    "last_prefix": ("the previous call began with", "cached tokens"),
}  # fmt: skip
"""Lengths of another sequence: whose, and of what. A call begins with its first sequence."""
_AMOUNTS |= {
    name: (
        f"where {whose} {{n}} {what}",
        f"where {whose} {{n}} or more {what}",
        f"where {whose} fewer than {{n}} {what}",
    )
    for name, (whose, what) in _LENGTHS.items()
} | {
    f"tile_{name}": (
        f"in the {{nth}} tile of {words} queries of a batch",
        f"except in the first {{n}} tiles of {words} queries of a batch",
        f"in the first {{n}} tiles of {words} queries of a batch",
    )
    for name, words in TILE_WORDS.items()
}
_RANGES = {
    "pos": "at positions {a} <= p < {b}", "i": "for queries {a} <= i < {b}", "row": "for packed rows {a} <= r < {b}"
}  # fmt: skip
"""Ranges that read better than "a to b"."""
_ALL_BUT = {"layer": "except in layer {n}", "head": "except in q head {n}", "kv": "except in kv head {n}",
            "member": "except in q head {n} of each group", "head_dim": "except with head_dim {n}"}  # fmt: skip
_EVERY = {"layer": "in {} layer", "head": "in {} q head", "call": "in {} call", "nth": "in {} call of a layer and phase",
          "seq": "in {} sequence of a batch"}  # fmt: skip
_INDEX = {"i": "for {} queries i", "pos": "at {} positions p", "row": "for {} packed rows r"}
_NUMBER = {"total": "the length of the sequence", "prefix": "the number of cached tokens", "new": "the number of new tokens",
           "after": "new - 1 - i"}  # fmt: skip
_EXCEPT = "except "
_TOKENS = {"i": "new tokens", "pos": "positions"}


def only(conditions: Sequence[Condition]) -> str:
    """Where conditions on queries hold: "only in decode and where a prefix is cached"; empty if they always do."""
    literals = [literal for one in conditions if not one.negated for literal in one.literals]
    phrases = list(dict.fromkeys(_merged(literals)))
    where = [phrase for phrase in phrases if not phrase.startswith(_EXCEPT)]
    but = [phrase.removeprefix(_EXCEPT) for phrase in phrases if phrase.startswith(_EXCEPT)]
    found = [f"only {_joined(where)}"] * bool(where) + [f"except {_joined(but)}"] * bool(but)
    for one in conditions:
        if one.negated and one.literals:
            inner = [
                f"not {phrase.removeprefix(_EXCEPT)}" if phrase.startswith(_EXCEPT) else phrase
                for phrase in _merged(one.literals)
            ]
            found.append(f"except {_all_of(list(dict.fromkeys(inner)))}")
    return ", ".join(dict.fromkeys(found))


def _all_of(phrases: Sequence[str]) -> str:
    """Phrases that hold together: "in q head 1 where a prefix is cached"."""
    plain = [phrase for phrase in phrases if not phrase.startswith(("where ", "not "))]
    where = [phrase for phrase in phrases if phrase.startswith("where ")]
    without = [phrase for phrase in phrases if phrase.startswith("not ")]
    return " and ".join(filter(None, (" ".join(filter(None, (*plain, _joined(where)))), *without)))


def _joined(phrases: Sequence[str]) -> str:
    """Phrases in a list, those with "where" last, which is said once."""
    plain = [phrase for phrase in phrases if not phrase.startswith("where ")]
    where = [phrase.removeprefix("where ") for phrase in phrases if phrase.startswith("where ")]
    return listed([*plain, *(f"where {phrase}" if not n else phrase for n, phrase in enumerate(where))])


def _merged(literals: Sequence[Literal]) -> list[str]:
    """Literals in words; two bounds on one amount make a range."""
    found, used = [], set[int]()
    for n, one in enumerate(literals):
        if n in used:
            continue
        other = next(
            (m for m, two in enumerate(literals) if m > n and two.term == one.term and {one.op, two.op} == {">=", "<"}),
            None,
        )
        if other is not None and _is_plain(one.term) and one.term.name in _AMOUNTS:
            used.add(other)
            low, high = sorted((one, literals[other]), key=lambda literal: literal.op == "<")
            found.append(_range(one.term.name, low.value, high.value))
        else:
            found.append(_literal(one))
    return found


def _is_plain(term: Term) -> bool:
    return not term.minus and term.block == 1 and not term.modulo


def _range(name: str, low: int, high: int) -> str:
    if high - low == 1:
        return _amount(name, "==", low)
    if name == "seq":
        return f"from the {nth(low + 1)} to the {nth(high)} sequence of a batch"
    if name in _RANGES:
        return _RANGES[name].format(a=low, b=high)
    return _AMOUNTS[name][0].replace(" head ", " heads ").replace("layer ", "layers ").format(n=f"{low} to {high - 1}")


def _literal(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    if term.unit:
        return _real(term, op, value)
    if term.minus and not term.modulo:
        return _difference(term, op, value)
    if term.modulo:
        return _residue(term, op, value)
    if term.block > 1:
        return _block(term, op, value)
    return _amount(term.name, op, value)


_REALS = {"lse": "the log-sum-exp of the scores", "maximum": "the largest score"}


def _real(term: Term, op: str, value: int) -> str:
    """A threshold on a real number in words."""
    comparison = "below" if op == "<" else "at least"
    if term.minus:
        return f"where the largest softmax weight is {comparison} {weight_words(value, term.unit)}"
    return f"where {_REALS[term.name]} is {comparison} {real_words(value, term.unit)}"


def _amount(name: str, op: str, value: int) -> str:
    if name in _FLAGS and op == "!=":
        op, value = "==", 1 - value
    if op == "<" and value == 1 + (name in _FROM_1) and name in _FROM_0 | _FROM_1:
        op, value = "==", value - 1
    if words := _FIXED.get((name, op, value)):
        return words
    if " " in name:
        return _expression(name, op, value)
    if op == "!=":
        return _ALL_BUT[name].format(n=value) if name in _ALL_BUT else f"where {symbol_of(name)} is not {value}"
    text = _AMOUNTS[name][("==", ">=", "<").index(op)]
    text = text.format(n=value, nth=nth(value + 1))
    return _one(text) if value == 1 else text


def _expression(name: str, op: str, value: int) -> str:
    first, operation, divisor = name.split()
    if operation == "%" and not value:
        of = symbol_of(f"{first} % {divisor}").rsplit(" mod ", 1)
        return f"where {of[0]} is {'not ' * (op == '!=')}a multiple of {of[1]}"
    return f"where {compared(symbol_of(name), op, '', value)}"


def _one(text: str) -> str:
    """A text about 1 thing in the singular."""
    if " 1 or more " in text or "fewer than" in text:
        return text
    for plural in (
        "tokens are",
        "new tokens",
        "cached tokens",
        "tokens",
        "sequences",
        "q heads",
        "kv heads",
        "queries",
        "calls",
    ):
        singular = plural.replace("are", "is") if plural.endswith("are") else plural
        singular = "query" if plural == "queries" else singular.replace("tokens", "token").replace("heads", "head")
        singular = singular.replace("sequences", "sequence").replace("calls", "call")
        for lead in ("1 ", "first 1 ", "last 1 "):
            text = text.replace(f"{lead}{plural}", f"{lead}{singular}")
    return text.replace("the first 1 ", "the first ").replace("the last 1 ", "the last ").replace(" 1 ", " one ")


def _residue(term: Term, op: str, value: int) -> str:
    if term.modulo == 2 and op == "!=":
        op, value = "==", 1 - value
    no, size = op == "!=", term.modulo
    if term.minus:
        return f"where {term_words(term)} is {'not ' * no}{value}"
    if term.block > 1:
        blocks = f"every {nth(size)} block of {term.block} {_TOKENS.get(term.name, term.name)}"
        return f"{_EXCEPT * no}in {blocks}{f' (from block {value})' if value else ''}"
    parity = ("even", "odd")[value] if size == 2 else ""
    if term.name in _EVERY:
        if parity and term.name in ("layer", "head"):
            return f"{_EVERY[term.name].format(parity)}s"
        first = f"numbers {value}, {value + size}, {value + 2 * size}, ..."
        return f"{_EXCEPT * no}{_EVERY[term.name].format(f'every {nth(size)}')} ({first})"
    if term.name in _INDEX:
        if parity:
            return _INDEX[term.name].format(parity)
        said = (
            f"that are {'not ' * no}multiples of {size}"
            if not value
            else f"with {term_words(term)} {'!=' if no else '='} {value}"
        )
        return _INDEX[term.name].format("").replace("  ", " ") + f" {said}"
    number = _NUMBER.get(term.name, symbol_of(term.name))
    if parity:
        return f"where {number} is {parity}"
    if not value:
        return f"where {number} is {'not ' * no}a multiple of {size}"
    return f"where {term_words(term)} is {'not ' * no}{value}"


def _block(term: Term, op: str, value: int) -> str:
    low, high = value * term.block, (value + 1) * term.block
    text = {"i": f"{low} <= i < {high}", "pos": f"{low} <= p < {high}"}.get(term.name)
    if text is None or op not in ("==", "!="):
        return f"where {compared(term_words(term), op, '', value)}"
    return _EXCEPT * (op == "!=") + (f"for queries {text}" if term.name == "i" else f"at positions {text}")


def _difference(term: Term, op: str, value: int) -> str:
    if (term.name, term.minus) == ("total", "most_total") and value == 0 and op != "!=":
        return "except in the longest sequence of a batch" if op == "<" else "in the longest sequence of a batch"
    if term.block > 1 and term.minus in ("total", "new") and value == 0 and op != "!=":
        lead = {"i": "for queries", "pos": "at positions"}[term.name]
        what = "new tokens" if term.name == "i" else "tokens"
        return f"{lead} {'before' if op == '<' else 'in'} the last, incomplete block of {term.block} {what}"
    a, b = (
        f"{symbol_of(name)} // {term.block}" if term.block > 1 else symbol_of(name) for name in (term.name, term.minus)
    )
    return f"where {compared(a, op, b, value)}"
