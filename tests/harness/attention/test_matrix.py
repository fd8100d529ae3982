from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.matrix import _HEADS, DTYPES, HEAD_DIMS, Case, Size, _core_axes, cases, model_cases
from assay.harness.attention.matrix_features import ASKED, STRONGEST
from assay.harness.attention.oracle import log_sum_exp, oracle, sequences
from assay.harness.attention.shapes import Shape

SIZES = ["small", pytest.param("full", marks=pytest.mark.slow)]


def _axes(phase: str, size: Size) -> dict[str, Sequence[Any]]:
    return _core_axes(phase, size) | {"heads": _HEADS[size], "dtype": tuple(DTYPES.values()), "head_dim": HEAD_DIMS}


def words(axis: str, value: object) -> str:
    """A value of the design, as it appears in a case's condition."""
    if isinstance(value, range):
        return f"{value[0]} to {value[-1]}"
    if axis == "heads":
        assert isinstance(value, tuple)
        return f"{value[0]}/{value[1]}"
    return str(value).removeprefix("torch.")


def uncovered(made: list[Case], phase: str, size: Size, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Combinations of values of the axes of each group that occur in no case. "cached" is whether there is a prefix."""
    design = {axis: [words(axis, v) for v in values] for axis, values in _axes(phase, size).items()}
    design["cached"] = ["True"] if phase == "decode" else ["False", "True"]
    seen = [{a: v.split()[-1] if a == "heads" else v for a, v in c.condition.items()} for c in made]
    seen = [one | {"cached": str(one["prefix"] != "0")} for one in seen if one["phase"] == phase]
    return [
        wanted
        for group in groups
        for wanted in sorted(set(product(*(design[axis] for axis in group))) - {tuple(x[a] for a in group) for x in seen})
    ]


def _core(call: AttentionCall) -> tuple[str, ...]:
    return str(call.q.dtype).removeprefix("torch."), str(call.q.shape[2]), f"{call.q.shape[1]}/{call.k.shape[1]}"


def _is_a_crowd_with_a_long_one(call: AttentionCall) -> bool:
    return len(call.lens_k) > 16 and max(call.lens_k) > (1024 if call.phase == "extend" else 2048)


def _is_more_than_a_block_behind_a_prefix(call: AttentionCall) -> bool:
    return any(new > 128 and prefix for new, prefix in _lens(call))


ALL = ["prefix", "new", "batch", "heads", "head_dim", "dtype", "data"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_pairs_triples_and_what_users_run_are_covered(phase: str, size: Size) -> None:
    made = cases((phase,), size=size)
    groups: list[tuple[str, ...]] = [("dtype", "head_dim", "heads", "cached")]
    core = set(product(*([words(a, v) for v in _axes(phase, size)[a]] for a in ("dtype", "head_dim", "heads"))))
    for holds in (_is_a_crowd_with_a_long_one, _is_more_than_a_block_behind_a_prefix)[: 2 if phase == "extend" else 1]:
        assert core == {_core(call) for call in _made(phase, size) if holds(call)} & core
    for some in (["batch", "heads"], ["batch", "new"], ["heads", "new"], ["data"]):
        groups += combinations([*some, "cached", "head_dim", "dtype"], 3)
    groups += combinations(ALL, 2)
    assert uncovered(made, phase, size, groups) == []


@pytest.mark.parametrize("size", SIZES)
def test_ratios_and_head_dims_of_models_are_in_both_sizes(size: Size) -> None:
    for phase in ("extend", "decode"):
        there = [case for case, _ in _both(phase, size)]
        heads = [tuple(map(int, case.condition["heads"].split()[1].split("/"))) for case in there]
        assert {q // kv for q, kv in heads if kv > 1} >= {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}
        assert {case.condition["head_dim"] for case in there} == {"64", "80", "96", "128", "192", "256"}
        assert {case.condition["layer"] for case in there} == {"0", "1", "2", "16", "31"}
        assert {case.condition["autograd"] for case in there} == {"as called", "inference_mode", "no_grad"}
        halves = [call for call in _made(phase, size) if call.q.dtype != torch.float32]
        assert sum(len([n for n in call.lens_k if n > 330]) > 1 for call in halves) >= 2


def test_sliced_inputs_are_parts_of_wider_tensors_and_stay_so() -> None:
    first = next(case for case in cases() if case.condition["inputs"] == "sliced")
    made = first.make()
    for call in (made, made.clone()):
        assert not any(tensor.is_contiguous() for tensor in (call.q, call.k, call.v))
        assert call.q.stride(-1) == 1
        assert bool(call.q.isfinite().all())
    assert first.beyond == ("inputs",)


def test_models_add_their_shapes() -> None:
    def shapes(**given: object) -> set[str]:
        return {case.condition["heads"] for case in cases(**given)}  # type: ignore[arg-type]

    assert shapes(like=["qwen2.5-7b"]) - shapes() == {"GQA 28/4"}
    assert shapes(size="full") >= {"GQA 32/8", "GQA 28/4", "GQA 24/8", "GQA 32/4", "MHA 32/32"}
    with pytest.raises(ValueError, match="no shape of llama-9"):
        cases(like=["llama-9"])


def test_calls_match_their_conditions() -> None:
    for case, call in _every():
        said = case.condition
        assert call.phase == said["phase"]
        assert f"{call.q.shape[1]}/{call.k.shape[1]}" == said["heads"].split()[1]
        assert (str(call.q.shape[2]), str(call.q.dtype)) == (said["head_dim"], f"torch.{said['dtype']}")
        usual = call.q.shape[2] ** -0.5
        scales = {"scale 1.5 times": 1.5 * usual, "scale 1": 1.0, "unscaled scores": 1.0, "scale 1/128": 1 / 128}
        if not said["data"].startswith("unscaled"):
            assert call.scale == scales.get(said["data"], usual)
        assert (str(call.layer), str(call.spec.first_head), call.spec.layout, call.spec.grad_mode or "as called") == (
            said["layer"], said["first head"], said["inputs"], said["autograd"]
        )  # fmt: skip
        lens = list(zip(call.lens_q, call.prefixes, strict=True))
        assert any(all(map(_is_said, pair, (said["new"], said["prefix"]))) for pair in lens)
        cached = [prefix > 0 for _, prefix in lens]
        assert said["cached prefix"] == ("all" if all(cached) else "some" if any(cached) else "none")
        assert all(bool(t.isfinite().all()) for t in (call.q, call.k, call.v))
        if call.phase == "decode":
            assert set(call.lens_q) == ({0, 1} if said["batch"].startswith(("an empty", "no keys")) else {1})
            assert all(cached) or said["batch"].startswith(("a single key", "no keys"))


def _is_said(length: int, said: str) -> bool:
    first, _, last = said.partition(" to ")
    return int(first) <= length <= int(last or first)


def _lens(call: AttentionCall) -> list[tuple[int, int]]:
    return list(zip(call.lens_q, call.prefixes, strict=True))


def _ones(call: AttentionCall) -> list[int]:
    """The keys of the sequences that have one new token."""
    return [new + cached for new, cached in _lens(call) if new == 1]


def _alike(call: AttentionCall) -> bool:
    return len(set(_lens(call))) == 1


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize(
    ("holds", "where"),
    [
        pytest.param(lambda c: any(n % 256 == 0 for n in c.lens_k), "where a partition of 256 keys is full", id="full"),
        pytest.param(lambda c: any(n and n % 256 == 0 for n in c.prefixes), "behind 256 cached tokens", id="prefix 256"),
        pytest.param(lambda c: c.layer == 16, "in the middle layers", id="layer 16"),
        pytest.param(lambda c: c.layer == 2 and max(c.prefixes) > 127, "in every second layer, in a window", id="layer 2"),
        *(pytest.param(lambda c, n=n: len(c.lens_q) == n, f"in a batch of {n}", id=f"batch {n}") for n in (2, 4, 5, 6, 7, 8, 40)),
        *(
            pytest.param(lambda c, n=n: len(c.lens_q) == n and _alike(c), "in a batch of equal ones", id=f"{n} alike")
            for n in (2, 4, 6)
        ),
        *(pytest.param(lambda c, n=n: c.k.shape[1] == n < c.q.shape[1], "in GQA", id=f"{n} kv heads") for n in (3, 4, 5, 6)),
        *(pytest.param(lambda c, n=n: c.k.shape[1] == n == c.q.shape[1], "in MHA", id=f"{n} heads") for n in (3, 10)),
        pytest.param(lambda c: c.scale == 1, "with a scale of 1", id="scale 1"),
        pytest.param(lambda c: c.scale == 1 / 128, "with a small scale", id="scale 1/128"),
        pytest.param(lambda c: float(c.k.abs().max()) > 250, "with large keys", id="K far from 0"),
        pytest.param(lambda c: c.spec.first_head > 0, "on another rank", id="first head"),
        pytest.param(lambda c: c.spec.layout == "heads first", "with K and V by head", id="heads first"),
        pytest.param(lambda c: len(c.lens_k) > 1 and c.k.shape[0] > 3500, "with many keys in a batch", id="many keys"),
        pytest.param(lambda c: sum(n > 1024 for n in c.lens_k) > 1, "with two long sequences", id="two long"),
    ],
)
def test_what_kernels_do_only_in_some_calls_shows(phase: str, holds: Callable[[AttentionCall], bool], where: str) -> None:
    assert any(holds(call) for call in _made(phase)), f"a kernel that is wrong only {where} passes"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("phase", "holds", "where"),
    [
        ("extend", lambda c: any(n > 64 and p and p % 512 == 0 for n, p in _lens(c)), "in a chunk behind 512 tokens"),
        ("extend", lambda c: any(9 <= n < 64 and p > 300 for n, p in _lens(c)), "with some new tokens behind many"),
        ("extend", lambda c: len(set(c.lens_q)) > 2 and not any(c.prefixes), "in a batch of prompts alone"),
        ("extend", lambda c: any(n % 16 > 8 and len(c.lens_q) > 3 for n in c.lens_q), "beyond half of an MMA"),
        ("extend", lambda c: sum(n > 64 for n in c.lens_q) > 1, "with two sequences of two blocks of queries"),
        ("extend", lambda c: len(c.lens_q) > 1 and _alike(c) and min(c.prefixes) > 0, "in a batch of equal ones"),
        ("extend", lambda c: len(c.lens_q) > 1 and set(c.lens_q) == {17} and not _alike(c), "with as many new tokens"),
        ("extend", lambda c: max(c.lens_k[:-1], default=0) < c.lens_k[-1] > 256, "where the last one is long"),
        ("extend", lambda c: {8, 16} <= set(c.lens_q), "with 8 or 16 new tokens"),
        ("decode", lambda c: len(c.lens_k) == 1 and c.lens_k[0] > 256, "alone and long"),
        ("decode", lambda c: sum(n > 256 for n in c.lens_k) > 1 and len(c.lens_k) == 2, "with two long ones"),
        ("decode", lambda c: c.k.shape[0] > 1024 and _has_a_long_one_before_a_shorter(c), "behind a longer one"),
        ("decode", lambda c: max(c.lens_k[:8]) < max(c.lens_k[8:], default=0), "where the longest is beyond eight"),
        ("extend", lambda c: 4 < len(_ones(c)) < len(c.lens_k) and _ones(c) != sorted(_ones(c)), "on decode in a mixed batch"),
        ("decode", lambda c: c.scale != c.q.shape[2] ** -0.5, "with another scale"),
        ("extend", lambda c: c.scale != c.q.shape[2] ** -0.5, "with another scale"),
    ],
)
def test_each_path_of_a_kernel_meets_what_goes_wrong_in_one_of_them(
    phase: str, holds: Callable[[AttentionCall], bool], where: str, size: Size
) -> None:
    """Two looks for wrong kernels that pass found 20 and 14 that were wrong in one dtype, head dim and number of heads."""
    core = set(product(*([words(a, v) for v in _axes(phase, size)[a]] for a in ("dtype", "head_dim", "heads"))))
    missing = core - {_core(call) for call in _made(phase, size) if holds(call)}
    assert not missing, f"a kernel that is wrong only {where} passes in {missing}"


def _has_a_long_one_before_a_shorter(call: AttentionCall) -> bool:
    return any(256 < later < first for first, later in combinations(call.lens_k, 2))


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_each_dtype_meets_each_size_of_a_small_batch_and_each_number_of_heads_each_layer(phase: str) -> None:
    made = _made(phase)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        sizes = {len(call.lens_q) for call in made if call.q.dtype == dtype}
        assert sizes >= set(range(1, 10))
        assert {c.spec.first_head > 0 for c in made if c.q.dtype == dtype} == {False, True}
    for heads in ((4, 4), (4, 2), (8, 2), (16, 2), (4, 1)):
        long = [c for c in made if max(c.lens_k) > 256 and (c.q.shape[1], c.k.shape[1]) == heads]
        assert {c.layer for c in long} == {0, 1, 2, 16, 31}
        assert any(_has_scores_above_88_in_two_partitions(call) for call in long)


BATCHES_OF_GRAPHS = (16, 24, 32, 40)
ODD_TILES = (96, 112, 160, 176, 192, 224, 240, 384, 768)


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_dtype_of_16_bits_meets_each_head_dim_in_all_rare_calls(phase: str, dtype: torch.dtype, head_dim: int) -> None:
    here = [c for c in _made(phase) if c.q.dtype == dtype and c.q.shape[2] == head_dim and c.k.shape[1] != c.q.shape[1]]
    assert any(sum(keys > 330 for keys in call.lens_k) > 1 for call in here)
    assert any(len(call.lens_k) > 8 for call in here)
    assert any(len(call.lens_k) in BATCHES_OF_GRAPHS for call in here)
    assert {call.layer % 2 for call in here if call.layer > 0 and max(call.lens_k) > 128} == {0, 1}
    assert any(call.scale != head_dim**-0.5 for call in here if len(call.lens_k) > len(ODD_TILES))
    assert set(ODD_TILES) <= {keys for call in here for keys in call.lens_k}
    assert any(_has_scores_above_88_in_two_partitions(call) for call in here)
    if phase == "extend":
        assert any(new == 1 and prefix > 512 for call in here for new, prefix in _lens(call))
        assert any(new == 256 for call in here for new in call.lens_q)


def _has_scores_above_88_in_two_partitions(call: AttentionCall) -> bool:
    if len(call.lens_k) > 1 or call.k.shape[0] <= 256:
        return False
    return float((call.scale * call.q[:, 0].float() @ call.k[:, 0].float().T).amax()) > 88


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_single_values_outside_of_the_design_have_a_call_with_more_than_512_keys(phase: str) -> None:
    long = [call for call in _made(phase) if max(call.lens_k) > 512]
    assert {call.q.shape[2] for call in long} >= {64, 80, 96, 128, 192, 256}
    assert {call.spec.layout for call in long} == {"packed", "sliced", "heads first", "each its own"}
    heads = {(call.q.shape[1], call.k.shape[1]) for call in long}
    assert heads == {(call.q.shape[1], call.k.shape[1]) for call in _made(phase)}
    assert {(q // kv, kv) for q, kv in heads} >= {(4, 3), (5, 5), (4, 4)}


def test_lengths_that_schedulers_and_chunks_have_are_there() -> None:
    extend = _made("extend")
    assert {192, 256, 512, 513} <= {new for call in extend for new in call.lens_q}
    assert any(len(call.lens_q) > 32 and max(call.lens_q[:32]) > 64 for call in extend)
    assert {len(call.lens_q) for call in extend} & {len(call.lens_q) for call in _made("decode")} >= set(BATCHES_OF_GRAPHS)
    empty = [call for case, call in _both("extend") if case.condition["batch"] == "some without new tokens"]
    assert {call.q.dtype for call in empty} == {torch.float16, torch.bfloat16, torch.float32}
    assert all(max(n for n, new in zip(call.prefixes, call.lens_q, strict=True) if not new) > 64 for call in empty)
    assert all(any(a == b == 0 < i for i, (a, b) in enumerate(pairwise(call.lens_q))) for call in empty)
    # Two in a row, and then new tokens that fit into the keys of the sequence before.
    for call in empty:
        after = zip(call.lens_q, call.lens_q[1:], call.lens_q[2:], call.lens_k[1:], strict=False)
        assert any(first == second == 0 < new <= keys for first, second, new, keys in after)


def test_calls_without_a_cached_prefix_have_their_lengths_in_one_tensor_or_in_two() -> None:
    made = [(call.q.dtype, call.cu_seqlens_k is call.cu_seqlens_q, any(call.prefixes)) for call in _made("extend")]
    assert {(dtype, shared) for dtype, shared, cached in made if not cached} == set(product(DTYPES.values(), (False, True)))
    assert not any(shared for _, shared, cached in made if cached)


def test_half_of_the_design_has_a_head_dim_of_v_that_is_declared() -> None:
    made = [case.condition["head_dim_v"] for case in cases(head_dims=[192], declared=Declaration(head_dims_v=(128,)))]
    assert made.count("128") > len(made) / 4


def test_q_k_and_v_that_each_lie_in_their_own_way_have_different_strides() -> None:
    call = next(call for case, call in _every() if case.condition["inputs"] == "each its own")
    assert call.q.is_contiguous()
    assert call.k.stride() != call.v.stride()


@cache
def _both(phase: str, size: Size = "small") -> list[tuple[Case, AttentionCall]]:
    return [(case, case.make()) for case in cases((phase,), size=size)]


def _made(phase: str, size: Size = "small") -> list[AttentionCall]:
    return [call for _, call in _both(phase, size)]


def _every() -> list[tuple[Case, AttentionCall]]:
    return [*_both("extend"), *_both("decode")]


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_batches_of_equal_totals_are_split_in_two_ways(phase: str) -> None:
    splits: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
    for call in _made(phase):
        key = (call.q.shape, call.k.shape, call.q.dtype, len(call.lens_k))
        splits.setdefault(key, set()).add((*call.lens_q, *call.lens_k))
    assert max(map(len, splits.values())) > 1, "a plan that is kept by totals is another call's"


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_small_weights_decide_behind_a_sink(phase: str) -> None:
    calls = [call for case, call in _both(phase) if case.condition["data"] == "attention sink"]
    assert {call.q.dtype for call in calls} == {torch.float16, torch.bfloat16, torch.float32}
    for call in (call for call in calls if len(call.lens_k) == 1):
        without = replace(call, v=call.v.clone())
        without.v[0] = 0  # what is left is what the other keys give, which weigh 1e-4 together
        assert 0.02 < float(oracle(without).abs().sum() / oracle(call).abs().sum()) < 0.5


def test_sequences_with_equal_first_tokens_part_within_a_page() -> None:
    equal = [call for case, call in _both("extend") if case.condition["data"] == "equal first tokens"]
    [call] = [call for call in equal if len(call.lens_k) == 3]
    first, second = (call.k[start : start + 48] for start in call.cu_seqlens_k[:2].tolist())
    assert torch.equal(first[:40], second[:40])
    assert not torch.equal(first[40:], second[40:])


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_keys_share_maxima_and_rows_are_zero(phase: str) -> None:
    calls = [call for case, call in _both(phase) if case.condition["data"] == "equal keys and zeros"]
    assert calls
    for call in calls:
        starts, queries = call.cu_seqlens_k[:-1].tolist(), call.cu_seqlens_q[:-1].tolist()
        for start, length in zip(starts, call.lens_k, strict=True):
            pairs = call.k[start : start + length // 2 * 2].unflatten(0, (-1, 2))
            assert torch.equal(pairs[:, 0], pairs[:, 1])
            assert not call.v[start].any()
        zero = [not call.q[first].any() for first in queries]
        assert zero == [n % 2 == 0 for n in range(len(queries))]


def test_scores_far_from_zero_overflow_or_underflow_without_their_maximum() -> None:
    seen = Counter[str]()
    for case, call in _every():
        if not case.condition["data"].startswith("scores far") or len(call.lens_k) > 1:
            continue
        first = call.k[call.prefixes[0]].double().repeat_interleave(2, 0)
        scores = call.scale * (call.q.double() * first).sum(-1)
        above = case.condition["data"] == "scores far above 0"
        assert float((scores if above else -scores).min()) > 88.8, "exp overflows, or loses all bits, in float32"
        seen[case.condition["data"]] += 1
    assert seen == {"scores far above 0": 2, "scores far below 0": 2}


def test_scores_lie_below_what_stands_for_minus_infinity_scaled_or_not() -> None:
    far = [call for case, call in _every() if case.condition["data"] == "unscaled scores below -1e5"]
    assert {call.phase for call in far} == {"extend", "decode"}
    for call in far:
        for queries, keys in sequences(call):
            products = torch.einsum("qgd,kgd->gqk", call.q[queries, :: call.heads.group].double(), call.k[keys].double())
            assert products.max() < -1e5
            assert call.scale * products.max() < -5e4


def test_a_seed_determines_cases_and_data() -> None:
    once, again, other = cases(seed=3), cases(seed=3), cases(seed=4)
    names = [case.name for case in once]
    assert max(len(cases(seed=seed)) for seed in range(4)) <= 700, "more than a check of an interpreted kernel can afford"
    assert names == [case.name for case in again]
    assert all(torch.equal(a.make().q, b.make().q) for a, b in zip(once[::10], again[::10], strict=True))
    assert {*names} != {case.name for case in other}
    assert uncovered(other, "extend", "small", list(combinations(ALL, 2))) == []
    assert len(set(names)) == len(names)
    assert not any(" " in name for name in names)


@cache
def _met(seed: int) -> dict[str, set[int]]:
    """The lengths and numbers of sequences that a seed's calls have."""
    met: dict[str, set[int]] = {}
    for case in cases(seed=seed):
        phase, lens = case.condition["phase"], case.shape.lens
        found = {
            "new": [a for a, _ in lens],
            "cached": [b for _, b in lens],
            "keys": [a + b for a, b in lens],
            "batch": [len(lens)],
        }
        for what, values in found.items():
            met.setdefault(f"{phase} {what}", set()).update(values)
    return met


@pytest.mark.parametrize(
    ("what", "lengths"),
    [
        ("extend new", range(209, 240)), ("extend new", range(258, 447)), ("extend cached", range(201, 249)),
        ("decode keys", range(210, 241)), ("decode keys", range(360, 400)), ("extend batch", range(10, 12)),
        ("decode batch", range(10, 16)),
    ],
)  # fmt: skip
def test_lengths_between_the_ends_of_blocks_and_sizes_between_those_of_graphs_are_drawn(what: str, lengths: range) -> None:
    """A kernel that returned zeros for 209 to 240 new tokens, or in batches of 10 and 11, passed with every seed."""
    met = [_met(seed)[what] & set(lengths) for seed in range(8)]
    assert sum(map(bool, met)) >= 7
    assert len(set.union(*met)) > min(5, len(lengths) // 4)


def test_what_is_drawn_is_one_value_of_its_axis() -> None:
    """Else a kernel that is wrong beyond some length would be described by dozens of lengths."""
    values = [{case.condition["prefix"] for case in cases(seed=seed)} for seed in range(2)]
    assert values[0] == values[1]


def test_dtypes_are_named_as_elsewhere() -> None:
    names = [case.name for case in cases(["decode"], dtypes=[torch.bfloat16])]
    assert names == [case.name for case in cases(["decode"], dtypes=["bfloat16"])]
    with pytest.raises(ValueError, match=r"dtypes from .*'float32'"):
        cases(dtypes=["float31"])


def test_arguments_select_the_cases() -> None:
    made = cases(("decode",), dtypes=[torch.bfloat16], head_dims=[96])
    calls = [case.make() for case in made]
    assert {(c.phase, c.q.dtype, c.v.shape[2]) for c in calls} == {("decode", torch.bfloat16, 96)}
    for wrong in ({"phases": ()}, {"phases": ("prefill",)}, {"dtypes": ()}, {"size": "tiny"}, {"head_dims": ()}):
        with pytest.raises(ValueError, match="no matrix of phases"):
            cases(**wrong)  # type: ignore[arg-type]


def test_a_model_has_scores_far_from_zero_in_its_matrix_too() -> None:
    made = model_cases(("extend", "decode"), "cpu", torch.float32, (4, 2), 64, 512)
    assert Counter(case.condition["phase"] for case in made) == {"extend": 31, "decode": 23}
    far = [case.condition["phase"] for case in made if case.condition["data"].startswith("scores far")]
    assert far == ["extend", "extend", "decode", "decode"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_the_heads_of_llama_are_in_the_default_matrix(phase: str, dtype: torch.dtype) -> None:
    made = [call for call in _made(phase) if (call.q.dtype, call.q.shape[2]) == (dtype, 128)]
    assert {(call.q.shape[1], call.k.shape[1]) for call in made} >= {(32, 8), (64, 8), (32, 32)}


@pytest.mark.parametrize(("phase", "longest"), [("extend", 9), ("extend", 1), ("decode", 1)])
@pytest.mark.parametrize(
    ("holds", "where"),
    [
        (lambda c: c.lens_q[0] == 0 < c.lens_k[0], "where the first sequence has no new tokens"),
        (lambda c: c.lens_q[-1] == 0 < c.lens_k[-1], "where the last sequence has no new tokens"),
        (lambda c: c.lens_k[0] == 0, "where the first sequence has no keys"),
        (lambda c: c.lens_k[-1] == 0, "where the last sequence has no keys"),
    ],
)
def test_degenerate_batches_meet_prompts_and_decode(
    phase: str, longest: int, holds: Callable[[AttentionCall], bool], where: str
) -> None:
    some = [call for call in _made(phase) if max(call.lens_q) == longest and holds(call)]
    assert some, f"a kernel that is wrong {where} passes"


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_every_sequence_of_a_batch_has_another_length(phase: str) -> None:
    some = [call for call in _made(phase) if len(call.lens_k) > 3 and len(set(call.lens_k)) == len(call.lens_k)]
    assert any(len(set(call.lens_q)) == (1 if phase == "decode" else len(call.lens_q)) for call in some)


def test_prompts_between_two_blocks_and_a_chunk_a_key_beyond_4096_and_unscaled_scores_are_there() -> None:
    prompts = [
        call
        for call in _made("extend")
        if any(new == keys and 256 < new < 512 for new, keys in zip(call.lens_q, call.lens_k, strict=True))
    ]
    assert len(prompts) > 1
    for phase in ("extend", "decode"):
        assert any(max(call.lens_k) == 4097 for call in _made(phase))
        unscaled = [call for case, call in _both(phase) if case.condition["data"] == "unscaled scores"]
        assert any(float((call.q[-1].float() * call.k[:, 0, None].float()[0]).sum(-1).std()) > 4 for call in unscaled)


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "padding", "stored_kv", "temperature"])
def test_each_value_of_a_feature_meets_each_dtype_head_dim_number_of_heads_and_layout(phase: str, feature: str) -> None:
    made = [case.condition for case in cases((phase,), declared=Declaration(features=(feature,)))]
    heads = ["MHA 4/4", "GQA 4/2", "GQA 8/2", "GQA 16/2", *["MQA 4/1"] * (feature != "stored_kv")]
    axes = {
        "dtype": ["float16", "bfloat16", "float32"],
        "head_dim": ["64", "128"],
        "heads": heads,
        "inputs": ["packed", "sliced", "heads first", "each its own"],
    }
    for axis, values in axes.items():
        met = {(one["asked for"], one[axis]) for one in made}
        assert set(product(ASKED[feature], values)) <= met
    asking = [one for one in made if one["asked for"] != "nothing"]
    three = ("dtype", "head_dim", "heads")
    assert set(product(*map(axes.__getitem__, three))) <= {tuple(one[axis] for axis in three) for one in asking}
    assert {"GQA 32/8", "GQA 64/8", "MHA 32/32"} <= {one["heads"] for one in asking}
    assert {"80", "96", "192", "256"} <= {one["head_dim"] for one in asking}


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_two_features_are_asked_for_together_where_each_changes_the_output(phase: str) -> None:
    """A kernel that leaves out one of two features where the other is asked for is wrong by far."""
    features = ("window", "softcap", "temperature", "sinks")
    plain: dict[str, dict[str, Any]] = {
        "window": {"mask": Mask()},
        "softcap": {"softcap": 0.0},
        "temperature": {"temperature": 0},
        "sinks": {"sinks": ()},
    }
    made = [
        case for case in cases((phase,), declared=Declaration(features=features)) if case.condition["asked for"].count(" and ") == 1
    ]
    for pair in combinations(features, 2):
        both = " and ".join(STRONGEST[name] for name in pair)
        calls = [case.make() for case in made if case.condition["asked for"] == both]
        assert {call.q.dtype for call in calls} == {torch.float16, torch.bfloat16, torch.float32}
        for left_out in pair:
            changes = [oracle(call.with_spec(**plain[left_out])) - oracle(call) for call in calls]
            assert (
                max(float(change.abs().mean() / oracle(call).abs().mean()) for change, call in zip(changes, calls, strict=True))
                > 0.05
            )


def test_what_has_a_scale_of_its_own_has_another_one_than_its_neighbour() -> None:
    for case in cases(("extend",), declared=Declaration(features=("stored_kv",))):
        form = case.condition["asked for"].rpartition(" per ")[2]
        if form in ("nothing", "tensor"):
            continue
        stored = case.make().stored
        assert stored is not None
        for scale in (stored.k_scale, stored.v_scale):
            axes = (1,) if form == "head" else (0, 1)
            step = 16 if form.startswith("block") else 1
            for axis in axes:
                some = scale[::step] if axis == 0 else scale
                assert bool(
                    (some.diff(dim=axis) != 0).all() if form != "token" else (some.diff(dim=axis) != 0).float().mean() > 0.9
                )


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_a_kernel_that_returns_log_sum_exps_meets_queries_that_see_no_key(phase: str) -> None:
    made = cases((phase,), declared=Declaration(features=("lse", "window")))
    unseen = [case for case in made if case.condition["batch"] == "parts without keys"]
    assert {case.condition["asked for"] for case in unseen} == {"nothing", "window 64"}
    assert {case.condition["dtype"] for case in unseen} == {"float16", "bfloat16", "float32"}
    for case in unseen:
        call = case.make()
        without = log_sum_exp(call).isneginf().all(1)
        assert 0 < int(without.sum()) < len(without)
        assert torch.equal(oracle(call).isnan().all(2).all(1), without)


@cache
def _long() -> list[tuple[dict[str, str], list[tuple[int, int]]]]:
    """The conditions and lengths of the default calls."""
    return [(case.condition, list(case.shape.lens)) for case in cases()]


def _keys(lens: list[tuple[int, int]]) -> list[int]:
    return [new + cached for new, cached in lens]


HALVES, FLOAT32 = {"float16", "bfloat16"}, {"float32"}


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_what_is_wrong_behind_1024_keys_shows_in_each_dtype_head_dim_and_number_of_heads(phase: str) -> None:
    """Ten kernels of an outside tester were wrong in longer calls alone: of head_dim 128, of 16 bits, of a model's heads."""
    long = [said for said, lens in _long() if said["phase"] == phase and max(_keys(lens)) > 1100]
    heads = ["MHA 4/4", "GQA 4/2", "GQA 8/2", "GQA 16/2", "MQA 4/1"]
    met = {(said["dtype"], said["head_dim"], said["heads"]) for said in long}
    assert set(product(HALVES | FLOAT32, ("64", "128"), heads)) <= met
    assert set(product(HALVES, ("128",), ["GQA 32/8"])) <= met
    assert {"80", "96", "192", "256"} <= {said["head_dim"] for said in long}
    unaligned = [n for _, lens in _long() for n in _keys(lens) if 1100 < n < 4000 and n % 64]
    assert len(set(unaligned)) > 20


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_leave_every_remainder_of_16_in_long_sequences(phase: str, seed: int) -> None:
    keys = {n for case in cases((phase,), seed=seed) for n in _keys(case.shape.lens)}
    for beyond in (256, 1024):
        assert {n % 16 for n in keys if n > beyond} == set(range(16))


def test_long_calls_meet_what_kernels_do_with_many_keys() -> None:
    decode = [(said, _keys(lens)) for said, lens in _long() if said["phase"] == "decode"]
    assert {said["dtype"] for said, keys in decode if len(keys) >= 8 and max(keys) > 1024} == HALVES | FLOAT32
    extend = [(said, lens) for said, lens in _long() if said["phase"] == "extend"]
    chunks = [said for said, lens in extend if any(new >= 128 and cached >= 1024 for new, cached in lens)]
    assert {said["dtype"] for said in chunks} == HALVES | FLOAT32, "a chunk of prefill behind a long prefix"
    assert {said["head_dim"] for said in chunks} == {"64", "128"}
    far = {(said["dtype"], said["head_dim"]) for said, keys in decode if max(keys) > 2048}
    assert far >= {("float32", "64"), ("float32", "128"), ("float16", "64"), ("bfloat16", "64")}
    for phase in ("extend", "decode"):
        packed = max(sum(_keys(lens)) for said, lens in _long() if said["phase"] == phase)
        assert packed > 2**15, "an index of packed keys in 16 bits wraps"


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_numbers_of_heads_cross_head_dims_beyond_the_core(phase: str) -> None:
    shapes = {
        (said["head_dim"], int(q) // int(kv), int(kv))
        for said, _ in _long()
        if said["phase"] == phase
        for q, kv in (said["heads"].split()[1].split("/"),)
    }
    for dim in ("80", "96", "192", "256"):
        assert max(kv for d, _, kv in shapes if d == dim) > 4
        assert max(ratio for d, ratio, _ in shapes if d == dim) >= 6


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "temperature", "stored_kv", "not_causal"])
def test_each_value_of_a_feature_meets_more_than_1024_keys(phase: str, feature: str) -> None:
    made = cases((phase,), declared=Declaration(features=(feature,)))
    long = {case.condition["asked for"] for case in made if max(_keys(case.shape.lens)) > 1100}
    assert {*ASKED[feature]} - long == set() or (feature, phase) == ("not_causal", "decode")


