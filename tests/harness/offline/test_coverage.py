"""What a check says that it covered, and what it did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.kernels import declares
from assay.harness.attention.matrix import cases
from assay.harness.bugs.faults import rounded_oracle
from assay.harness.offline.check import check as check_and_read
from assay.harness.offline.coverage import Core, Reach, coverage_of
from assay.reports.check import _not_covered, check_document, message
from assay.reports.page import to_html

check = partial(check_and_read, read_out=0)
pytestmark = pytest.mark.usefixtures("thin_matrix")


@pytest.mark.parametrize("run", [pytest.param(True, id="all calls run", marks=pytest.mark.slow), pytest.param(False, id="some")])
def test_a_pass_says_what_it_covers_in_one_line_in_json_and_on_the_page(run: bool) -> None:
    made = cases(("extend",), dtypes=[torch.float16])
    result = check(rounded_oracle, cases=made if run else made[:4], phases=["extend"], calls=300 if run else 0)
    if not run:
        covered = coverage_of([case.make() for case in made], made, [], [], [], [], 300)
        result = replace(result, missing=(), computed=tuple(made), coverage=covered)
    assert result.verdict == "pass"
    assert result.coverage.sentence == (
        "each of float16 with head_dim 64, 128 and 4/1, 4/2, 4/4, 8/2, 16/2 q/kv heads, at sampled lengths: "
        "extend to 129 new tokens, 129 behind a cached prefix, 578 keys of a sequence and 9 sequences; each limit by "
        "itself, not their combinations. "
        "Beyond that, single calls: head_dim 80, 96, 192, 256 (to 533 keys); "
        "3/3, 6/2, 10/2, 10/10, 12/2, 12/3, 12/6, 14/2, 16/4, 24/2, 25/5, 32/2 q/kv heads (to 533 keys); inputs "
        "each its own, heads first, sliced (to 533 keys); layers 1, 2, 16, 31 (to 578 keys); extend to 513 new tokens, 512 "
        "behind a cached prefix, 4,002 keys of a sequence and 40 sequences. 300 runs on cpu"
    )
    found = result.document("").coverage
    assert (found.dtypes, found.head_dims, found.kv_heads) == (
        ("float16",), (64, 80, 96, 128, 192, 256), (1, 2, 3, 4, 5, 6, 10),
    )  # fmt: skip
    assert found.lengths is not None
    [(phase, lengths)] = found.lengths.items()
    assert (phase, lengths.new, lengths.cached, lengths.sequences) == ("extend", (0, 513), (0, 4000), 40)
    assert lengths.calls == len(result.computed)
    [reach] = found.core.reach.values()
    assert (reach.new, reach.behind, reach.keys, reach.sequences) == (129, 129, 578, 9)
    assert result.coverage.sentence in to_html(check_document(result))
    assert f"covered: {result.coverage.sentence}" in message(result)


def test_the_core_holds_for_every_combination() -> None:
    """The line said float16 and head_dim 128 and 4,000 cached, each by itself: it was read as a product."""
    made = [(case, case.make()) for case in cases(("decode",), dtypes=[torch.float16, torch.bfloat16])]

    def core(without: Callable[[AttentionCall], bool]) -> Core:
        left = [(case, call) for case, call in made if not without(call)]
        return coverage_of([call for _, call in left], [case for case, _ in left], [], [], [], [], 0).core

    whole = core(lambda call: False)
    assert (whole.dtypes, whole.head_dims, len(whole.heads)) == (("bfloat16", "float16"), (64, 128), 5)
    assert whole.reach["decode"] == Reach(new=1, behind=1, cached=601, keys=602, sequences=9)

    def one_kind(call: AttentionCall) -> bool:
        return (call.q.dtype, call.q.shape[1:], call.k.shape[1]) == (torch.bfloat16, (4, 128), 1)

    assert core(lambda call: one_kind(call) and max(call.lens_k) > 512).reach["decode"].keys < 512
    assert (4, 1) not in core(one_kind).heads


def test_what_an_undeclared_kernel_raises_on_is_a_gap_with_advice() -> None:
    def plain(call: AttentionCall) -> Tensor:
        assert call.q.shape[2] in (64, 128), "head_dim must be 64 or 128"
        return rounded_oracle(call)

    result = check(plain, phases=["decode"], dtypes=["float16"], calls=0)
    [gap] = [gap for gap in result.coverage.gaps if gap.what.startswith("head_dim")]
    assert gap.what == "head_dim 80, 96, 192, 256"
    assert gap.why.startswith("raised AssertionError: head_dim must be 64 or 128 (")
    assert gap.why.endswith("declare what it supports: head_dims=(64, 128)")
    assert (result.verdict, result.coverage.head_dims) == ("pass", (64, 128))


def test_a_kernel_for_complete_prompts_says_so() -> None:
    @declares(prefix=False)
    def prefill(call: AttentionCall) -> Tensor:
        assert not any(call.prefixes)
        return rounded_oracle(call)

    result = check(prefill, dtypes=["float16"], calls=0)
    assert (result.verdict, result.missing, result.refused) == ("pass", (), ())
    assert "a cached prefix, by declaration" in _not_covered(result)
    assert result.coverage.lengths is not None
    assert {phase: one.cached for phase, one in result.coverage.lengths.items()} == {"extend": (0, 0)}
    with pytest.raises(ValueError, match="expected extend alone"):
        declares(phases=("extend", "decode"), prefix=False)


def test_the_advice_on_a_refusal_names_the_axis_that_separates() -> None:
    def no_prefix(call: AttentionCall) -> Tensor:
        if any(call.prefixes):
            raise KernelRefused("no cached prefix")
        return rounded_oracle(call)

    result = check(no_prefix, phases=["extend"], dtypes=["float16"], calls=0)
    assert result.verdict == "inconclusive"
    assert "every extend call with a cached prefix was refused; declare what it supports: prefix=False" in result.missing
    assert not [one for one in result.missing if "dtype" in one or "head_dim" in one]
    [gap] = result.coverage.gaps
    assert gap.what == "a cached prefix"
    assert gap.why == "no cached prefix; declare what it supports: prefix=False"


@pytest.mark.slow
def test_a_head_dim_of_v_is_covered_where_it_is_declared() -> None:
    @declares(head_dims=(192,), head_dims_v=(128,))
    def deepseek(call: AttentionCall) -> Tensor:
        return rounded_oracle(call)

    result = check(deepseek, phases=["extend"], dtypes=["bfloat16"], calls=0)
    assert (result.verdict, result.coverage.head_dims, result.coverage.head_dims_v) == ("pass", (192,), (128,))
    assert "head_dim 64, by declaration" in _not_covered(result)

    @declares(head_dims=(64,), head_dims_v=(32,))
    def refuses(call: AttentionCall) -> Tensor:
        if call.v.shape[2] != call.q.shape[2]:
            raise KernelRefused("v is narrow")
        return rounded_oracle(call)

    assert check(refuses, dtypes=[torch.float32], phases=["decode"]).verdict == "inconclusive"


def test_what_nobody_claims_does_not_narrow_the_product() -> None:
    """Of one dtype the line had one head dim with eleven numbers of heads, and not both with the five that each has."""
    made = [(case, case.make()) for case in cases(("decode",), dtypes=[torch.bfloat16])]
    core = coverage_of([call for _, call in made], [case for case, _ in made], [], [], [], [], 0).core
    assert (core.head_dims, len(core.heads)) == ((64, 128), 5)
    assert core.reach["decode"].keys > 512
