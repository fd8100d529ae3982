"""Operators in words: the exact sentence of each effect and of each comparison."""

from __future__ import annotations

import pickle
import re

import pytest

from assay.harness.readout.addresses import POOLS, moved
from assay.harness.readout.edges import Amount, Sum, edge
from assay.harness.readout.effects import (
    _TAILS,
    MERGES,
    PARTS,
    _block_scales,
    _online_softmax,
    constant,
    known_effects,
    merged,
    multiplied,
)
from assay.harness.readout.elsewhere import SOURCES, from_elsewhere
from assay.harness.readout.features import PAIR_TERMS, ROW_TERMS
from assay.harness.readout.forms import BLANK
from assay.harness.readout.formulas import DESCALES, SCALES, TIMES, constant_formula
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.mining import Condition, Literal, Term
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.readout.sentences import sentence
from assay.harness.readout.words import keys, legend, of_keys, only


def lit(name: str, op: str, value: int, minus: str = "", block: int = 1, modulo: int = 0) -> Literal:
    return Literal(Term(name, minus, block, modulo), op, value)  # type: ignore[arg-type]


def when(*literals: Literal) -> Condition:
    return Condition(literals)


def seen(*literals: Literal, factor: float = 0.0) -> KeyFactors:
    return KeyFactors((KeyFactor("seen", when(*literals), factor),))


def also(universe: str, *literals: Literal, factor: float = 1.0) -> KeyFactors:
    return KeyFactors((KeyFactor(universe, when(*literals), factor),))


def source(words: str, what: str = "output") -> Effect:
    return from_elsewhere(next(one for one in SOURCES if one.words == words), what)


def block_scale(*args: object) -> Effect:
    return next(one for one in _block_scales() if one.args == args)


def said(effect: Effect, *literals: Literal) -> str:
    return sentence(Operator((Clause(effect, when(*literals)),)))


DECODE, CAUSAL, PREFIX = lit("decode", "==", 1), lit("causal", "==", 1), lit("prefix", ">=", 1)
CACHED, OWN = lit("j", "<", 0, "prefix"), lit("pos", "==", 0, "j")


