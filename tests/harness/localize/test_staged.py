from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.sample_calls import call_of
from assay.harness.errors import AssayError
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import run_and_repeat
from assay.harness.localize.staged import diagnose_kernel, smallest_of_each
from assay.harness.verdict import Finding

LAYERS = 3
LENS = [[(24, 0)], [(190, 0)], [(9, 64)], [(49, 46)], [(5, 3), (9, 20)], [(30, 0), (12, 40)]]
CALLS = [
    call_of(lens, (4, 2), 16, torch.float32, "cpu", seed=layer * len(LENS) + i).with_spec(layer=layer)
    for layer in range(LAYERS)
    for i, lens in enumerate(LENS)
]


class Counted:
    """A kernel that remembers the calls that it was given."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.lens: list[tuple[int, int]] = []
        """Rows of q and of k of each call."""

    def __call__(self, call: AttentionCall) -> Tensor:
        self.lens.append((call.q.shape[0], call.k.shape[0]))
        return self.kernel(call)


def test_the_smallest_calls_give_the_name_before_any_other_is_run() -> None:
    kernel = Counted(fault("mask-top-left"))
    seen: list[tuple[int, str]] = []
    *_, first_s = diagnose_kernel(kernel, CALLS, on_first=lambda findings: seen.append((len(kernel.lens), findings[0].id)))
    assert seen == [(2 * LAYERS, "mask-top-left")]
    assert set(kernel.lens[: 2 * LAYERS]) == {(24, 24), (14, 37)}
    assert first_s is not None
    assert len(kernel.lens) == 3 * len(CALLS), "all others follow, and each twice more"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["mask-top-left", "leak-values-previous", "scale-missing", "mask-missing"])
def test_the_findings_are_those_of_running_all_calls(name: str) -> None:
    kernel = fault(name, layers=[1], heads=[2])
    _, findings, _ = diagnose_kernel(kernel, CALLS, "assay replay pack")
    assert set(findings) == set(diagnose(run_and_repeat(kernel, CALLS), "assay replay pack"))
    [finding] = findings
    assert finding.id == name
    assert "layer 1 of 3, head 2 of 4" in finding.where


def test_a_bug_that_only_larger_calls_show_is_found_after_them() -> None:
    early: list[Sequence[Finding]] = []
    calls = [call for call in CALLS if len(call.lens_q) == 1 or call.lens_q[0] == 30]
    _, findings, first_s = diagnose_kernel(fault("leak-keys-values-previous"), calls, on_first=early.append)
    assert (early, first_s) == ([], None)
    assert "(leak across requests)" in findings[0].diagnosis


def test_nothing_computed_is_no_pass_but_the_smallest_may_be_refused() -> None:
    def picky(call: AttentionCall) -> Tensor:
        if call.q.shape[0] < 40:
            raise KernelRefused("too small")
        return rounded_oracle(call)

    _, [finding], _ = diagnose_kernel(picky, CALLS)
    assert finding.diagnosis == "too small"
    small = [call for call in CALLS if call.q.shape[0] < 40]
    with pytest.raises(AssayError, match=f"none of {len(small)} calls"):
        diagnose_kernel(picky, small)


def test_the_smallest_of_each_layer_and_phase_with_and_without_a_prefix() -> None:
    decode = call_of([(1, 30)], (4, 2), 16, torch.float32, "cpu").with_spec(phase="decode")
    chosen = smallest_of_each([*CALLS, decode])
    assert sorted((c.layer, c.phase, any(c.prefixes)) for c in chosen) == sorted(
        [(layer, "extend", prefix) for layer in range(LAYERS) for prefix in (False, True)] + [(0, "decode", True)]
    )
    assert {c.k.shape[0] for c in chosen} == {24, 37, 31}
