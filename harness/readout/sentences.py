"""Rules in the field's words: one sentence for what a kernel was observed to compute.

i is the index of a query among the new tokens of its sequence, p its position (cached prefix included), j the index of a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.harness.readout.dims import Dims
from assay.harness.readout.effects import Biased, Constant, Kept, Limited, Plus, Scale, Times, WithAtom
from assay.harness.readout.elsewhere import FromElsewhere, Moved, OtherKvHead
from assay.harness.readout.forms import BLANK
from assay.harness.readout.key_factors import KeyFactors, Part
from assay.harness.readout.known_effects import Known
from assay.harness.readout.merges import Merged
from assay.harness.readout.mining import Condition, Literal, Term, Value
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.text import listed, percent

_OF_KEY = ("j", "left", "other", "fresh", "ahead")
_SYMBOLS = {
    "pos": "p", "i": "i", "j": "j", "prefix": "prefix", "new": "new", "total": "total", "left": "keys after j", "after": "queries after i",
    "head": "q head", "kv": "kv head", "member": "place in the group", "layer": "layer", "seq": "place in the batch",
    "from_last": "places before the last sequence", "seqs": "batch", "call": "call number", "nth": "call number of the layer and phase", "row": "packed row of q",
    "previous_total": "total of the sequence before", "previous_prefix": "prefix of the sequence before",
    "next_total": "total of the sequence after", "first_total": "total of the first sequence",
    "first_prefix": "prefix of the first sequence", "most_total": "longest total of the batch", "most_new": "most new of the batch",
    "group": "q heads per kv head", "heads": "q heads", "initial_new": "new of the first call", "initial_total": "total of the first call",
    "initial_prefix": "prefix of the first call", "last_new": "new of the call before", "last_total": "total of the call before",
    "last_prefix": "prefix of the call before", "same_layer": "same layer as the call before", "same_phase": "same phase as the call before", "fresh": "(j - prefix)", "ahead": "j - i", "kv_heads": "kv heads", "head_dim": "head_dim", "other": "sequences further",
}  # fmt: skip


def sentence(operator: Operator) -> str:
    """What a kernel computes, as one sentence for each clause, without the last full stop; empty if it computes attention."""
    return ". ".join(_clause(clause) for clause in operator.clauses)


def _clause(clause: Clause) -> str:
    text, inner = _effect(clause.effect)
    where = _where([clause.condition, *inner])
    text += f", {where}" if where else ""
    return text if clause.sometimes == 1 else f"{text}; this shows in {percent(clause.sometimes)} of such calls"


def _effect(effect: Effect) -> tuple[str, list[Condition]]:
    """An effect in words, and the conditions on queries that its own conditions hold in common."""
    match effect:
        case KeyFactors():
            return _keys(effect)
        case Scale():
            return f"scores are multiplied by {effect.factor.words}", []
        case Times():
            return f"the output is multiplied by {effect.factor.words}", []
        case Kept():
            right, before = effect.share
            if right == 0 and before == 1:
                return "the output is that of the call before", []
            return f"the output is {right:g} times the right one plus {before:g} times that of the call before", []
        case Limited():
            return _limited(effect), []
        case WithAtom():
            right, other = effect.share
            return f"the output is {right:g} times the right one plus {other:g} times {effect.atom.words}", []
        case Biased():
            sign = "gain" if effect.slope > 0 else "lose"
            return f"scaled scores {sign} {abs(effect.slope):.3g} per token of distance between query and key", []
        case Plus():
            of = " times the mean size of the call's outputs" if effect.relative else ""
            return f"{effect.value:.4g}{of} is added to every number of the output", []
        case Constant():
            if math.isnan(effect.value):
                return "the output is NaN", []
            if math.isinf(effect.value):
                return "the output is infinite", []
            return (
                "the output is zero" if effect.value == 0 else f"every number of the output is {effect.value:g}"
            ), []
        case FromElsewhere():
            return _elsewhere(effect), []
        case OtherKvHead():
            return f"q head h reads kv head {_value(effect.kv)}", []
        case Moved():
            return _moved(effect)
        case Merged():
            return _merged(effect), []
        case Dims():
            return effect.words.format(effect.of), []
        case Known():
            return effect.about, []
        case _:
            return "the output is changed", []


def _limited(effect: Limited) -> str:
    if effect.how == "capped":
        return f"scores have a soft cap of {effect.limit:.4g}: they become {effect.limit:.4g} * tanh(score / {effect.limit:.4g})"
    what = "values" if effect.what == "values" else "q k products"
    then = {"clamped": "are clamped", "infinite": "make the output infinite", "NaN": "make the output NaN"}[effect.how]
    return f"{what} beyond {effect.limit:.4g} {then}"


def _elsewhere(effect: FromElsewhere) -> str:
    right, other = effect.share
    if effect.what == "query":
        if right == 0:
            return f"scores are computed with the q of {effect.source.words}"
        return (
            f"scores are computed with {right:g} times the right q plus {other:g} times that of {effect.source.words}"
        )
    if effect.what == "weights":
        mixed = f"{right:g} times the right ones plus {other:g} times" if right else ""
        return f"the weights of a query are {mixed} those of {effect.source.words}, with the right values".replace(
            "  ", " "
        )
    if effect.share == (0.0, 1.0):
        return f"a query has the output of {effect.source.words}"
    return f"the output is {right:g} times the right one plus {other:g} times that of {effect.source.words}"


def _moved(effect: Moved) -> tuple[str, list[Condition]]:
    what = {"k": "keys", "v": "values", "kv": "keys and values"}[effect.what]
    own, rows = _split(effect.condition)
    which = f" of keys {own}" if own else ""
    if effect.share != (0.0, 1.0):
        right, other = effect.share
        return f"the {what}{which} are {right:g} times their own plus {other:g} times those of {effect.words}", [rows]
    return f"the {what}{which} are those of {effect.words}", [rows]


def _merged(effect: Merged) -> str:
    parts = f"blocks of {effect.block} keys" if effect.block else "cached and new keys"
    return {
        "equal": f"{parts} are attended to alone and merged with equal weights",
        "base2": f"{parts} are merged by log-sum-exps of base 2 that are taken for base e",
        "base-e": f"{parts} are merged by log-sum-exps of base e that are taken for base 2",
        "max": f"{parts} are merged by their largest scores in place of their log-sum-exps",
        "cached base2": f"{parts} are merged by log-sum-exps, that of the cached keys in base 2 and taken for base e",
        "cached base-e": f"{parts} are merged by log-sum-exps, that of the cached keys in base e and taken for base 2",
        "next head": f"{parts} are merged by the log-sum-exps of the next q head",
        "mean": f"each of the {parts} loses its own mean of K, which shifts its scores against the others",
    }[effect.law]


def _keys(effect: KeyFactors) -> tuple[str, list[Condition]]:
    texts, rows = [], []
    for part in effect.parts:
        own, row = _split(part.condition)
        texts.append(_part(part, own))
        rows.append(row)
    common = [row for row in rows if row.literals or row.negated]
    if common and any(row != rows[0] for row in rows):  # each says its own
        texts = [f"{text}{', ' + _where([row]) if row.literals else ''}" for text, row in zip(texts, rows, strict=True)]
        common = []
    if effect.denominator == "all":
        texts.append("the denominator counts all keys that it should")
    if effect.phantom is not None:
        number = _value(effect.phantom)
        texts.append(
            f"the denominator counts {number} more key{'s' * (number != '1')} with a score of 0, whose value is 0"
        )
    return "; ".join(texts), common[:1]


def _part(part: Part, which: str) -> str:
    if part.of == "score":
        return f"scores of {f'keys {which}' if which else 'all keys'} are multiplied by {part.factor:.4g}"
    keys = f"keys {which}" if which else "any key" if part.factor == 0 else "all keys"
    if part.universe == "seen":
        if part.factor == 0:
            return f"query i does not see {keys}"
        if part.factor == BLANK:
            return f"{keys} and their values are zero to the kernel"
        if part.factor == 2:
            return f"query i sees {keys} twice"
        return f"weights of {keys} are multiplied by {part.factor:.4g}"
    of = {"hidden": "", "foreign": " of other sequences"}[part.universe]
    if part.universe == "hidden" and not which:
        keys = "the keys after its own"
    times = "" if part.factor == 1 else f", with weights multiplied by {part.factor:.4g}"
    return f"query i also sees {keys}{of}{times}"


def _split(condition: Condition) -> tuple[str, Condition]:
    """What a condition says of keys, in words, and what it says of queries alone."""
    if condition.negated:
        inner = " and ".join(_literal(literal) for literal in condition.literals)
        return f"unless {inner}", Condition()
    keys = [literal for literal in condition.literals if {literal.term.name, literal.term.minus} & set(_OF_KEY)]
    rows = tuple(literal for literal in condition.literals if literal not in keys)
    return _joined([_literal(literal) for literal in keys]), Condition(rows)


def _joined(words: Sequence[str]) -> str:
    return " and ".join(words)


def _where(conditions: Sequence[Condition]) -> str:
    """Conditions on queries in words: "only in decode and where a prefix is cached"."""
    literals: list[str] = []
    for condition in conditions:
        words = [_literal(literal) for literal in condition.literals]
        if condition.negated and words:
            literals.append("not " + _joined(words))
        else:
            literals += [word for word in words if word not in literals]
    return f"only {listed(literals)}" if literals else ""


def _value(value: Value) -> str:
    if value.term is None:
        return str(value.plus)
    if value.times < 0:
        return f"{value.plus} - {_number(value.term)}"
    sign = f" {'+' if value.plus > 0 else '-'} {abs(value.plus)}" if value.plus else ""
    return _number(value.term) + sign


def _number(term: Term) -> str:
    name = _SYMBOLS[term.name]
    text = f"{name} // {term.block}" if term.block > 1 else name
    if term.minus:
        other = _SYMBOLS[term.minus]
        text += f" - {other} // {term.block}" if term.block > 1 else f" - {other}"
        text = f"({text})" if term.modulo else text
    return f"{text} mod {term.modulo}" if term.modulo else text


def _literal(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    plain = not term.minus and term.block == 1 and not term.modulo
    if plain and (words := _plain(term.name, op, value)):
        return words
    if term.modulo:
        return _residue(term, op, value)
    if term.minus:
        return _difference(term, op, value)
    if term.block > 1:
        return _block(term, op, value)
    symbol = {"==": "=", "!=": "!=", ">=": ">=", "<": "<"}[op]
    return f"{'' if term.name in _OF_KEY else 'where '}{_SYMBOLS[term.name]} {symbol} {value}"


def _plain(name: str, op: str, value: int) -> str:
    """The usual words for a literal on one feature; empty where there are none."""
    key = (name, op)
    fixed = {
        ("decode", "==", 1): "in decode", ("decode", "==", 0): "in extend", ("causal", "==", 1): "behind a causal mask",
        ("causal", "==", 0): "without a causal mask", ("prefix", ">=", 1): "where a prefix is cached",
        ("prefix", "<", 1): "where no prefix is cached", ("seqs", ">=", 2): "in batches of two or more",
        ("seqs", "<", 2): "in calls of one sequence", ("seq", "<", 1): "in the first sequence of a call",
        ("seq", ">=", 1): "in sequences after the first of a batch", ("from_last", "<", 1): "in the last sequence of a call",
        ("from_last", ">=", 1): "in sequences before the last of a batch", ("after", "<", 1): "for the last query of a sequence",
        ("i", "<", 1): "for the first query of a sequence", ("other", "==", -1): "of the sequence before",
        ("other", "==", 1): "of the sequence after", ("other", "<", 0): "of earlier sequences", ("other", ">=", 1): "of later sequences",
        ("same_layer", "==", 0): "where the call before was of another layer",
        ("same_phase", "==", 0): "where the call before was of the other phase",
        ("same_phase", "==", 1): "where the call before was of the same phase",
        ("same_layer", "==", 1): "where the call before was of the same layer",
        ("left", "<", 1): "that are the last of their sequence", ("j", "<", 1): "j = 0", ("new", "<", 2): "where one token is new",
    }  # fmt: skip
    if (name, "==" if op == "==" else op, value) in fixed:
        return fixed[name, op, value]
    if op == "==" and (name, "<", 1) in fixed and value == 0:
        return fixed[name, "<", 1]
    texts = {
        ("head", "=="): f"in q head {value}", ("head", ">="): f"in q heads from {value} on", ("head", "<"): f"in q heads below {value}",
        ("kv", "=="): f"in kv head {value}", ("kv", ">="): f"in kv heads from {value} on", ("kv", "<"): f"in kv heads below {value}",
        ("head", "!="): f"in all q heads but {value}", ("kv", "!="): f"in all kv heads but {value}",
        ("layer", "=="): f"in layer {value}", ("layer", ">="): f"in layers from {value} on", ("layer", "<"): f"in layers below {value}",
        ("layer", "!="): f"in all layers but {value}", ("head_dim", "=="): f"with head_dim {value}",
        ("prefix", ">="): f"behind {value} or more cached tokens", ("prefix", "<"): f"behind fewer than {value} cached tokens",
        ("prefix", "=="): f"behind {value} cached tokens",
        ("new", ">="): f"where {value} or more tokens are new", ("new", "<"): f"where fewer than {value} tokens are new",
        ("new", "=="): f"where {value} tokens are new", ("total", ">="): f"in sequences of {value} tokens or more",
        ("total", "<"): f"in sequences of fewer than {value} tokens", ("total", "=="): f"in sequences of {value} tokens",
        ("pos", ">="): f"from position {value} on", ("pos", "<"): f"before position {value}", ("pos", "=="): f"at position {value}",
        ("i", ">="): f"from the {_nth(value + 1)} new token on", ("i", "<"): f"in the first {value} new tokens",
        ("i", "=="): f"for the {_nth(value + 1)} new token", ("seqs", ">="): f"in batches of {value} or more",
        ("seqs", "<"): f"in batches of fewer than {value}", ("seqs", "=="): f"in batches of {value}",
        ("seq", "=="): f"in the {_nth(value + 1)} sequence of a batch", ("seq", ">="): f"from the {_nth(value + 1)} sequence of a batch on",
        ("call", ">="): f"from the {_nth(value + 1)} call on", ("call", "<"): f"in the first {value} calls",
        ("nth", ">="): f"from the {_nth(value + 1)} call of a layer and phase on",
        ("nth", "<"): f"in the first {value} calls of a layer and phase",
        ("j", ">="): f"j >= {value}", ("j", "<"): f"j < {value}", ("j", "=="): f"j = {value}",
        ("left", "<"): f"that are among the last {value} of their sequence", ("left", ">="): f"with {value} or more keys after them",
    }  # fmt: skip
    return texts.get(key, "")


def _nth(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _residue(term: Term, op: str, value: int) -> str:
    where = "" if {term.name, term.minus} & set(_OF_KEY) else "where "
    if term.block > 1 and not term.minus:
        what = {"j": "keys", "i": "new tokens", "pos": "positions"}.get(term.name, _SYMBOLS[term.name])
        lead = "in" if where or term.name == "j" else ""
        blocks = f"every {_nth(term.modulo)} block of {term.block} {what} (from block {value} on)"
        return f"{lead} {blocks}" if op == "==" else f"{lead} all blocks of {term.block} {what} but {blocks}"
    if value == 0 and op in ("==", "!="):
        return f"{where}{_number(Term(term.name, term.minus, term.block))} is {'not ' * (op == '!=')}a multiple of {term.modulo}"
    symbol = {"==": "is", "!=": "is not"}.get(op, op)
    return f"{where}{_number(term)} {symbol} {value}"


def _difference(term: Term, op: str, value: int) -> str:
    a, b = _SYMBOLS[term.name], _SYMBOLS[term.minus]
    if term.block > 1:
        a, b = f"{a} // {term.block}", f"{b} // {term.block}"
    if term.minus == "j":  # the key first: p - j >= w says that j <= p - w
        a, b, value = b, a, -value
        op = {">=": "<=", "<": ">", "==": "=", "!=": "!="}[op]
    if op == "<":
        op, value = "<=", value - 1
    if op == ">":
        op, value = ">=", value + 1
    if op == ">=" and value == 1:
        op, value = ">", 0
    if op == "<=" and value == -1:
        op, value = "<", 0
    sign = f" {'+' if value > 0 else '-'} {abs(value)}" if value else ""
    where = "" if {term.name, term.minus} & set(_OF_KEY) else "where "
    return f"{where}{a} {'=' if op == '==' else op} {b}{sign}"


def _block(term: Term, op: str, value: int) -> str:
    what = {"j": "keys", "i": "new tokens", "pos": "positions"}.get(term.name, _SYMBOLS[term.name])
    relation = {"==": "in block", "!=": "in all blocks but", ">=": "from block", "<": "before block"}[op]
    return f"{relation} {value} of {term.block} {what}" + " on" * (op == ">=")
