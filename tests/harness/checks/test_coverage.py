"""What a check says that it covered, and what it did not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.kernels import declares
from assay.harness.attention.matrix import cases
from assay.harness.checks.check import check as check_and_read
from assay.harness.checks.coverage import coverage_of
from assay.harness.evidence.kernel_result import Beyond, Coverage, KernelResult, Reach
from assay.reports.check import _not_covered, check_document, message
from assay.reports.page import to_html

check = partial(check_and_read, read_out=0)
pytestmark = pytest.mark.usefixtures("thin_matrix")


def covered(dtypes: list[torch.dtype], phase: str, without: Callable[[AttentionCall], bool] = lambda call: False) -> Coverage:
    made = [(case, case.make()) for case in cases((phase,), dtypes=dtypes)]
    left = [(case, call) for case, call in made if not without(call)]
    return coverage_of([call for _, call in left], [case for case, _ in left], [], [], [], [], 300)


def test_coverage_is_a_product_its_reach_and_what_lies_beyond_it() -> None:
    found = covered([torch.float16], "extend")
    assert (found.dtypes, found.head_dims) == (("float16",), (64, 128))
    assert found.heads == ((4, 1), (4, 2), (4, 4), (8, 2), (16, 2))
    assert found.least == {"extend": Reach(new=129, behind=129, keys=578, sequences=9)}
    assert found.most == {"extend": Reach(new=513, behind=512, keys=4002, sequences=40)}
    beyond = {one.axis: one for one in found.beyond}
    assert beyond["head_dim"] == Beyond(axis="head_dim", values=("80", "96", "192", "256"), keys=533)
    assert beyond["layer"].values == ("1", "2", "16", "31")
    assert (found.runs, found.device) == (300, "cpu")
    result = KernelResult(kernel="k", calls=9, coverage=found)
    assert "each of float16 with head_dim 64, 128 and 4/1, 4/2, 4/4, 8/2, 16/2 q/kv heads" in message(result)
    assert "head_dim 80, 96, 192, 256 (to 533 keys)" in to_html(check_document(result))


def test_the_product_holds_for_every_combination() -> None:
    """The line said float16 and head_dim 128 and 4,000 cached, each by itself: it was read as a product."""
    both = [torch.float16, torch.bfloat16]
    whole = covered(both, "decode")
    assert (whole.dtypes, whole.head_dims, len(whole.heads)) == (("bfloat16", "float16"), (64, 128), 5)
    assert whole.least["decode"] == Reach(new=1, behind=1, keys=602, sequences=9)

    def one_kind(call: AttentionCall) -> bool:
        return (call.q.dtype, call.q.shape[1:], call.k.shape[1]) == (torch.bfloat16, (4, 128), 1)

    assert covered(both, "decode", lambda call: one_kind(call) and max(call.lens_k) > 512).least["decode"].keys < 512
    assert (4, 1) not in covered(both, "decode", one_kind).heads


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
    assert result.coverage.most["extend"].behind == 0
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
    assert (result.verdict, [(one.axis, one.values) for one in result.coverage.beyond][1]) == ("pass", ("head_dim_v", ("128",)))
    assert "head_dim 64, by declaration" in _not_covered(result)

    @declares(head_dims=(64,), head_dims_v=(32,))
    def refuses(call: AttentionCall) -> Tensor:
        if call.v.shape[2] != call.q.shape[2]:
            raise KernelRefused("v is narrow")
        return rounded_oracle(call)

    assert check(refuses, dtypes=[torch.float32], phases=["decode"]).verdict == "inconclusive"
