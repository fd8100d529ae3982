"""How many threads assay and the kernel under test run on."""

from __future__ import annotations

import sys

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import matrix_of
from assay.harness.checks.observed import Reader
from assay.harness.localize import kernel_runs
from assay.harness.localize.threads import few_threads

SMALL = [call_of([(5, 3)], (4, 2), 16, torch.bfloat16, "cpu")]


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("set_by_user", "of_kernel"), [("2", 2), ("", 1)])
@pytest.mark.usefixtures("few_experiments")
def test_only_the_kernel_keeps_the_threads_that_the_user_sets(
    set_by_user: str, of_kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    of_kernels: set[int] = set()
    of_assay: set[int] = set()
    wrong = fault("mask-top-left")

    def kernel(call: AttentionCall) -> Tensor:
        of_kernels.add(torch.get_num_threads())
        return wrong(call)

    measured = kernel_runs.oracle
    monkeypatch.setattr(kernel_runs, "oracle", lambda *given: of_assay.add(torch.get_num_threads()) or measured(*given))
    made, reader = matrix_of(Declaration(), phases=["extend"], dtypes=["float32"], head_dims=[64])[:2], Reader(0.2)
    result = check(kernel, cases=made, read_out=reader)
    assert result.findings[0].id == "mask-top-left"
    assert reader.last is not None
    assert of_kernels == {of_kernel}
    assert of_assay == {1}
    assert torch.get_num_threads() == 2


def test_blas_has_one_thread_while_calls_are_small() -> None:
    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(2, "blas"):
        before = threads()
        with few_threads(SMALL):
            assert threads() == {1}
        assert threads() == before != {1}


@pytest.mark.usefixtures("two_threads")
def test_a_large_call_keeps_all_threads() -> None:
    large = call_of([(2048, 2560)], (1, 1), 8, torch.float32, "cpu")
    with few_threads([large]):
        assert torch.get_num_threads() == 2
    with few_threads(SMALL), few_threads([large]):
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_an_environment_without_threadpoolctl_runs_on_one_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with few_threads(SMALL):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
