"""Layouts in memory, and kernels that ignore them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.faults import rounded_oracle
from assay.harness.readout.layouts import BESIDE, LAYOUTS, Layout, beside_nan, fused, heads_first, layout_notes
from assay.harness.readout.probing import Plan, Prober, same

PLANS = [Plan(((9, 20), (6, 0))), Plan(((1, 30), (1, 5)))]


@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS])
def test_a_layout_changes_no_number(layout: Layout) -> None:
    call = PLANS[0].make()
    other = layout(call)
    assert all(torch.equal(getattr(call, name), getattr(other, name)) for name in "qkv")
    assert [getattr(other, name).stride() != getattr(call, name).stride() for name in "qk"] == [
        layout is not beside_nan
    ] * 2


def test_the_rows_beside_are_nan() -> None:
    k = beside_nan(PLANS[0].make()).k
    memory = torch.as_strided(k, (len(k) + 2 * BESIDE, *k.shape[1:]), k.stride(), 0)
    assert memory[:BESIDE].isnan().all()
    assert memory[-BESIDE:].isnan().all()


def flat(x: Tensor) -> Tensor:
    """The numbers as they lie in memory from the first one on, as a kernel takes them that ignores strides."""
    return torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1), x.storage_offset())


def ignores_strides(call: AttentionCall) -> Tensor:
    return rounded_oracle(replace(call, k=flat(call.k)))


def needs_contiguous(call: AttentionCall) -> Tensor:
    if not call.k.is_contiguous():
        raise ValueError("k is not contiguous")
    return rounded_oracle(call)


def multiplies_by_zero(call: AttentionCall) -> Tensor:
    """The row after the last one of v counts with a weight of zero: NaN times 0 is NaN."""
    past = call.v.storage_offset() + call.v.numel()
    tail = (
        torch.as_strided(call.v, (1,), (1,), past) if past < call.v.untyped_storage().nbytes() // 4 else torch.zeros(1)
    )
    return rounded_oracle(call) + 0 * tail


@pytest.mark.parametrize(
    ("kernel", "layouts"),
    [
        (rounded_oracle, []), (ignores_strides, [(fused, "is another"), (heads_first, "is another")]),
        (needs_contiguous, [(fused, "does not answer"), (heads_first, "does not answer")]),
        (multiplies_by_zero, [(beside_nan, "is another")]),
    ],
)  # fmt: skip
def test_what_a_kernel_ignores_is_said(
    kernel: Callable[[AttentionCall], Tensor], layouts: list[tuple[Layout, str]]
) -> None:
    words = dict(LAYOUTS)
    notes = layout_notes(Prober(kernel), PLANS, 1e-4)
    assert len(notes) == len(layouts)
    for note, (layout, how) in zip(notes, layouts, strict=True):
        assert note.endswith(words[layout])
        assert how in note


def test_a_kernel_whose_output_depends_on_the_calls_before_is_not_blamed() -> None:
    count = [0]

    def drifting(call: AttentionCall) -> Tensor:
        count[0] += 1
        return rounded_oracle(call) * count[0]

    assert layout_notes(Prober(drifting), PLANS, 1e-4) == ()


def test_inputs_that_lie_elsewhere_are_given_as_they_lie() -> None:
    seen: list[bool] = []

    def kernel(call: AttentionCall) -> Tensor:
        seen.append(call.k.is_contiguous())
        return rounded_oracle(call)

    call = heads_first(PLANS[0].make())
    prober = Prober(kernel)
    first, second = prober(call, as_it_lies=True), prober(call)
    assert seen == [False, False]  # a copy keeps its strides where nothing lies between
    assert first is not None
    assert second is not None
    assert same(first, second)