@pytest.mark.parametrize(("effect", "words"), [
    # masks with a name
    (seen(lit("j", ">=", 1, "i")), "causal mask aligned top-left: query i sees keys j <= i"),
    (seen(lit("ahead", ">=", 1)), "causal mask aligned top-left: query i sees keys j <= i"),
    (seen(lit("pos", ">=", 16, "j")), "sliding window of 16 keys: query i sees keys j > p - 16"),
    (seen(lit("pos", ">=", 1, "j")), "sliding window of one key: query i sees only its own key"),
    (seen(OWN), "causal mask 1 key too narrow: query i does not see its own key"),
    (seen(lit("pos", "<", 1, "j")), "causal mask 1 key too narrow: query i does not see its own key"),
    (seen(lit("pos", "<", 4, "j")), "causal mask 4 keys too narrow: query i sees keys j <= p - 4"),
    (also("hidden"), "no causal mask: query i also sees keys j > p"),
    (also("hidden", lit("pos", "==", -1, "j")), "causal mask 1 key too wide: query i also sees key p + 1"),
    (also("hidden", lit("pos", ">=", -1, "j")), "causal mask 1 key too wide: query i also sees key p + 1"),
    (also("hidden", lit("pos", ">=", -3, "j")), "causal mask 3 keys too wide: query i sees keys j <= p + 3"),
    # other masks and weights
    (seen(), "query i sees no key"),
    (seen(CACHED), "query i does not see cached keys"),
    (seen(lit("j", "==", 0, modulo=2)), "query i does not see keys with j mod 2 = 0"),
    (seen(OWN, factor=2.0), "query i sees its own key twice"),
    (seen(OWN, factor=0.5), "the weight of its own key is multiplied by 0.5"),
    (seen(lit("j", "==", 0, block=32, modulo=3), factor=0.9), "weights of keys with (j // 32) mod 3 = 0 are multiplied by 0.9"),
    (seen(factor=3.0), "weights of all keys are multiplied by 3"),


    (seen(lit("j", "<", 1), factor=BLANK), "K and V of key 0 are read as zero"),
    (also("hidden", lit("pos", "==", -2, "j")), "query i also sees key p + 2"),
    (also("hidden", lit("pos", "==", -2, "j"), factor=0.5), "query i also sees key p + 2, with 0.5 times the weight"),
    (also("foreign"), "query i also sees all keys of other sequences"),
    (also("foreign", lit("other", "==", -1)), "query i also sees all keys of the previous sequence"),
    (KeyFactors((KeyFactor("seen", when(OWN), 0.0), KeyFactor("seen", when(lit("pos", "==", 1, "j")), 2.0))),
     "query i does not see its own key but sees key p - 1 twice"),
    (KeyFactors((KeyFactor("seen", when(OWN), 2.0), KeyFactor("hidden", when(lit("pos", "==", -1, "j")), 1.0))),
     "query i sees its own key twice and also sees key p + 1"),
    (KeyFactors((KeyFactor("seen", when(OWN), 0.5), KeyFactor("seen", when(lit("j", "<", 1)), 3.0))),
     "the weight of its own key is multiplied by 0.5; the weight of key 0 is multiplied by 3"),
    (KeyFactors((KeyFactor("seen", when(CACHED), 0.0), KeyFactor("foreign", when(CACHED, lit("other", "==", 1)), 1.0))),
     "query i sees cached keys of the next sequence in place of its own"),
    (KeyFactors((KeyFactor("seen", when(OWN, DECODE), 0.0), KeyFactor("seen", when(CACHED, PREFIX), 2.0))),
     "query i does not see its own key (only in decode) but sees cached keys twice (only where a prefix is cached)"),
    (KeyFactors((), phantom=Sum((), 1)), "the softmax denominator counts 1 extra key with a score of 0"),
    (KeyFactors((), phantom=Sum(((1, Amount("total", "gap", 16)),))),
     "the softmax denominator counts (-total mod 16) extra keys with a score of 0"),


    # scores and outputs
    (multiplied(SCALES[0]), "scores are multiplied by 1 / scale: the softmax scale is missing"),
    (multiplied(SCALES[3]), "scores are multiplied by ln 2: exp2 without log2(e) in the scale"),
    (multiplied(constant_formula(2.0)), "scores are multiplied by 2"),
    (multiplied(output=constant_formula(0.9)), "the output is multiplied by 0.9"),
    (multiplied(output=TIMES[0]),
     "the output is multiplied by max |k| / max |v| of its kv head: V is dequantised with the scale of K"),


    (constant(0.0), "the output is not written: it is zero"), (constant(float("nan")), "the output is NaN"),
    (constant(float("inf")), "the output is infinite"),




    (block_scale("v", 32, "packed"),
     "V of key j is dequantised with the scale of block cu_seqlens_k[b] // 32 + j // 32 of all blocks of 32 keys of the batch"),
    (multiplied(*DESCALES[0]),
     "scores are multiplied by max |k| of the next kv head / its own: K is dequantised with that scale; the output by max |v| of "
     "the next kv head / its own: and so is V"),
    (_online_softmax(32, "numerator"),
     "online softmax over tiles of 32 keys: the denominator is not rescaled when the maximum rises"),
    (_online_softmax(64, "late"),
     "online softmax over tiles of 64 keys: the denominator is rescaled after the new tile was added to it"),


    (edge("last", Sum(((1, Amount("total", "up", 32)),), -1), beyond=True),
     "query i sees keys j <= (total rounded up to 32) - 1, which goes on behind its sequence"),
    (edge("last", Sum(((1, Amount("pos")),), -2), within=True), "query i does not see keys j > p - 2"),
    (edge("last", Sum(((1, Amount("pos")),), 3), counted=True), "the softmax denominator of query i counts keys j <= p + 3"),
    (KeyFactors((), phantom=Sum(((1, Amount("total", "up", 64)),), block=64)),
     "the softmax denominator counts (total rounded up to 64) / 64 extra keys with a score of 0"),
    (block_scale("k", 16, "previous"), "K of key j is dequantised with the scale of the previous block of 16 keys"),
    (known_effects()[-1], "the softmax denominator is accumulated in bfloat16"),
    # from elsewhere
    (source("query i - 1"), "query i gets the output of query i - 1"),
    (source("the next q head"), "q head h gets the output of the next q head"),
    (source("query i + 2 of q head 0"), "query i of q head h gets the output of query i + 2 of q head 0"),


    (source("query i - 4", "query"), "query i is scored with the q of query i - 4"),


    (moved("kv", "key j + 1", POOLS[0][1]), "K and V of key j are read from key j + 1"),
    (moved("v", "key j + 1", POOLS[0][1]), "V of key j is read from key j + 1"),










    # dimensions and merges



    (merged(0, "equal"), "cached and new keys are merged with equal weights instead of by their log-sum-exps"),
    (merged(64, "base2"), "splits of 64 keys are merged in base e, but their log-sum-exps are in base 2"),
    (merged(64, "base-e"), "splits of 64 keys are merged in base 2, but their log-sum-exps are in base e"),

    (merged(64, "mean"), "K is smoothed by the mean of each 64 keys, not by that of the sequence"),
    (merged(0, "mean"), "K is smoothed by the mean of the cached or the new keys, not by that of the sequence"),
])  # fmt: skip
def test_an_effect_in_words(effect: Effect, words: str) -> None:
    assert said(effect) == words


