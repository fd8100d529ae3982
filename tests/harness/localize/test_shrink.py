from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize import shrink as shrink_module
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import Guard, run_and_repeat
from assay.harness.localize.kernel_runs import measure
from assay.harness.localize.shrink import shrink, source_of, written
from assay.harness.verdict import Finding

CALL = call_of([(40, 30), (26, 60), (9, 0)], (4, 2), 32, torch.float32, "cpu")
ORACLE = "assay.harness.attention.bugs.faults:rounded_oracle"
DIMS = (8, 16, 32, 64)
TOP_LEFT = BY_ID["mask-top-left"].title


def test_the_smallest_call_that_still_fails() -> None:
    kernel = fault("mask-top-left")
    small = shrink(Guard(kernel), CALL, DIMS)
    assert (small.lens_q, small.prefixes) == ([1], [1])  # below that the bug cannot show
    assert (small.q.shape, small.k.shape) == ((1, 1, 8), (2, 1, 8))
    assert small.scale == 8**-0.5
    assert measure(small, kernel(small)).fails


def test_what_the_failure_needs_is_kept() -> None:
    kernel = fault("leak-values-previous", heads=[1], when=lambda new, prefix: new >= 7)
    small = shrink(Guard(kernel), CALL.with_spec(phase="decode", layer=5), DIMS)
    assert len(small.lens_q) == 2
    assert small.lens_q[1] == 7
    assert small.q.shape[1] == 2  # the fault sits in head 1
    assert (small.phase, small.layer) == ("decode", 5)


def test_a_refusal_is_no_failure() -> None:
    faulty = fault("prefix-dropped")

    def picky(call: AttentionCall) -> Tensor:
        if call.q.shape[2] < 32 or call.q.shape[0] < 3:
            raise KernelRefused("too small")
        return faulty(call)

    small = shrink(Guard(picky), CALL, DIMS)
    assert small.q.shape[2] == 32
    assert small.lens_q == [3]


def test_a_call_that_does_not_fail_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="nothing to shrink"):
        shrink(Guard(rounded_oracle), CALL, DIMS)


def reproduction(call: AttentionCall, kernel: Kernel, path: str, finding: Finding) -> str:
    text = written(call, fails_of(kernel))
    assert text is not None
    return source_of([text], Guard(kernel), path)(finding)


def fails_of(kernel: Kernel) -> Callable[[AttentionCall], bool]:
    return lambda call: measure(call, Guard(kernel)(call.clone()).out).fails


def run_test(source: str) -> None:
    """Run a generated test in this process."""
    module: dict[str, Any] = {}
    exec(source, module)
    module["test_the_kernel_is_correct"]()


MODULE = """
from assay.harness.attention.bugs.faults import fault

top_left = fault("mask-top-left")
saturating = fault("values-saturate-fp8-e4m3")

"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of faulty kernels that can be imported."""
    (tmp_path / "faulty_kernels.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "faulty_kernels"


def test_the_generated_test_fails_with_the_kernel_and_passes_with_the_oracle(module: str) -> None:
    kernel = fault("mask-top-left")
    small = shrink(Guard(kernel), call_of([(20, 30), (9, 0)], (4, 2), 64, torch.bfloat16, "cpu", seed=3), DIMS)
    [finding] = diagnose(run_and_repeat(kernel, [small]))
    source = reproduction(small, kernel, f"{module}:top_left", finding)
    assert "call_of([(" in source
    assert "noise" not in source
    imported = {line for line in source.splitlines() if line.startswith(("import", "from"))}
    assert imported == {
        "from dataclasses import replace",
        "import torch",
        "from assay import Mask, assert_correct",
        "from assay.harness.attention.call import CallSpec",
        "from assay.harness.attention.sample_calls import call_of",
    }
    with pytest.raises(AssertionError, match=f'Computes "{TOP_LEFT}"'):
        run_test(source)
    run_test(source.replace(f"{module}:top_left", ORACLE))


@pytest.mark.slow
def test_data_that_is_needed_is_written_into_the_test(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink_module, "_CHANGES", shrink_module._CHANGES[:1])  # what no seed gives
    kernel = fault("values-saturate-fp8-e4m3")
    loud = replace(CALL, v=(CALL.v * 500).bfloat16(), q=CALL.q.bfloat16(), k=CALL.k.bfloat16())
    [finding] = diagnose(run_and_repeat(kernel, [loud]))
    assert written(loud, fails_of(kernel)) is None, "these are too many numbers for a test"
    source = reproduction(shrink(Guard(kernel), loud, DIMS), kernel, f"{module}:saturating", finding)
    assert "AttentionCall(" in source
    with pytest.raises(AssertionError, match=BY_ID["values-saturate-fp8-e4m3"].title):
        run_test(source)
    run_test(source.replace(f"{module}:saturating", ORACLE))


def test_the_head_dim_stays_within_those_that_are_tried() -> None:
    assert shrink(Guard(fault("prefix-dropped")), CALL, (32, 64)).q.shape[2] == 32


def test_padded_rows_shrink_with_their_call() -> None:
    call = replace(CALL.with_spec(padded_rows=20), q=torch.cat([CALL.q, CALL.q[:20]]))

    @declares(features=("padding",))
    def ignores(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        return out.roll(1, 0) if call.spec.padded_rows else out

    small = shrink(Guard(ignores), call, DIMS)
    assert (len(small.lens_q), small.q.shape[2]) == (1, 8)
    assert small.rows == small.lens_q[0]
    assert len(small.q) == small.rows + small.spec.padded_rows
    assert measure(small, ignores(small.clone())).fails
    assert not measure(small, rounded_oracle(small)).fails
    finding = Finding(id="x", title="x", severity="serious", where="", diagnosis="", evidence=(), reproduce="")
    source = reproduction(small, ignores, "mine:ignores", finding)
    found: dict[str, Any] = {}
    exec(source.partition("def test_")[0], found)
    torch.testing.assert_close(rounded_oracle(found["CALL"]), rounded_oracle(small), equal_nan=True)
    assert found["CALL"].features == small.features


def test_a_sequence_without_keys_stays_without() -> None:
    def wrong(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        return out if min(call.lens_k) else torch.zeros_like(out)

    call = call_of([(0, 0), (7, 9), (3, 4)], (4, 2), 64, torch.float32, "cpu")
    smallest = shrink(Guard(wrong, memory=False), call, ())
    assert (smallest.lens_q, smallest.lens_k) == ([0, 1], [0, 1])
