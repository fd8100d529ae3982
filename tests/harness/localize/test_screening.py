from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.cells import deviation
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.localize.screening import Comparisons
from assay.harness.stats.error_sums import relative_l1

LENS = [(150, 0), (40, 130)]


def result(bug: str = "mask-missing", noise: str = "") -> CallResult:
    call = call_of(LENS, (4, 2), 32, torch.float16, "cpu")
    return measure(call, fault(bug)(call), noise)


@pytest.mark.parametrize("noise", ["", "int8_qk"])
def test_what_is_ruled_out_from_some_queries_is_ruled_out_by_all(noise: str) -> None:
    found = result(noise=noise)
    for hypothesis in FAMILY:
        expected = hypothesis.compute(found.call)
        off = Comparisons().explaining(hypothesis, found)
        if expected is None:
            assert off is None
            continue
        whole = deviation(found.out, expected, found.cells)
        beyond = bool((relative_l1(whole) > found.fit_bounds)[found.failing].any())
        assert (off is None) == beyond, hypothesis.id
        if off is not None:
            torch.testing.assert_close(relative_l1(off), relative_l1(whole))


def test_most_hypotheses_are_ruled_out_by_a_sixteenth_of_the_queries() -> None:
    found = result()
    computed: list[int] = []

    def counted(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
        computed.append(190 if rows is None else len(rows))
        return BY_ID["mask-one-key-too-few"].compute(call, rows)

    wrong = replace(BY_ID["mask-one-key-too-few"], compute=counted)
    assert Comparisons().explaining(wrong, found) is None
    assert computed == [12]


def test_a_pair_is_compared_once_and_in_shares_that_are_all_queries() -> None:
    found, calls = result(), []

    def counted(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
        assert rows is not None
        calls.append(rows)
        return BY_ID["mask-missing"].compute(call, rows)

    compared, right = Comparisons(), replace(BY_ID["mask-missing"], compute=counted)
    assert compared.explaining(right, found) is compared.explaining(right, found) is not None
    assert torch.equal(torch.cat(calls).sort()[0], torch.arange(190))