@pytest.mark.parametrize(("literals", "universe", "words", "plural"), [
    ((), "seen", "all keys", True),
    ((lit("j", "<", 1),), "seen", "key 0", False),
    ((lit("key_row", "<", 4),), "seen", "keys with its packed row < 4", True),
    ((lit("key_seq", "==", 1),), "seen", "keys with the index of its sequence = 1", True),

    ((lit("j", "==", 5),), "seen", "key 5", False),
    ((lit("j", "<", 5),), "seen", "keys j < 5", True),
    ((lit("j", ">=", 8), lit("j", "<", 16)), "seen", "keys 8 <= j < 16", True),
    ((lit("j", "==", 2, block=16),), "seen", "keys 32 <= j < 48", True),
    ((lit("j", "!=", 2, block=16),), "seen", "keys with j // 16 != 2", True),
    ((lit("j", ">=", 0, "prefix"),), "seen", "new keys", True),
    ((lit("fresh", "<", 0),), "seen", "cached keys", True),
    ((lit("j", "==", 0, "prefix"),), "seen", "the first new key", False),
    ((lit("j", "<", 0, "prefix"), lit("j", "<", 0, "previous_prefix")), "seen",
     "keys j < prefix and j < prefix of the previous sequence", True),
    ((lit("j", ">=", 0, "prefix"), lit("pos", ">=", 2, "j")), "seen", "keys prefix <= j <= p - 2", True),
    ((lit("pos", "<", 4, "j"),), "seen", "keys j >= p - 3", True),
    ((lit("pos", "==", 3, "j"),), "seen", "key p - 3", False),
    ((lit("left", "<", 3),), "seen", "keys j >= total - 3", True),
    ((lit("left", ">=", 3),), "seen", "keys j <= total - 4", True),
    ((lit("left", "<", 0, "new"),), "seen", "keys j >= total - new", True),
    ((lit("ahead", ">=", 0, "first_prefix"),), "seen", "keys j >= i + prefix of the first sequence", True),
    ((lit("j", "==", 1, modulo=2),), "seen", "keys with j mod 2 = 1", True),
    ((lit("j", "!=", 1, modulo=2),), "seen", "keys with j mod 2 != 1", True),
    ((lit("j", "==", 0, modulo=2), lit("pos", ">=", 16, "j")), "seen", "keys j <= p - 16 with j mod 2 = 0", True),
    ((lit("j", "==", 0, modulo=4),), "seen", "keys with j mod 4 = 0", True),
    ((lit("j", "!=", 0, modulo=4),), "seen", "keys with j mod 4 != 0", True),
    ((lit("j", "==", 3, modulo=4),), "seen", "keys with j mod 4 = 3", True),
    ((lit("j", "!=", 3, modulo=4),), "seen", "keys with j mod 4 != 3", True),
    ((lit("j", "==", 1, block=32, modulo=2),), "seen", "keys with (j // 32) mod 2 = 1", True),
    ((lit("pos", "==", 0, "j", modulo=4),), "seen", "keys with (p - j) mod 4 = 0", True),
    ((lit("pos", "==", 1, "j", modulo=2),), "seen", "keys with (p - j) mod 2 = 1", True),
    ((lit("j", "==", 1, "prefix", modulo=4),), "seen", "keys with (j - prefix) mod 4 = 1", True),
    ((lit("left", "==", 1, modulo=4),), "seen", "keys with (total - 1 - j) mod 4 = 1", True),
    ((lit("pos", "==", 0, "j", block=16),), "seen", "keys with j // 16 = p // 16", True),
    ((lit("pos", ">=", 1, "j", block=16),), "seen", "keys with j // 16 < p // 16", True),
    ((lit("pos", ">=", 2, "j", block=16),), "seen", "keys with j // 16 <= p // 16 - 2", True),
    ((lit("i", "<", 0, "j", block=32),), "seen", "keys with j // 32 > i // 32", True),
    ((lit("pos", "!=", 1, "j"),), "seen", "keys with j != p - 1", True),
    ((lit("j", ">=", 0, "total", block=16),), "seen", "keys with j // 16 >= total // 16", True),
    ((lit("j", "==", 0, "prefix", block=16),), "seen", "keys with j // 16 = prefix // 16", True),
    ((lit("fresh", "==", 0, "i", block=32),), "hidden", "keys j > p with (j - prefix) // 32 = i // 32", True),
    ((), "hidden", "keys j > p", True),
    ((lit("pos", ">=", -3, "j"),), "hidden", "keys p < j <= p + 3", True),
    ((lit("j", "<", 1), lit("other", "==", 1)), "foreign", "key 0 of the next sequence", False),
    ((lit("other", "<", 0),), "foreign", "all keys of earlier sequences", True),
    ((lit("other", ">=", 1),), "foreign", "all keys of later sequences", True),
    ((lit("other", "==", -2),), "foreign", "keys with the offset of its sequence = -2 of other sequences", True),
    ((lit("j", "!=", 5),), "seen", "keys with j != 5", True),
])  # fmt: skip
def test_keys_in_words(literals: tuple[Literal, ...], universe: str, words: str, plural: bool) -> None:
    found = keys(literals, universe)
    assert found == (words, plural)


