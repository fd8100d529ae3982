"""The reduction in PyTorch compared with float64, and that of the kernel with it: interpreted, and on a GPU if there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.harness.conditions import CACHED_PREFIX, POSITION
from assay.harness.engines.inside.reduction import LayerSums
from assay.harness.engines.inside.reduction_kernel import reduce
from assay.harness.evidence.error_table import CONDITION_COUNT, DISTANCE, ErrorTable, condition_numbers, elements, relative_l1
from assay.harness.stats.error_sums import query_sums
from assay.harness.stats.error_sums import relative_l1 as relative

HEADS, DIM = 3, 16
LENS = ([3, 20, 2], [0, 1, 40])
ROWS = {("0", "0"): [0], ("0", "1-15"): [1, 2], ("1", "0"): [3], ("1", "1-15"): list(range(4, 19)),
        ("1", "16-63"): list(range(19, 23)), (">= 16", "0"): [23], (">= 16", "1-15"): [24]}  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STRANGE = [float("nan"), float("inf"), -float("inf"), 0.0]


def outputs(shape: tuple[int, int, int], dtype: torch.dtype, strange: int, seed: int) -> tuple[Tensor, Tensor]:
    """An output and the reference's; about one element in `strange` of each is nonfinite or zero; none if `strange` is 0."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator)
    out = reference + 0.1 * torch.randn(shape, generator=generator)
    for values in (out, reference):
        if strange:
            what = torch.tensor(STRANGE)[torch.randint(len(STRANGE), shape, generator=generator)]
            values[...] = torch.where(torch.randint(strange, shape, generator=generator) == 0, what, values)
    return out.to(dtype), reference.to(dtype)


