"""Describes operators in one sentence, as a bug report would. `legend` explains the symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.harness.readout.conditions import Condition, Term
from assay.harness.readout.forms import BLANK
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.operators import Effect, Operator, Told
from assay.harness.readout.words import ALL_BUT, Keys, keys, of_keys, only, plus

# The description of an effect, and the conditions on queries that all of its parts share.
_Said = tuple[str, list[Condition]]


def sentence(operator: Operator) -> str:
    """Describe the operator without a full stop, or return an empty string for attention."""
    return ", ".join(filter(None, _text_and_place(operator)))


def where(operator: Operator) -> str:
    """Return the end of the sentence, "only in decode", or an empty string if the operator always shows."""
    return _text_and_place(operator)[1]


def _text_and_place(operator: Operator) -> tuple[str, str]:
    """Return descriptions of an operator's effect, and of where it shows."""
    effect = operator.effect
    if effect is None:
        return "", ""
    if mask := _mask(effect):
        return mask, only([_without_causal(operator.condition)])
    if isinstance(effect, Told):
        return effect.words, only([operator.condition])
    assert isinstance(effect, KeyFactors)
    text, inner = _key_factors(effect)
    return text, only([operator.condition, *inner])


def _split(condition: Condition, universe: str = "seen") -> tuple[Keys | None, list[Condition]]:
    """Return the keys of a condition (None if it does not refer to keys), and the conditions on queries alone."""
    own = [literal for literal in condition.literals if of_keys(literal)]
    rest = tuple(literal for literal in condition.literals if not of_keys(literal))
    if condition.negated and own:
        inner, _ = keys(own, "foreign" if universe == "foreign" else "seen")
        when = only([Condition(rest)]).removeprefix("only ")
        return (f"{ALL_BUT}{inner}{f' ({when})' if when else ''}", True), []
    conditions = [Condition(rest, condition.negated)] if rest else []
    return (keys(own, universe) if own or universe != "seen" else None), conditions


# Masks and weights


def _key_factors(effect: KeyFactors) -> _Said:
    if instead := _in_place(effect):
        return instead
    split = [_split(part.condition, part.universe) for part in effect.parts]
    rows = [inner for _, inner in split]
    common = rows[0] if rows and all(row == rows[0] for row in rows) else []
    texts: list[str] = []
    for part, (which, inner) in zip(effect.parts, split, strict=True):
        there = "" if common else only(inner)
        texts.append(_part(part, which) + (f" ({there})" if there else ""))
    text = _chained(texts)
    if effect.phantom is not None:
        count = effect.phantom.words
        extra = f"the softmax denominator counts {count} extra {'key' if count == '1' else 'keys'} with a score of 0"
        text = "; ".join(filter(None, (text, extra)))
    return text, common


def _in_place(effect: KeyFactors) -> _Said | None:
    """Describe keys of another sequence that replace the same keys of the own sequence."""
    if len(effect.parts) != 2 or effect.phantom is not None:
        return None
    here, there = sorted(effect.parts, key=lambda part: part.universe != "seen")
    if (here.universe, there.universe, here.factor, there.factor) != ("seen", "foreign", 0, 1):
        return None
    literals = set(there.condition.literals) - set(here.condition.literals)
    if here.condition.negated or there.condition.negated or {literal.term.name for literal in literals} != {"other"}:
        return None
    which, inner = _split(there.condition, "foreign")
    return (f"query i sees {which[0]} instead of its own", inner) if which else None


def _chained(texts: Sequence[str]) -> str:
    """Join texts to one sentence without repeating a common subject."""
    chain = ""
    for text in texts:
        if chain and text.startswith("query i ") and chain.startswith("query i "):
            link = " but " if chain.startswith("query i does not") and "does not" not in text else " and "
            chain += link + text.removeprefix("query i ")
        else:
            chain += f"; {text}" if chain else text
    return chain


def _part(part: KeyFactor, which: Keys | None) -> str:
    """Describe one part."""
    some, plural = which or ("all keys", True)
    if part.universe != "seen":
        times = "" if part.factor == 1 else f", with {_number(part.factor)} times the weight"
        return f"query i also sees {some}{times}"
    if part.factor == 0 and some.startswith(ALL_BUT):
        return f"query i sees only {some.removeprefix(ALL_BUT)}"
    if part.factor == 0:
        return f"query i does not see {some}" if which else "query i sees no key"
    if part.factor == BLANK:
        return f"K and V of {some} are read as zero"
    if part.factor == 2:
        return f"query i sees {some} twice"
    what = f"weights of {some} are" if plural else f"the weight of {some} is"
    return f"{what} multiplied by {_number(part.factor)}"


def _mask(effect: Effect) -> str:
    """Describe a mask with a name, which implies that it is causal, or return an empty string if it has none."""
    if not isinstance(effect, KeyFactors) or len(effect.parts) != 1 or effect.phantom:
        return ""
    part = effect.parts[0]
    literals = _without_causal(part.condition).literals
    if part.condition.negated or len(literals) > 1:
        return ""
    term, op, value = (literals[0].term, literals[0].op, literals[0].value) if literals else (Term(""), "==", 0)
    plain = term.block == 1 and not term.modulo
    if (part.universe, part.factor) == ("hidden", 1):
        if not literals:
            return "no causal mask: query i also sees keys j > p"
        return _shifted_mask(term, op, value) if plain and op in (">=", "==") and value < 0 else ""
    if (part.universe, part.factor) != ("seen", 0) or not plain:
        return ""
    if (term.name, term.minus, op, value) in (("j", "i", ">=", 1), ("ahead", "", ">=", 1)):
        return "causal mask aligned top-left: query i sees keys j <= i"
    if (term.name, term.minus, op, value) == ("pos", "j", ">=", value) and value > 0:
        if value == 1:
            return "sliding window of one key: query i sees only its own key"
        return f"sliding window of {value} keys: query i sees keys j > p - {value}"
    if (op, value) == ("==", 0) or (op == "<" and value > 0):
        return _shifted_mask(term, op, max(value, 1))
    return ""


def _shifted_mask(term: Term, op: str, by: int) -> str:
    """Describe a causal mask that is too narrow by this many keys, or too wide if negative; "" if the term is not a distance."""
    if (term.name, term.minus) != ("pos", "j") or (op == "==" and by not in (1, -1)):
        return ""
    size = f"{abs(by)} key{'s' * (abs(by) > 1)} too {'narrow' if by > 0 else 'wide'}"
    if by == 1:
        return f"causal mask {size}: query i does not see its own key"
    if by == -1:
        return f"causal mask {size}: query i also sees key p + 1"
    return f"causal mask {size}: query i sees keys j <= {plus('p', -by)}"


def _without_causal(condition: Condition) -> Condition:
    """Remove the literal that the mask is causal from a conjunction, at any cost of that literal."""
    if condition.negated:
        return condition
    rest = tuple(
        literal for literal in condition.literals
        if (literal.term.name, literal.term.minus, literal.op, literal.value) != ("causal", "", "==", 1)
    )  # fmt: skip
    return Condition(rest)


def _number(value: float) -> str:
    """Format a number, as a known constant if it is one."""
    for constant, words in ((math.log(2), "ln 2"), (1 / math.log(2), "log2(e)")):
        if math.isclose(value, constant, rel_tol=1e-6):
            return words
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.6g}"