@pytest.mark.parametrize(("literals", "words"), [
    ((), ""),
    ((DECODE,), "only in decode"), ((lit("decode", "!=", 1),), "only in extend"), ((lit("decode", "==", 0),), "only in extend"),
    ((CAUSAL,), "only behind a causal mask"), ((lit("causal", "==", 0),), "only without a causal mask"),
    ((PREFIX,), "only where a prefix is cached"), ((lit("prefix", "<", 1),), "only where no prefix is cached"),
    ((lit("prefix", "==", 1),), "only where prefix = 1"),
    ((lit("prefix", ">=", 16),), "only where prefix >= 16"),
    ((lit("prefix", "<", 16),), "only where prefix < 16"),
    ((lit("new", ">=", 41),), "only where new >= 41"), ((lit("new", "<", 2),), "only where new = 1"),
    ((lit("total", "==", 7),), "only where total = 7"),
    ((lit("total", "<", 9),), "only where total < 9"),
    ((lit("total", ">=", 8), lit("total", "<", 64)), "only where 8 <= total < 64"),
    ((lit("pos", ">=", 8), lit("pos", "<", 64)), "only where 8 <= p < 64"),
    ((lit("pos", "==", 8),), "only where p = 8"), ((lit("pos", ">=", 8),), "only where p >= 8"),
    ((lit("i", "<", 1),), "only where i = 0"),
    ((lit("i", ">=", 1),), "only where i >= 1"),
    ((lit("i", "==", 3),), "only where i = 3"), ((lit("i", "<", 3),), "only where i < 3"),
    ((lit("after", "<", 1),), "only where (new - 1 - i) = 0"),
    ((lit("after", ">=", 1),), "only where (new - 1 - i) >= 1"),
    ((lit("after", "<", 3),), "only where (new - 1 - i) < 3"),
    ((lit("after", ">=", 3),), "only where (new - 1 - i) >= 3"),
    ((lit("seqs", "==", 1),), "only in calls of one sequence"), ((lit("seqs", "<", 2),), "only in calls of one sequence"),
    ((lit("seqs", ">=", 2),), "only in batches"),
    ((lit("seqs", "==", 3),), "only where the number of sequences = 3"),
    ((lit("seq", "<", 1),), "only in the first sequence of a batch"),
    ((lit("seq", "==", 1),), "only where b = 1"),
    ((lit("seq", ">=", 2),), "only where b >= 2"),
    ((lit("from_last", "<", 1),), "only in the last sequence of a batch"),
    ((lit("from_last", ">=", 1),), "only where the number of later sequences >= 1"),
    ((lit("layer", "==", 2),), "only in layer 2"), ((lit("layer", ">=", 2),), "only where the layer >= 2"),
    ((lit("layer", "!=", 2),), "only where the layer != 2"), ((lit("layer", "<", 1),), "only in layer 0"),
    ((lit("head", "==", 1),), "only in q head 1"), ((lit("head", "!=", 1),), "only where h != 1"),
    ((lit("head", ">=", 1), lit("head", "<", 3)), "only where 1 <= h < 3"), ((lit("kv", "==", 1),), "only in kv head 1"),
    ((lit("head", "==", 1, modulo=2),), "only where h mod 2 = 1"),
    ((lit("layer", "==", 1, modulo=3),), "only where the layer mod 3 = 1"),
    ((lit("head", "!=", 0, modulo=3),), "only where h mod 3 != 0"),
    ((lit("call", "==", 1, modulo=2),), "only where the number of earlier calls mod 2 = 1"),
    ((lit("member", "==", 0),), "only where h mod G = 0"),
    ((lit("head_dim", "==", 128),), "only where head_dim = 128"),
    ((lit("group", "<", 2),), "only where G < 2"), ((lit("kv_heads", ">=", 3),), "only where the number of kv heads >= 3"),
    ((lit("heads", "==", 4),), "only where the number of q heads = 4"), ((lit("row", ">=", 8),), "only where r >= 8"),
    ((lit("previous_total", ">=", 9),), "only where total of the previous sequence >= 9"),
    ((lit("first_prefix", "<", 9),), "only where prefix of the first sequence < 9"),
    ((lit("most_total", ">=", 9),), "only where the largest total of the batch >= 9"),
    ((lit("most_new", ">=", 9),), "only where the largest new of the batch >= 9"),








    ((lit("call", ">=", 2),), "only where the number of earlier calls >= 2"), ((lit("call", "<", 1),), "only in the first call"),
    ((lit("nth", ">=", 3),), "only where the number of earlier calls of the layer and phase >= 3"),
    ((lit("total", "==", 0, modulo=8),), "only where total mod 8 = 0"),
    ((lit("total", "!=", 0, modulo=8),), "only where total mod 8 != 0"),
    ((lit("total", "==", 1, modulo=2),), "only where total mod 2 = 1"),
    ((lit("total", "==", 1, modulo=3),), "only where total mod 3 = 1"),
    ((lit("new", "==", 0, modulo=2),), "only where new mod 2 = 0"),
    ((lit("pos", "==", 0, modulo=16),), "only where p mod 16 = 0"),
    ((lit("pos", "==", 3, modulo=4),), "only where p mod 4 = 3"),
    ((lit("pos", "==", 1, modulo=2),), "only where p mod 2 = 1"),
    ((lit("i", "!=", 0, modulo=4),), "only where i mod 4 != 0"),
    ((lit("i", "==", 1, block=16),), "only where i // 16 = 1"),
    ((lit("pos", "!=", 1, block=16),), "only where p // 16 != 1"),
    ((lit("i", "==", 0, block=16, modulo=3),), "only where (i // 16) mod 3 = 0"),
    ((lit("pos", "==", 1, block=16, modulo=2),), "only where (p // 16) mod 2 = 1"),
    ((lit("pos", "==", 0, "total", block=16),), "only where p // 16 = total // 16"),
    ((lit("i", "<", 0, "new", block=16),), "only where i // 16 < new // 16"),
    ((lit("prefix", ">=", 1, "new"),), "only where prefix > new"),
    ((lit("prefix", "<", -1, "new"),), "only where prefix <= new - 2"),
    ((lit("total", "==", 0, "most_total"),), "only where total = the largest total of the batch"),
    ((lit("total", "<", 0, "most_total"),), "only where total < the largest total of the batch"),

    ((DECODE, PREFIX), "only in decode and where a prefix is cached"),
    ((PREFIX, DECODE, lit("new", ">=", 4)), "only in decode and where a prefix is cached and new >= 4"),
    ((DECODE, lit("i", ">=", 1)), "only in decode and where i >= 1"),
])  # fmt: skip
def test_places_in_words(literals: tuple[Literal, ...], words: str) -> None:
    assert only([when(*literals)]) == words


