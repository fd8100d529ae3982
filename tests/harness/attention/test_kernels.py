from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Outputs
from assay.harness.attention.declaration import declaration, declares
from assay.harness.attention.oracle import oracle
from assay.harness.attention.published import native_backend
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import assert_correct, check
from assay.harness.errors import AssayError, UsageError
from assay.harness.localize.guard import compute, run_calls

CALL = call_of([(5, 3)], (4, 2), 16, torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("name", "phases"), [("sage_attn", ("extend",)), ("assay.harness.attention.oracle:oracle", ("extend", "decode"))]
)
def test_a_published_name_and_a_path_are_loaded_with_their_declarations(name: str, phases: tuple[str, ...]) -> None:
    assert {"sage_attn", "sage_attn_as_shipped"} <= set(kernels.published())
    assert declaration(kernels.load(name)).phases == phases


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_kernel", "published are .*sage_attn"),
        ("no.such.module:kernel", "cannot be imported"),
        ("assay.harness.attention.oracle:no_such_function", "cannot be imported"),
        ("assay.harness.attention.published:GROUP", "expected a function"),
    ],
)
def test_a_missing_kernel_is_refused(name: str, says: str) -> None:
    with pytest.raises(KernelRefused, match=says):
        kernels.load(name)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("sglang:triton", "triton"), ("sglang:fa3@64", "fa3@64"), ("sglang.srt:f", ""), ("sglang", ""), ("mine:triton", "")],
)
def test_an_engine_and_a_colon_name_a_backend_of_the_engine(name: str, backend: str) -> None:
    native = native_backend(name)
    assert (native[1] if native else "") == backend


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        *(
            ({"kernels": (pattern,)}, "which any kernel's name matches")
            for pattern in ("", ".", ".*", "[a-z]", "_attend|", "aten|:")
        ),
        ({"kernels": ("(",)}, "which is not a regular expression"),
        ({"phases": ("prefill",)}, "prefill"),
        ({"phases": ("decode",), "prefix": False}, "a decode call has a cached prefix"),
        ({"head_dims": ()}, "expected a tuple of at least one"),
        ({"features": ("relative bias",)}, r"declares the features \['relative bias'\]; expected some of window, softcap"),
        ({"noise": "int4"}, "no noise family is called 'int4'"),
    ],
)
def test_a_declaration_that_no_kernel_can_have_is_refused(declared: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        declares(**declared)


def test_a_path_is_not_a_url() -> None:
    assert kernels.is_path("mine.attn:forward")
    assert not kernels.is_path("http://127.0.0.1:30000")
    assert not kernels.is_path("triton")


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda out: out.float(), r"torch.float32 \[5, 4, 16\] on cpu"),
        (lambda out: out[1:], r"torch.bfloat16 \[4, 4, 16\] on cpu"),
        (lambda out: out.to("meta"), r"torch.bfloat16 \[5, 4, 16\] on meta"),
        (lambda out: None, "NoneType"),
    ],
    ids=["dtype", "shape", "device", "type"],
)
def test_an_output_that_breaks_the_contract_is_refused_everywhere(returned: Callable[[Tensor], Tensor], found: str) -> None:
    def breaks(call: AttentionCall) -> Tensor:
        return returned(rounded_oracle(call))

    says = rf"returned {found}, expected torch.bfloat16 \[5, 4, 16\] on cpu"
    with pytest.raises(KernelRefused, match=says):
        kernels.run_kernel("mine", breaks, CALL)
    with pytest.raises(AssayError, match=says):
        assert_correct(breaks, CALL)
    with pytest.raises(AssayError, match=says):
        run_calls(breaks, [CALL], repeats=0)


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("no_such_kernel", "see assay backends"),
        ("mine:forward", "run in the folder that contains mine,"),
        ("no.such.module:kernel", "add that folder to PYTHONPATH"),
        ("needs_more:forward", "install a_package_of_its_own"),
        ("needs_another:forward", "correct the import, or install the version of torch that it was written for"),
        ("assay.harness.attention.oracle:no_such_function", "check the name of the function"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, do: str
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_of_its_own.core\n")
    (tmp_path / "needs_another.py").write_text("from torch import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as error:
        kernels.find("--candidate", name)
    assert error.value.found.startswith("--candidate: ")
    assert do in error.value.do


def test_a_missing_package_is_neither_a_breach_nor_a_regression() -> None:
    def lazy(call: AttentionCall) -> Tensor:
        from a_package_of_its_own import core  # type: ignore[import-not-found]

        return core.attend(call)  # type: ignore[no-any-return]

    runs: list[Callable[[], object]] = [
        lambda: check(lazy, phases=["decode"], dtypes=["float32"]),
        lambda: assert_correct(lazy, CALL),
    ]
    for run in runs:
        with pytest.raises(UsageError, match="No module named 'a_package_of_its_own'") as error:
            run()
        assert error.value.do == "install a_package_of_its_own"


def test_titles_name_the_package_and_the_interpreter() -> None:
    sage = kernels.load("sage_attn")
    assert kernels.title("sage_attn", sage, interpreted=True) == "sageattention 1.0.6 (Triton interpreter)"

    def mine(call: AttentionCall) -> object:
        return call

    assert kernels.title("mine:mine", mine, interpreted=True) == "mine:mine"  # type: ignore[arg-type]


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_module_that_ends_the_process_is_no_kernel(leave: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"leaving_{leave[:2]}"
    (tmp_path / f"{module}.py").write_text(f"import os, sys\n{leave}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelRefused, match="its module ends the process with status 0"):
        kernels.load(f"{module}:kernel")


def test_a_module_may_fork_a_process_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forking = "import os\n\npid = os.fork()\nif pid == 0:\n    os._exit(7)\nstatus = os.waitpid(pid, 0)[1]\n"
    (tmp_path / "forking.py").write_text(f"{forking}\n\ndef kernel(call):\n    return os.waitstatus_to_exitcode(status)\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernel: Any = kernels.load("forking:kernel")
    assert kernel(None) == 7


def test_a_kernel_may_return_its_log_sum_exp_too() -> None:
    call = CALL
    lse = torch.zeros(call.q.shape[:2])
    both = lambda call: Outputs(oracle(call).to(call.q.dtype), lse)  # noqa: E731
    assert torch.equal(kernels.run_kernel("k", both, call), oracle(call).to(call.q.dtype))
    with pytest.raises(KernelRefused, match=r"k returned torch\.float64"):
        kernels.run_kernel("k", lambda call: Outputs(oracle(call).double()), call)


def test_a_call_with_a_feature_that_is_not_declared_is_refused_by_name() -> None:
    call = CALL.with_spec(softcap=30.0, sinks=(0.0,) * CALL.q.shape[1])
    plain: Kernel = lambda call: call.q.clone()  # noqa: E731
    with pytest.raises(KernelRefused, match="plain does not declare softcap, sinks"):
        kernels.run_kernel("plain", plain, call)
    capped = declares(features=("softcap",))(lambda call: call.q.clone())
    with pytest.raises(KernelRefused, match="capped does not declare sinks"):
        kernels.run_kernel("capped", capped, call)
    with pytest.raises(KernelRefused, match="the kernel does not declare sinks"):
        compute(capped, call)
    assert declaration(capped).excludes(call) == "sinks"
    both = declares(features=("softcap", "sinks"))(lambda call: call.q.clone())
    assert torch.equal(kernels.run_kernel("both", both, call), call.q)


def test_the_path_of_a_file_is_answered_with_the_module_to_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def forward(call): ...\n")
    with pytest.raises(UsageError) as raised:
        kernels.find("", f"{tmp_path}/mine.py:forward")
    assert raised.value.do == f"kernels are named as modules: in {tmp_path}, write it as mine:forward"
