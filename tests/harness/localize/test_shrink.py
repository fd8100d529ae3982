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
from assay.harness.attention.matrix_features import asking
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.kernel_matrix import named
from assay.harness.errors import AssayError
from assay.harness.localize import shrink as shrink_module
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.faults import faults_of
from assay.harness.localize.guard import Guard, attempt, run_and_repeat
from assay.harness.localize.kernel_runs import KernelRun, measure
from assay.harness.localize.lse import LSE_WRONG
from assay.harness.localize.shrink import shrink, smallest_call, source_of, written
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
import torch

from assay import Mask, declares
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import Outputs
from assay.harness.attention.oracle import log_sum_exp

top_left = fault("mask-top-left")
saturating = fault("values-saturate-fp8-e4m3")

@declares(features=("lse", "window", "softcap", "sinks"))
def lse(call):
    # Forgets the window in log-sum-exps.
    return Outputs(rounded_oracle(call), log_sum_exp(call.with_spec(mask=Mask())).float())


def raises(call):
    # Has no room for three sequences.
    if len(call.lens_q) > 2:
        raise RuntimeError(f"a grid of {len(call.lens_q)}")
    return rounded_oracle(call)


def scales_q(call):
    out = rounded_oracle(call)
    call.q.mul_(call.scale)
    return out


@declares(features=("padding",))
def cuts(call):
    # Returns no padded rows.
    return rounded_oracle(call)[: call.rows]


def stores_tiles(call):
    # Stores 16 rows where the batch has fewer.
    out = torch.empty_like(call.q)
    out.copy_(rounded_oracle(call))
    rows = len(call.q)
    torch.as_strided(out, (max(rows, 16), *out.shape[1:]), out.stride(), out.storage_offset())[rows:] = 0
    return out


@declares(features=("lse", "window", "softcap", "sinks", "padding", "stored_kv"))
def right(call):
    out, lse = torch.zeros_like(call.q), torch.zeros(call.q.shape[:2])
    out[: call.rows], lse[: call.rows] = rounded_oracle(call)[: call.rows], log_sum_exp(call)[: call.rows].float()
    return Outputs(out, lse)


@declares(features=("stored_kv",))
def scales_cache(call):
    call.stored.k_scale.mul_(2)
    return rounded_oracle(call)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of faulty kernels that can be imported."""
    (tmp_path / "faulty_kernels.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "faulty_kernels"


@pytest.mark.usefixtures("few_experiments")
def test_the_generated_test_fails_with_the_kernel_and_passes_with_the_oracle(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.checks.check._ASSERTED_S", 0.0)
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
    assert fails_of(ignores)(found["CALL"])
    assert (found["CALL"].features, found["CALL"].q.shape) == (small.features, small.q.shape)


def test_a_sequence_without_keys_stays_without() -> None:
    def wrong(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        return out if min(call.lens_k) else torch.zeros_like(out)

    call = call_of([(0, 0), (7, 9), (3, 4)], (4, 2), 64, torch.float32, "cpu")
    smallest = shrink(Guard(wrong, memory=False), call, ())
    assert (smallest.lens_q, smallest.lens_k) == ([0, 1], [0, 1])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kernel", "fault", "asked", "lens", "said"),
    [
        ("lse", LSE_WRONG, "window 17, softcap 1.5, sinks near 4", [(18, 0)], "window 17, log-sum-exps asked for"),
        ("raises", "raised RuntimeError", "", [(1, 0)] * 3, "head_dim 32, float32"),
        ("scales_q", "input-written", "", [(1, 0)], "head_dim 32, float32"),
        ("stores_tiles", "outside", "", [(1, 0)], "head_dim 32, float32"),
        ("cuts", "returned", "300 padded rows", [(1, 0)], "head_dim 32, float32, 1 padded rows"),
        ("scales_cache", "input-written", "K and V in e4m3 per head", [(1, 0)], "float32, K and V in e4m3 per tensor"),
    ],
)
def test_calls_with_another_fault_are_shrunk_and_shown_alike(
    module: str, kernel: str, fault: str, asked: str, lens: list[tuple[int, int]], said: str
) -> None:
    path, call = f"{module}:{kernel}", CALL
    for value in filter(None, asked.split(", ")):
        call = asking(value)(call)
    guard = Guard(named(path)[1])
    try:
        why = []
        attempt(guard, call)
    except KernelRefused as refusal:
        why = [str(refusal)]
    known = next(test for name, test in faults_of(why).items() if name.startswith(fault))
    small = smallest_call(guard, KernelRun(()), [], path, (call, known))
    finding = Finding(id="contract-broken", title="wrong", severity="serious", where="here", diagnosis="it is", reproduce="")
    assert f"new+prefix {' '.join(f'{new}+{prefix}' for new, prefix in lens)}, 1 q head on 1 kv head" in small.words
    assert small.words.endswith(said)
    with pytest.raises((AssertionError, AssayError)):
        run_test(small.test([finding]))
    run_test(small.test([finding]).replace(path, "faulty_kernels:right"))