@pytest.mark.parametrize(("literals", "words"), [
    ((lit("head", "==", 1), PREFIX), "except in q head 1 and where a prefix is cached"),
    ((PREFIX, lit("new", ">=", 4)), "except where a prefix is cached and new >= 4"),
    ((lit("i", ">=", 1), DECODE), "except in decode and where i >= 1"),
])  # fmt: skip
def test_a_negation_in_words(literals: tuple[Literal, ...], words: str) -> None:
    assert only([Condition(literals, negated=True)]) == words


def test_a_negation_on_keys_names_all_others() -> None:
    part = KeyFactor("seen", Condition((OWN,), negated=True), 0.0)
    assert said(KeyFactors((part,))) == "query i sees only its own key"


def test_a_named_mask_says_by_itself_that_it_is_causal() -> None:
    top_left = seen(lit("j", ">=", 1, "i"))
    assert said(top_left, CAUSAL, PREFIX) == f"{said(top_left)}, only where a prefix is cached"
    assert said(seen(CACHED), CAUSAL) == "query i does not see cached keys, only behind a causal mask"


def test_clauses_follow_each_other() -> None:
    first, second = Clause(source("query i - 1"), when(lit("i", ">=", 1))), Clause(constant(0.0))
    assert sentence(Operator((first, second))) == (
        "query i gets the output of query i - 1, only where i >= 1. Elsewhere, the output is not written: it is zero"
    )
    assert sentence(Operator()) == ""


