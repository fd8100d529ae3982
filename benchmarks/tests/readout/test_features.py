"""Features, against loops over queries, heads and keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from assay.harness.attention.call import Mask
from assay.harness.attention.oracle import sequences
from assay.harness.attention.sample_calls import call_of
from assay.harness.readout.features import PAIR_TERMS, ROW_TERMS, Pairs, chosen, joined, row_table
from assay.harness.readout.mining import Term

LENS = [(3, 4), (1, 0), (2, 6)]
HEADS, KV_HEADS = 4, 2
ROWS = [0, 2, 3, 5]
CALL = call_of(LENS, (HEADS, KV_HEADS), 8, torch.float32, "cpu")


def test_a_tile_that_packs_heads_has_fewer_tokens() -> None:
    call = call_of([(80, 5)], (4, 2), 8, torch.float32, "cpu")
    found = row_table(call, [0, 31, 32, 70])
    assert found["first_packed_64"][::4].tolist() == [5, 5, 37, 69]
    assert found["last_packed_64"][::4].tolist() == [36, 36, 68, 84]
    assert found["first_64"][::4].tolist() == [5, 5, 5, 69]
    assert found["last_64"][::4].tolist() == [68, 68, 68, 84]


def test_the_features_of_a_query_and_a_key() -> None:
    queries = row_table(CALL, ROWS)
    pairs = Pairs(CALL, queries)
    place = 0
    for query in range(len(ROWS) * HEADS):
        seq, i, prefix = (int(queries[name][query]) for name in ("seq", "i", "prefix"))
        for other, (new, cached) in enumerate(LENS):
            for j in range(new + cached):
                expected = {
                    "j": j, "left": new + cached - 1 - j, "other": other - seq, "fresh": j - prefix, "ahead": j - i,
                    "key_seq": other, "key_row": sum(a + b for a, b in LENS[:other]) + j,
                    "head": int(queries["head"][query]), "row": int(queries["row"][query]),
                }  # fmt: skip
                assert {name: int(pairs[name][place]) for name in expected} == expected
                place += 1
    assert all(len(pairs[name]) == place for name in pairs)
    assert len(pairs) == len(list(pairs))


def test_pairs_are_made_when_they_are_asked_for_and_once() -> None:
    some = {name: row_table(CALL, ROWS)[name] for name in ("row", "prefix")}
    pairs = Pairs(CALL, some)
    assert pairs["fresh"] is pairs["fresh"]
    with pytest.raises(KeyError, match="i"):
        pairs["ahead"]  # needs a feature that is not there


def test_the_phase_and_the_mask_are_features() -> None:
    decode = call_of([(1, 5)], (2, 1), 8, torch.float32, "cpu")
    other = decode.with_spec(phase="decode", mask=Mask(causal=False), layer=3)
    found = row_table(other, [0])
    assert (found["decode"].tolist(), found["causal"].tolist(), found["layer"].tolist()) == ([1, 1], [0, 0], [3, 3])


def test_the_own_keys_of_each_sequence() -> None:
    assert sequences(CALL) == [
        (slice(0, 3), slice(0, 7)),
        (slice(3, 4), slice(7, 8)),
        (slice(4, 6), slice(8, 16)),
    ]


def test_tables_are_joined_and_examples_chosen() -> None:
    both = joined([row_table(CALL, [0]), row_table(CALL, [5])])
    assert both["row"].tolist() == [0] * HEADS + [5] * HEADS
    assert chosen(both, np.array([0, 7]))["row"].tolist() == [0, 5]
    assert chosen(both, both["row"] == 5)["head"].tolist() == [0, 1, 2, 3]
    pairs = Pairs(CALL, row_table(CALL, [0]))
    assert chosen({"j": pairs["j"]}, np.array([6, 7]))["j"].tolist() == [6, 0]


def test_the_features_of_a_query() -> None:
    found = row_table(CALL, ROWS, number=9, nth=4)
    expected: list[dict[str, int]] = []
    sequences = [(seq, i) for seq, (new, _) in enumerate(LENS) for i in range(new)]
    totals = [new + prefix for new, prefix in LENS]
    for row in ROWS:
        seq, i = sequences[row]
        new, prefix = LENS[seq]
        for head in range(HEADS):
            expected.append({
                "head": head, "kv": head // 2, "member": head % 2, "heads": 4, "kv_heads": 2, "group": 2, "head_dim": 8,
                "layer": 0, "decode": 0, "causal": 1, "call": 9, "nth": 4, "seq": seq, "from_last": 2 - seq, "seqs": 3,
                "i": i, "pos": i + prefix, "after": new - 1 - i, "prefix": prefix, "new": new, "total": new + prefix,
                "row": row, "previous_total": totals[seq - 1] if seq else 0,
                "previous_prefix": LENS[seq - 1][1] if seq else 0, "next_total": totals[seq + 1] if seq < 2 else 0,
                "next_prefix": LENS[seq + 1][1] if seq < 2 else 0,
                "first_total": 7, "first_prefix": 4, "first_new": 3, "most_total": 8, "most_new": 3,
                "most_prefix": max(p for _, p in LENS),
                "least_prefix": min(p for _, p in LENS), "peers_after": 1 - head % 2,
                "ranked_total": totals[sorted(range(3), key=lambda one: -totals[one]).index(seq)],
                **{f"first_{size}": prefix for size in (16, 32, 64, 128)},
                **{f"last_{size}": prefix + new - 1 for size in (16, 32, 64, 128)},
                **{f"first_packed_{rows}": prefix for rows in (64, 128)},
                **{f"last_packed_{rows}": prefix + new - 1 for rows in (64, 128)},
            })  # fmt: skip
    assert found.keys() == expected[0].keys()
    for name, column in found.items():
        assert column.dtype == np.int64, name
        assert column.tolist() == [one[name] for one in expected], name


@pytest.mark.parametrize(("terms", "of_key"), [(ROW_TERMS, ()), (PAIR_TERMS, Pairs.OF_KEY)], ids=["row", "pair"])
def test_terms_speak_of_features_that_exist(terms: tuple[Term, ...], of_key: tuple[str, ...]) -> None:
    known = {*row_table(CALL, [0]), *of_key}
    assert {name for term in terms for name in (term.name, term.minus) if name} <= known
    assert len(set(terms)) == len(terms)