def test_bfloat16_meets_numbers_that_float16_does_not_hold() -> None:
    for phase in ("extend", "decode"):
        some = [call for case, call in _both(phase) if case.condition["data"] == "beyond float16"]
        assert {(call.q.dtype, call.q.shape[2]) for call in some} == {(torch.bfloat16, 64), (torch.bfloat16, 128)}
        for call in some:
            for tensor in (call.k, call.v):
                assert float(tensor.abs().max()) > 65504
                assert 0 < float(tensor[:, 1].abs().max()) < 2**-14
            assert float(oracle(call.with_spec(mask=Mask())).abs().max()) > 0


def test_a_model_gets_long_calls_of_its_shape() -> None:
    for phase in ("extend", "decode"):
        of_it = [case for case in cases((phase,), like=["qwen2.5-7b"]) if case.condition["heads"] == "GQA 28/4"]
        assert any(max(_keys(case.shape.lens)) > 1100 for case in of_it)


def test_calls_take_other_parts_of_the_same_numbers_and_a_kernel_gets_them_in_memory_of_its_own() -> None:
    shape = Shape("extend", ((3, 5),), head_dim=8)
    first, again, second, other = (shape.make(*seeds) for seeds in ((1, "cpu", 0), (1, "cpu", 0), (2, "cpu", 0), (1, "cpu", 1)))
    numbers = torch.cat([tensor.flatten() for tensor in (first.q, first.k, first.v)])
    assert len(numbers.unique()) == len(numbers)  # no number is in two of them
    assert not torch.equal(first.q, second.q)
    assert not torch.equal(first.q, other.q)
    first.k.zero_()
    assert torch.equal(shape.draw(1, "cpu", 0).k, again.k)
    assert bool((again.k != 0).all())
    assert 0.7 < float(numbers.std()) < 1.3
