from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.kernels import declaration, declares
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.certify.kernel import CertifiedKernel, certified_kernel, seeded
from assay.harness.certify.op_level import honest
from assay.harness.errors import UsageError


def a_call(seed: int = 0) -> AttentionCall:
    return call_of([(30, 54), (21, 0)], (4, 2), 64, torch.float32, "cpu", seed=seed)


def test_a_kernel_computes_each_call_once_for_all_faults() -> None:
    computed: list[int] = []

    @declares(noise="int8_qk")
    def slow(call: AttentionCall) -> torch.Tensor:
        computed.append(call.layer)
        return torch_sdpa(call)

    kernel, call = CertifiedKernel(slow), a_call()
    for id in ("mask-top-left", "mask-missing"):
        seeded(CATALOGUE[id], kernel)(call)
        seeded(CATALOGUE[id], kernel)(call.clone())
    assert computed == [0]
    assert torch.equal(kernel(call), torch_sdpa(call))
    for other in (a_call(seed=1), call.with_spec(layer=1), call.with_spec(scale=1.0), call.with_spec(mask=Mask(causal=False))):
        before = len(computed)
        assert torch.equal(kernel(other), torch_sdpa(other))
        assert len(computed) == before + 1, "another call"


def test_a_buffer_that_the_kernel_uses_again_spoils_nothing() -> None:
    buffer = torch.empty_like(a_call().q)
    kernel = CertifiedKernel(lambda call: buffer.copy_(torch_sdpa(call)))
    kernel(a_call())
    kernel(a_call(seed=1))
    assert torch.equal(kernel(a_call()), torch_sdpa(a_call()))


def test_a_faulty_kernel_declares_what_the_kernel_declares() -> None:
    declared = declares(phases=("extend",), noise="int8_qk", head_dims=(64,), dtypes=("float16",))
    kernel = CertifiedKernel(declared(lambda call: torch_sdpa(call)))
    found = declaration(seeded(CATALOGUE["identity"], kernel))
    assert (found.phases, found.noise, found.head_dims, found.dtypes) == (("extend",), "int8_qk", (64,), ("float16",))


def test_a_wrong_output_has_the_noise_of_the_kernel() -> None:
    call, fault = a_call(), CATALOGUE["mask-missing"]
    kernel = CertifiedKernel(honest("int8_qk", 1))
    wrong, exact = seeded(fault, kernel)(call).double(), fault.apply(call, oracle(call))
    noise, right = kernel(call) - oracle(call), oracle(call)
    relative = [(a.norm(dim=-1) / b.norm(dim=-1)) for a, b in ((wrong - exact, exact), (noise, right))]
    assert torch.allclose(*relative, rtol=1e-3)


def test_the_candidate_is_pytorchs_attention_unless_one_is_named() -> None:
    kernel = certified_kernel(None)
    assert (kernel.kernel, kernel.name, kernel.code) == (torch_sdpa, "", "")


def test_a_kernel_is_found_by_its_path_and_bound_to_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "certified_mine.py"
    text = "from assay import declares\n\n@declares(noise='fp8_kv')\ndef forward(call):\n    return call.q\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = certified_kernel("certified_mine:forward")
    assert (found.name, found.backend, found.declared.noise) == ("certified_mine:forward", "certified_mine:forward", "fp8_kv")
    file.write_text(text + "\n")
    monkeypatch.delitem(sys.modules, "certified_mine")
    assert certified_kernel("certified_mine:forward").code != found.code


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("http://localhost:1", "--candidate is the URL http://localhost:1"),
        ("triton", "--candidate: no kernel is named 'triton'"),
        ("no.such:kernel", "--candidate: kernel 'no.such:kernel' cannot be imported"),
    ],
)
def test_what_is_no_kernel_is_a_usage_error(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        certified_kernel(name)
    assert "What to do" in str(error.value)
