"""Triton kernels as authors write them, without declarations: interpreted, wrong ones are caught and read, right ones pass."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.kernels import Declaration
from assay.harness.attention.matrix import Case
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import matrix_of
from assay.harness.evidence.kernel_result import KernelResult

SENTENCES = {
    "top_left": "causal mask aligned top-left",
    "total_not_rescaled": "online softmax over tiles of 32 keys: the denominator is not rescaled when the maximum rises",
    "acc_not_rescaled": "online softmax over tiles of 32 keys: the numerator is not rescaled when the maximum rises",
    "tiles_lost": "query i does not see keys with j // 32 > i // 32",
    "store_not_masked": "beyond the end of out_ptr (textbook_triton.py, line",
    "head_not_divided": "read beyond the end of K and V",
}
"""What is said of the wrong ones, somewhere in the findings."""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    interpret_without_gpu()
    return importlib.import_module("textbook_triton")


def some(every: int, dtype: str = "float16") -> list[Case]:
    return [case for case in matrix_of(Declaration(), dtypes=[dtype]) if not case.beyond][::every]


def said(result: KernelResult) -> str:
    return " ".join(f"{one.diagnosis} {one.operator} {' '.join(one.evidence)}" for one in result.findings)


def test_there_are_twelve(kernels: ModuleType) -> None:
    assert len(kernels.CORRECT) + len(kernels.WRONG) == 12
    assert set(SENTENCES) <= {kernel.__name__ for kernel in kernels.WRONG}


def test_a_right_one_passes(kernels: ModuleType) -> None:
    result = check("textbook_triton:varlen", cases=some(24))
    assert result.findings == ()
    assert not result.failing


def test_one_that_writes_beyond_its_output_is_located(kernels: ModuleType) -> None:
    result = check("textbook_triton:store_not_masked", cases=some(24), read_out=0)
    assert result.exit_code == 1
    assert SENTENCES["store_not_masked"] in said(result)


def test_one_that_reads_beyond_k_and_v_is_described(kernels: ModuleType) -> None:
    cases = [case for case in some(1) if case.condition["heads"] == "MQA 4/1" and case.condition["phase"] == "decode"]
    result = check("textbook_triton:head_not_divided", cases=cases[:2], read_out=0)
    assert "an output is not finite" not in result.summary()
    assert result.findings[0].diagnosis == (
        "the kernel reads outside of its inputs: q heads 1, 2 and 3 read beyond the end of K and V"
    )
    assert "q heads 1, 2 and 3 read beyond the end of K and V" in result.summary()


@pytest.mark.parametrize("name", ["varlen", "paged", "split_kv"])
def test_right_ones_pass(kernels: ModuleType, name: str) -> None:
    assert check(f"textbook_triton:{name}", cases=some(8)).findings == ()


@pytest.mark.parametrize("name", sorted(SENTENCES))
def test_wrong_ones_are_read_exactly(kernels: ModuleType, name: str) -> None:
    result = check(f"textbook_triton:{name}", cases=some(8))
    assert result.exit_code == 1
    assert SENTENCES[name] in said(result)


@pytest.mark.parametrize("name", ["head_modulo", "last_page_lost", "parts_averaged"])
def test_other_wrong_ones_are_caught(kernels: ModuleType, name: str) -> None:
    assert check(f"textbook_triton:{name}", cases=some(8), read_out=0).exit_code == 1