def test_the_issue_s_examples() -> None:
    assert said(also("hidden", lit("pos", "==", -2, "j")), lit("new", ">=", 41)) == (
        "query i also sees key p + 2, only where new >= 41"
    )
    every_third = seen(lit("j", "==", 0, block=32, modulo=3), factor=0.9)
    assert said(every_third, lit("kv", "==", 1)) == (
        "weights of keys with (j // 32) mod 3 = 0 are multiplied by 0.9, only in kv head 1"
    )


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("query i sees keys j <= i", "query i: the i-th new token of its sequence; key j: the j-th of the sequence; all from 0"),
        ("query i does not see key p + 1, only where a prefix is cached",
         "query i: the i-th new token of its sequence; p: its position, cached prefix included; all from 0"),
        ("K of key j is read from key total - 16 + j, modulo total",
         "key j: the j-th of the sequence; total: its number of all tokens; all from 0"),
        ("query i sees keys j <= i + (prefix rounded up to 16)",
         "query i: the i-th new token of its sequence; key j: the j-th of the sequence; prefix: its number of cached tokens; "
         "all from 0"),
        ("the output is not written: it is zero, only in decode", ""),
    ],
)  # fmt: skip
def test_the_legend_explains_the_symbols_of_a_sentence(text: str, explained: str) -> None:
    assert legend(text) == explained


ODD_WORDS = re.compile(
    r"  | ,|\{|\}|None|(?<!-)(?<!than )\b1 (tokens|sequences|heads|keys|queries|calls)\b|only only|keys keys|,,|\bnot not\b"
)


@pytest.mark.parametrize("value", [-3, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("op", ["==", "!=", ">=", "<"])
def test_every_term_that_is_mined_has_words(op: str, value: int) -> None:
    for term in dict.fromkeys((*ROW_TERMS, *PAIR_TERMS)):
        if term.words and (op in (">=", "<") or value not in (0, 1)):
            continue  # values of names are not compared, and flags are 0 or 1
        literal = Literal(term, op, value % term.modulo if term.modulo else value)  # type: ignore[arg-type]
        text = keys([literal])[0] if of_keys(literal) else only([when(literal)])
        assert text
        assert not ODD_WORDS.search(text), text


def test_every_effect_of_the_tables_has_words() -> None:
    effects: list[Effect] = [*_TAILS, *known_effects(), *_block_scales(), *(multiplied(one) for one in SCALES)]
    effects += [*(from_elsewhere(one) for one in SOURCES), *(multiplied(output=one) for one in TIMES)]
    effects += [moved("kv", words, row) for words, row in POOLS] + [
        merged(block, law) for block in PARTS for law in MERGES
    ]
    texts = [said(one) for one in effects]
    assert all(text and not ODD_WORDS.search(text) for text in texts)
    assert len(set(texts)) == len(texts), "two effects have the same words"
    assert [said(pickle.loads(pickle.dumps(one))) for one in effects] == texts, (
        "an effect is read in a process of its own"
    )