def cells_of(
    calls: list[tuple[Tensor, Tensor]], new: list[int], prefix: list[int], layer: int = 0, first_head: int = 0
) -> ErrorTable:
    sums = LayerSums(HEADS, torch.device("cpu"))
    for out, reference in calls:
        sums.measure(out, reference, torch.from_numpy(condition_numbers("extend", new, prefix)))
    return sums.cells(layer, first_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cell_agrees_with_float64(dtype: torch.dtype) -> None:
    calls = [outputs((25, HEADS, DIM), dtype, 0, seed) for seed in (1, 2)]
    sums = cells_of(calls, *LENS, layer=5, first_head=HEADS).distance(("prefix", "position", "head"), {"phase": "extend"})
    found, counted = relative_l1(sums), elements(sums)
    assert np.isnan(found[..., :HEADS]).all(), "heads of a later process have numbers of their own"
    for i, prefix in enumerate(CACHED_PREFIX.labels):
        for j, position in enumerate(POSITION.labels):
            for head in range(HEADS):
                rows = ROWS.get((prefix, position), [])
                a, b = (torch.cat([pair[side][rows, head] for pair in calls]).double() for side in (0, 1))
                assert counted[i, j, HEADS + head] == a.numel()
                if rows:
                    error = float((a - b).abs().sum() / b.abs().sum())
                    assert found[i, j, HEADS + head] == pytest.approx(error, rel=1e-5)


def test_elements_that_are_not_finite_are_counted_and_the_worst_query_has_one() -> None:
    out, reference = outputs((4, HEADS, DIM), torch.float32, 0, 3)
    out[1, 0, :4] = torch.nan
    reference[3, 2, 0] = torch.inf
    out[3, 2, 0] = torch.inf
    sums = cells_of([(out, reference)], [4], [0]).distance(("head",))
    assert sums[:, DISTANCE.index("nonfinite")].tolist() == [4, 0, 0]
    assert elements(sums).tolist() == [64, 64, 63]
    assert np.isinf(relative_l1(sums)).tolist() == [True, False, False]
    (worst, at), _ = LayerSums(HEADS, torch.device("cpu")).measure(out, reference, torch.zeros(4, dtype=torch.int64))
    assert (float(worst), int(at)) == (float("inf"), HEADS)


def runs(rows: int, longest: int, seed: int) -> Tensor:
    """Conditions in runs of up to `longest` rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    return torch.randint(CONDITION_COUNT, (rows,), generator=generator).repeat_interleave(lengths)[:rows]


def accumulator(heads: int, device: str) -> Tensor:
    return torch.zeros(CONDITION_COUNT, heads, len(DISTANCE), dtype=torch.float64, device=device)


def check(calls: list[tuple[Tensor, Tensor, Tensor]], device: str = "cpu") -> None:
    """Both reductions, over several calls, give the same sums and worst queries."""
    heads = calls[0][0].shape[1]
    expected = LayerSums(heads, torch.device("cpu"))
    sums = accumulator(heads, device)
    for out, reference, conditions in calls:
        worst = expected.measure(out, reference, conditions)
        found = reduce(*(t.to(device) for t in (out, reference, conditions)), sums)
        errors = query_sums(out, reference.masked_fill(~reference.isfinite(), torch.nan))
        by_row = relative(errors).flatten(), errors[..., DISTANCE.index("difference")].flatten()
        for (value, _), (got, at), numbers in zip(worst, found, by_row, strict=True):
            assert float(got) == pytest.approx(float(value), rel=2e-6)
            # Sums in another order may choose another of two that are equal up to rounding, never a smaller one.
            assert float(numbers[int(at)]) == pytest.approx(float(value), rel=2e-6)
            if not 0 < float(value) < float("inf"):
                assert int(at) == int((numbers == value).nonzero()[0])
    sums, counts = sums.cpu(), len(DISTANCE) - 3
    assert torch.equal(sums[..., counts:], expected._sums[..., counts:]), "counts are exact"
    torch.testing.assert_close(sums[..., :counts], expected._sums[..., :counts], rtol=2e-6, atol=0)


@pytest.mark.interpreter
@settings(max_examples=15)
@given(
    rows=st.integers(1, 24),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 8, 24, 64]),
    dtype=st.sampled_from(DTYPES),
    strange=st.sampled_from([0, 1, 3, 50]),
    longest=st.sampled_from([1, 5, 24]),
    seed=st.integers(0, 9),
)
def test_both_reductions_agree(rows: int, heads: int, dim: int, dtype: torch.dtype, strange: int, longest: int, seed: int) -> None:
    shape = (rows, heads, dim)
    check([(*outputs(shape, dtype, strange, seed + i), runs(rows, longest, seed + i)) for i in range(2)])


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from assay.harness.engines.inside.reduction_kernel import _WARPS, _reduce
types = {"out": "*bf16", "reference": "*bf16", "conditions": "*i64", "sums": "*fp64", "worst": "*i64"}
sizes = dict(dim=128, block_dim=128, block_rows=32, wide=tl.float32, none=160, sum_count=5, last=2**31 - 1)
names = _reduce.arg_names
signature = {name: types.get(name, "constexpr" if name in sizes else "i32") for name in names}
source = ASTSource(fn=_reduce, signature=signature, constexprs={(names.index(n),): size for n, size in sizes.items()})
print(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _WARPS}).asm["ptx"])
"""


@pytest.mark.slow
def test_it_compiles_for_a_gpu_without_one() -> None:
    # The interpreter accepts what the compiler refuses, and Triton chooses between them at import.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    # The worst query by two measures and five sums; nothing else is written.
    assert len(re.findall(r"(?:red|atom)\.global\S*\.(?:add\.f64|max\.s64)", done.stdout)) == 7
    assert "st.global" not in done.stdout


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strange", [0, 50])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_on_a_gpu_both_reductions_agree(dtype: torch.dtype, strange: int, dim: int) -> None:
    check([(*outputs((1000, 8, dim), dtype, strange, 5 + i), runs(1000, 400, i)) for i in range(2)], "cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_layer_measures_as_on_the_cpu() -> None:
    out, reference = outputs((300, 4, 128), torch.bfloat16, 0, 6)
    conditions = runs(300, 100, 6)
    here, there = LayerSums(4, torch.device("cpu")), LayerSums(4, torch.device("cuda"))
    measured = (one.measure(*(t.to(on) for t in (out, reference, conditions))) for one, on in ((here, "cpu"), (there, "cuda")))
    for (value, at), (got, where) in zip(*measured, strict=True):
        assert (float(got), int(where)) == (pytest.approx(float(value), rel=2e-6), int(at))
    for ours, theirs in zip(here.cells(0, 0), there.cells(0, 0), strict=True):
        assert theirs == pytest.approx(ours, rel=2e-6, abs=1e-9)
