"""Plain functions of a paged cache: any of the usual names, in decode and packed; right ones pass, and wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.adapters.adapter import block_table
from assay.harness.attention.call import Kernel, KernelRefused
from assay.harness.attention.declaration import declaration
from assay.harness.attention.matrix import Case, cases
from assay.harness.attention.paging import PagedKV
from assay.harness.checks.check import check
from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import KernelResult

Pages = Callable[[Tensor, int], Tensor]


def own(row: Tensor, pages: int) -> Tensor:
    return row[:pages]


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, edges: Tensor, scale: float, pages: Pages = own) -> Tensor:
    """Attend to the pages of each sequence, causally, in float32."""
    outs = []
    for row, length, (start, end) in zip(table, lens.tolist(), pairwise(edges.tolist()), strict=True):
        read = pages(row, -(-length // k.shape[1])).long() % len(k)
        keys, values = (x[read].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (k, v))
        seen = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs).to(q.dtype)


def plain(q, k_cache, v_cache, block_table, seq_lens, sm_scale):  # type: ignore[no-untyped-def]
    return attend(q, k_cache, v_cache, block_table, seq_lens, torch.arange(len(q) + 1), sm_scale)


def as_flash_attention(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale=None, causal=False):  # type: ignore[no-untyped-def]
    assert causal
    scale = softmax_scale or q.shape[-1] ** -0.5
    return attend(q[:, 0], k_cache, v_cache, page_table, cache_seqlens, torch.arange(len(q) + 1), scale)[:, None]


def as_vllm(output, query, key_cache, value_cache, num_kv_heads, scale, block_tables, context_lens, block_size, max_seq_len):  # type: ignore[no-untyped-def]
    assert (key_cache.shape[1], key_cache.shape[2]) == (block_size, num_kv_heads)
    assert max(context_lens) <= max_seq_len
    output.copy_(attend(query, key_cache, value_cache, block_tables, context_lens, torch.arange(len(query) + 1), scale))


def packed(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, max_query_len, scale=None):  # type: ignore[no-untyped-def]
    scale = scale or query.shape[-1] ** -0.5
    return attend(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale)


def some_cases(kernel: Kernel, step: int) -> list[Case]:
    every = cases(dtypes=["float32"], declared=declaration(kernel))
    return [case for case in every if case.condition["phase"] in declaration(kernel).phases][::step]


def checked(function: Any, step: int) -> KernelResult:
    kernel = kernels.taking_calls("mine", function)
    return check(kernel, cases=some_cases(kernel, step), calls=0, read_out=0, repeats=0)


@pytest.mark.few(2)
@pytest.mark.parametrize(("function", "phases"), [(plain, 1), (as_flash_attention, 1), (as_vllm, 1), (packed, 2)])
def test_a_right_function_plugs_in_by_the_names_of_its_parameters(function: Kernel, phases: int) -> None:
    assert len(declaration(kernels.taking_calls("mine", function)).phases) == phases
    result = checked(function, 11)
    assert (result.exit_code, result.failing, result.findings) == (ExitCode.PASS, (), ())
    assert {"16", "32", "64"} <= {word for value in result.coverage.values["with block table"] for word in value.split()}


WRONG: dict[str, Pages] = {
    "ignores the block table": lambda row, pages: torch.arange(pages),
    "is one page off": lambda row, pages: row[:pages] + 1,
    "reads the pages backwards": lambda row, pages: row[:pages].flip(0),
    "reads the last page from the one before": lambda row, pages: torch.cat(
        [row[: pages - 1], row[max(pages - 2, 0) : max(pages - 1, 1)]]
    ),
}


@pytest.mark.parametrize("what", [*WRONG, "returns zeros"])
def test_a_wrong_function_fails(what: str, failing_cases: Callable[[Kernel, Sequence[Case]], set[str]]) -> None:
    def wrong(q, k_cache, v_cache, block_table, seq_lens, scale):  # type: ignore[no-untyped-def]
        if what not in WRONG:
            return torch.zeros_like(q)
        return attend(q, k_cache, v_cache, block_table, seq_lens, torch.arange(len(q) + 1), scale, WRONG[what])

    kernel = kernels.taking_calls("mine", wrong)
    assert failing_cases(kernel, some_cases(kernel, 15))


@pytest.mark.parametrize("layout", ["sliced", "heads first", "each its own"])
def test_caches_are_laid_out_in_memory_as_a_call_asks(layout: str) -> None:
    def contiguous(q, k_cache, v_cache, block_table, seq_lens, sm_scale):  # type: ignore[no-untyped-def]
        k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (k_cache, v_cache))
        return plain(q, k, v, block_table, seq_lens, sm_scale)

    right, wrong = (kernels.taking_calls("mine", function) for function in (plain, contiguous))
    every = [case for case in cases(("decode",), dtypes=["float32"], declared=declaration(right)) if case.draw().q.shape[1] < 9]
    asked = [case for case in every if case.draw().spec.layout == layout][:3]
    packed = [case for case in every if case.draw().spec.layout == "packed"][:3]
    assert set(check(wrong, cases=[*asked, *packed], calls=0, read_out=0, repeats=0).failing) == {case.name for case in asked}
    assert check(right, cases=[*asked, *packed], calls=0, read_out=0, repeats=0).verdict == "pass"


def test_a_function_of_one_size_of_pages_gets_it_and_the_others_are_a_gap() -> None:
    def mine(q, k_cache, v_cache, block_table, seq_lens, sm_scale):  # type: ignore[no-untyped-def]
        assert k_cache.shape[1] == 128, "the page size must be 128"
        return plain(q, k_cache, v_cache, block_table, seq_lens, sm_scale)

    result = checked(mine, 9)
    assert (result.exit_code, result.failing, result.findings) == (ExitCode.PASS, (), ())
    assert any("pages of 16 tokens" in gap.what for gap in result.coverage.gaps)


def test_a_parameter_that_nobody_knows_is_refused_by_name() -> None:
    def mine(q, k_cache, v_cache, block_table, seq_lens, scale, plan):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(KernelRefused, match="the nearest is paged: it requires plan, which that does not have"):
        kernels.taking_calls("mine", mine)


def test_a_block_table_is_wider_than_the_longest_sequence_and_a_part_of_a_wider_one() -> None:
    """A kernel that took the pages of the longest sequence for the width of the table passed."""
    pool = cast(PagedKV, SimpleNamespace(block_table=torch.zeros(2, 3, dtype=torch.int32), stale=9))
    table = block_table(pool, page=16, keys=48)
    assert table.tolist() == [[0, 0, 0, 9]] * 2
    assert table.stride(0) == 5
    assert block_table(pool, page=16, keys=4096).shape == (2, 256)
